#pragma once

// A prefill and a decode side in one process, joined by a real transport and by an in-memory
// control channel that can hold messages back.

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "engine/base/bounded_queue.h"
#include "engine/base/mutex.h"
#include "kvtransfer/receiver.h"
#include "kvtransfer/sender.h"
#include "kvtransfer/transfer_plan.h"
#include "tests/support/test_fingerprint.h"
#include "tests/unit/kvtransfer/test_pool.h"

namespace baton::kvtransfer {

using baton::testing::TestFingerprint;

inline constexpr absl::Duration kPatience = absl::Seconds(20);

// Passes messages on at once, or keeps them while held. Thread-safe.
class MemoryLink : public PeerLink {
 public:
  using Deliver = std::function<void(const worker::v1::PeerMessage&)>;

  // Waits for a delivery that is under way.
  void Connect(Deliver deliver) {
    base::MutexLock delivery(&delivery_mutex_);
    deliver_ = std::move(deliver);
  }
  bool Send(worker::v1::PeerMessage message) override {
    {
      base::MutexLock lock(&mutex_);
      if (!message.has_heartbeat()) seen_.push_back(message);
      if (hold_) {
        held_.push_back(std::move(message));
        return true;
      }
    }
    base::MutexLock delivery(&delivery_mutex_);
    if (deliver_) deliver_(message);
    return true;
  }
  void Close() override { closed_.store(true); }

  void Hold() {
    base::MutexLock lock(&mutex_);
    hold_ = true;
  }
  void LetGo() {
    std::vector<worker::v1::PeerMessage> messages;
    {
      base::MutexLock lock(&mutex_);
      hold_ = false;
      messages.swap(held_);
    }
    base::MutexLock delivery(&delivery_mutex_);
    for (const auto& message : messages) {
      if (deliver_) deliver_(message);
    }
  }
  // Messages sent so far (heartbeats aside) for which `matches` holds.
  template <typename Predicate>
  int Count(Predicate matches) const {
    base::MutexLock lock(&mutex_);
    int count = 0;
    for (const auto& message : seen_) count += matches(message) ? 1 : 0;
    return count;
  }
  bool closed() const { return closed_.load(); }

 private:
  base::Mutex delivery_mutex_;
  Deliver deliver_ ABSL_GUARDED_BY(delivery_mutex_);
  mutable base::Mutex mutex_;
  bool hold_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<worker::v1::PeerMessage> held_ ABSL_GUARDED_BY(mutex_);
  std::vector<worker::v1::PeerMessage> seen_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> closed_{false};
};

inline kv::KvLayout TestLayout(kv::KvFormat format, int num_blocks, int tp = 1) {
  return {.num_layers = 3,
          .num_kv_heads = 2,
          .head_dim = 16,
          .num_blocks = num_blocks,
          .format = format,
          .tp = tp};
}

// Ranks of the prefill and of the decode side.
struct TestRanks {
  int prefill = 1;
  int decode = 1;
};

// The decode side: pool full of 0xee, events in a queue.
class DecodeSide {
 public:
  DecodeSide(const std::string& transport, const kv::KvLayout& layout)
      : layout_(layout), pool_(transport, layout.pool_bytes()) {
    pool_.Fill(0xee);
    ReceiverOptions options;
    options.pool = pool_.host();
    options.device_pool = pool_.device();
    options.layout = layout;
    options.fingerprint = TestFingerprint(layout);
    options.incarnation = "decode-incarnatn";
    options.transports = {NameOf(transport)};
    auto receiver = Receiver::Create(
        options, [this](ReceiverEvent event) { events_.TryPush(std::move(event)); });
    EXPECT_TRUE(receiver.ok()) << receiver.status();
    receiver_ = *std::move(receiver);
  }

  worker::v1::Handoff Reserve(int prompt_tokens,
                              int first_missing,
                              std::vector<kv::BlockId> blocks) {
    Reservation reservation;
    reservation.prompt_tokens = prompt_tokens;
    reservation.first_missing_block = first_missing;
    reservation.blocks = std::move(blocks);
    return receiver_->Reserve(std::move(reservation));
  }
  ReceiverEvent NextEvent() {
    std::optional<ReceiverEvent> event = events_.PopFor(kPatience);
    EXPECT_TRUE(event.has_value()) << "no event in time";
    return event.value_or(ReceiverEvent());
  }
  size_t events_waiting() const { return events_.size(); }

  Receiver& receiver() { return *receiver_; }
  void DestroyReceiver() { receiver_.reset(); }
  TestPool& pool() { return pool_; }
  const kv::KvLayout& layout() const { return layout_; }

 private:
  kv::KvLayout layout_;
  TestPool pool_;
  base::BoundedQueue<ReceiverEvent> events_{1024};
  std::unique_ptr<Receiver> receiver_;
};

// Both sides. The prefill pool holds random bytes.
class HandoffPair {
 public:
  HandoffPair(const std::string& transport,
              kv::KvFormat format,
              std::function<void(SenderOptions*)> change = nullptr,
              const TestRanks& ranks = {})
      : layout_(TestLayout(format, 24, ranks.prefill)),
        pool_(transport, layout_.pool_bytes()),
        decode_(transport, TestLayout(format, 32, ranks.decode)) {
    std::mt19937 random(1);
    source_.resize(pool_.size());
    for (uint8_t& byte : source_) byte = static_cast<uint8_t>(random());
    pool_.Write(source_);
    SenderOptions options;
    options.pool = pool_.host();
    options.device_pool = pool_.device();
    options.layout = layout_;
    options.stall_timeout_min = absl::Seconds(20);  // a busy test machine is no stall
    options.reply_timeout = absl::Seconds(20);
    if (change) change(&options);
    options.hello = PrefillHello();
    auto hello = decode_.receiver().OnPeerHello(options.hello, &to_prefill_, &session_);
    EXPECT_TRUE(hello.ok()) << hello.status();
    decode_hello_ = *hello;
    auto sender = Sender::Create(options, *hello, &to_decode_);
    EXPECT_TRUE(sender.ok()) << sender.status();
    sender_ = *std::move(sender);
    to_decode_.Connect(
        [this](const auto& message) { decode_.receiver().OnMessage(session_, message); });
    to_prefill_.Connect([this](const auto& message) { sender_->OnMessage(message); });
  }
  ~HandoffPair() {
    to_prefill_.Connect(nullptr);
    sender_.reset();
    to_decode_.Connect(nullptr);
    decode_.DestroyReceiver();
  }

  worker::v1::Hello PrefillHello() const {
    worker::v1::Hello hello;
    hello.set_incarnation("prefill-incarntn");
    hello.set_role("prefill");
    *hello.mutable_fingerprint() = TestFingerprint(layout_);
    return hello;
  }

  // Begins a hand-over whose result goes into results(id).
  TransferId Begin(const worker::v1::Handoff& handoff,
                   int prompt_tokens,
                   int first_missing,
                   std::vector<kv::BlockId> peer_blocks) {
    TransferSpec spec;
    spec.handoff = handoff;
    spec.prompt_tokens = prompt_tokens;
    spec.first_missing_block = first_missing;
    spec.peer_blocks = std::move(peer_blocks);
    spec.on_done = [this](TransferResult result) { results_.TryPush(std::move(result)); };
    return sender_->Begin(std::move(spec));
  }
  TransferResult NextResult() {
    std::optional<TransferResult> result = results_.PopFor(kPatience);
    EXPECT_TRUE(result.has_value()) << "no result in time";
    return result.value_or(TransferResult());
  }
  size_t results_waiting() const { return results_.size(); }

  // The decode pool must hold our blocks at `peer_blocks` from `first_missing` on, and 0xee
  // everywhere else.
  void ExpectLanded(int prompt_tokens,
                    int first_missing,
                    const std::vector<kv::BlockId>& our_blocks,
                    const std::vector<kv::BlockId>& peer_blocks) {
    std::vector<uint8_t> want(decode_.pool().size(), 0xee);
    const HandoffShape shape{prompt_tokens, first_missing};
    if (first_missing < shape.num_blocks()) {
      const UnitRect all{static_cast<uint32_t>(first_missing),
                         static_cast<uint32_t>(shape.num_blocks()),
                         0,
                         static_cast<uint32_t>(layout_.num_layers),
                         0,
                         static_cast<uint32_t>(layout_.num_kv_heads)};
      const absl::Span<const kv::BlockId> ours = our_blocks, peers = peer_blocks;
      CopyRanges(source_.data(), RangesOf(all, shape, layout_, ours.subspan(first_missing)),
                 want.data(), RangesOf(all, shape, decode_.layout(), peers.subspan(first_missing)));
    }
    EXPECT_TRUE(want == decode_.pool().Read());
  }

  // Three blocks, pushed layer by layer, land where they belong and nothing else does.
  void ExpectThreeBlocksLand() {
    const std::vector<kv::BlockId> ours = {3, 7, 1}, peers = {9, 4, 20};
    const TransferId id = Begin(decode_.Reserve(150, 0, peers), 150, 0, peers);
    for (int layer = 0; layer < 3; ++layer) sender_->Push(id, 0, 3, layer, layer + 1, ours);
    sender_->Commit(id, {});
    const ReceiverEvent event = decode_.NextEvent();
    ASSERT_EQ(event.kind, ReceiverEvent::Kind::kLanded) << event.status;
    ExpectLanded(150, 0, ours, peers);
  }

  Sender& sender() { return *sender_; }
  void DestroySender() {
    to_prefill_.Connect(nullptr);
    sender_.reset();
  }
  DecodeSide& decode() { return decode_; }
  SessionId session() const { return session_; }
  const kv::KvLayout& layout() const { return layout_; }
  MemoryLink& to_decode() { return to_decode_; }
  MemoryLink& to_prefill() { return to_prefill_; }

 private:
  kv::KvLayout layout_;
  TestPool pool_;
  std::vector<uint8_t> source_;  // what it holds
  base::BoundedQueue<TransferResult> results_{1024};
  MemoryLink to_decode_;
  MemoryLink to_prefill_;
  DecodeSide decode_;
  worker::v1::Hello decode_hello_;
  SessionId session_ = 0;
  std::unique_ptr<Sender> sender_;
};

}  // namespace baton::kvtransfer
