#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include <gtest/gtest.h>

#include "kvtransfer/transport.h"
#include "tests/unit/kvtransfer/handoff_pair.h"

namespace baton::kvtransfer {

// A peer that speaks the protocol by hand, and wrongly.
class RawPeer {
 public:
  explicit RawPeer(DecodeSide* decode) : decode_(decode) {
    worker::v1::Hello hello;
    hello.set_incarnation("raw");
    hello.set_role("prefill");
    *hello.mutable_fingerprint() = TestFingerprint(decode->layout());
    answer_ = *decode->receiver().OnPeerHello(hello, &link_, &session_);
    pool_.emplace(answer_.transports(0).name(), decode->layout().pool_bytes());
    pool_->Fill(0x11);
  }
  ~RawPeer() { decode_->receiver().OnPeerGone(session_); }

  absl::Status Connect() {
    ConnectOptions options;
    options.pool = pool_->host();
    options.device_pool = pool_->device();
    options.layout = decode_->layout();
    options.timeout = kPatience;
    auto transport = ConnectTo(answer_.transports(0), options);
    if (!transport.ok()) return transport.status();
    transport_ = *std::move(transport);
    return absl::OkStatus();
  }
  GrantFrame Open(const worker::v1::Handoff& handoff) {
    transport_->Open({handoff.reservation_id(), handoff.epoch()});
    return std::get<GrantFrame>(NextReply());
  }
  // Sends the unit and waits until it has been consumed.
  void Put(const UnitFrame& unit, kv::BlockId block = 0) {
    const HandoffShape shape{64, 0};
    const std::vector<kv::BlockId> table(8, block);
    UnitRect rect = unit.rect;
    rect.layer_end = std::min<uint32_t>(rect.layer_end, 3);
    const auto ranges = RangesOf(rect, shape, decode_->layout(), table);
    transport_->Put(unit, ranges, ranges);
    NextReply();
  }
  UnitFrame Unit(const worker::v1::Handoff& handoff, uint32_t sequence, uint32_t layer) {
    UnitFrame unit;
    unit.reservation_id = handoff.reservation_id();
    unit.epoch = handoff.epoch();
    unit.sequence = sequence;
    unit.rect = {0, 1, layer, layer + 1, 0, 2};
    unit.bytes = BytesOf(unit.rect, {64, 0}, decode_->layout());
    return unit;
  }
  void Commit(const worker::v1::Handoff& handoff, uint32_t units, uint64_t bytes) {
    worker::v1::PeerMessage message;
    *message.mutable_commit()->mutable_handoff() = handoff;
    message.mutable_commit()->set_units_sent(units);
    message.mutable_commit()->set_bytes(bytes);
    decode_->receiver().OnMessage(session_, message);
  }
  void Quiesced(const worker::v1::Handoff& handoff) {
    worker::v1::PeerMessage message;
    *message.mutable_quiesced()->mutable_handoff() = handoff;
    decode_->receiver().OnMessage(session_, message);
  }
  PutTransport::Reply NextReply() {
    std::vector<PutTransport::Reply> replies;
    while (replies.empty()) {
      EXPECT_TRUE(transport_->Write().ok());
      const absl::Status status = transport_->Read(&replies);
      if (!status.ok()) {
        ADD_FAILURE() << status;
        return AckFrame{};
      }
    }
    return replies[0];
  }
  void HangUp() { transport_.reset(); }

  PutTransport& transport() { return *transport_; }
  const worker::v1::Hello& answer() const { return answer_; }
  MemoryLink& link() { return link_; }
  SessionId session() const { return session_; }

 private:
  DecodeSide* decode_;
  MemoryLink link_;
  SessionId session_ = 0;
  worker::v1::Hello answer_;
  std::optional<TestPool> pool_;
  std::unique_ptr<PutTransport> transport_;
};

}  // namespace baton::kvtransfer
