// The decode side of a data connection on any bytes. First byte: bit 0, the peer writes by itself
// (shm), else its bytes come in the stream (tcp); bit 1, the checks of frames stay as they are,
// else they are made right, so that what is behind them is reached. Whatever is sent, nothing
// outside of the reserved block is written, and every hand-over ends once.

#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/log.h"
#include "kvtransfer/data_connection.h"
#include "kvtransfer/receiver_table.h"

namespace baton::kvtransfer {
namespace {

constexpr uint64_t kReservation = 7;
constexpr kv::BlockId kBlock = 2;
constexpr uint8_t kUntouched = 0xee;
constexpr size_t kMaxInput = size_t{128} << 10;  // what a socket's buffer takes at once

kv::KvLayout Layout() {
  return {.num_layers = 2,
          .num_kv_heads = 1,
          .head_dim = 4,
          .num_blocks = 4,
          .format = kv::KvFormat::kFp8};
}

class FuzzListener : public PutListener {
 public:
  explicit FuzzListener(bool peer_writes) : peer_writes_(peer_writes) {}
  absl::string_view name() const override { return "fuzz"; }
  std::string address() const override { return ""; }
  bool peer_writes() const override { return peer_writes_; }
  int fd() const override { return -1; }
  absl::StatusOr<UniqueFd> Accept() override { return absl::UnavailableError("none"); }
  absl::Status Welcome(int fd) override { return absl::OkStatus(); }

 private:
  bool peer_writes_;
};

class FuzzSink : public DataSink {
 public:
  FuzzSink() : table_(Layout(), "decode") {
    Reservation reservation;
    reservation.prompt_tokens = 40;
    reservation.blocks = {kBlock};
    table_.Reserve(std::move(reservation), kReservation);
  }
  absl::StatusOr<uint64_t> Attach(const PutListener& listener, absl::string_view token) override {
    if (token != "t") return absl::PermissionDeniedError("token");
    return uint64_t{1};
  }
  GrantFrame Open(uint64_t session, const OpenFrame& open, const PutListener& listener) override {
    return table_.Open(session, open, listener.peer_writes(), "fuzz");
  }
  std::optional<std::vector<ByteRange>> BeginUnit(uint64_t session,
                                                  const UnitFrame& unit) override {
    return table_.BeginUnit(session, unit, absl::ZeroDuration(), &effects_);
  }
  bool Wants(uint64_t reservation_id) override { return table_.Wants(reservation_id); }
  void EndUnit(const UnitFrame& unit, const absl::Status& arrived) override {
    table_.EndUnit(unit, arrived, absl::ZeroDuration(), &effects_);
  }
  void Report(uint64_t session, double bytes_per_second) override {}

  // The session ends; the hand-over must have ended exactly once by then.
  void Finish() {
    table_.SessionQuiet(1, &effects_);
    table_.Revoke(kReservation, "end", &effects_);
    BATON_CHECK(effects_.events.size() == 1 && table_.size() == 0);
  }

 private:
  ReceiverTable table_;
  ReceiverEffects effects_;
};

void CheckPool(const base::Buffer& pool) {
  const kv::KvLayout layout = Layout();
  for (int layer = 0; layer < layout.num_layers; ++layer) {
    for (kv::BlockId block = 0; block < layout.num_blocks; ++block) {
      const uint8_t* bytes = pool.data() + layout.BlockOffset(layer, block);
      for (size_t i = 0; i < layout.block_bytes(); ++i) {
        const bool may_change = block == kBlock && i / layout.row_bytes() % kv::kBlockTokens < 40;
        BATON_CHECK(may_change || bytes[i] == kUntouched, "block=", block, " byte=", i);
      }
    }
  }
}

// Everything that looks like a frame gets the check that fits.
void SignFrames(std::string* bytes) {
  const std::string magic = Encode(OpenFrame{}).substr(0, sizeof(kFrameMagic));
  for (size_t at = bytes->find(magic); at != std::string::npos; at = bytes->find(magic, at + 1)) {
    if (at + kFrameHeaderBytes > bytes->size()) return;
    uint32_t body_bytes;
    std::memcpy(&body_bytes, bytes->data() + at + 8, sizeof(body_bytes));
    if (body_bytes > bytes->size() - at - kFrameHeaderBytes) continue;
    const absl::string_view body(bytes->data() + at + kFrameHeaderBytes, body_bytes);
    const uint32_t check = FrameCheck(bytes->data() + at, body);
    std::memcpy(bytes->data() + at + 12, &check, sizeof(check));
  }
}

void Run(bool peer_writes, const uint8_t* data, size_t size) {
  int ends[2];
  BATON_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
  UniqueFd peer(ends[0]);
  const absl::StatusOr<size_t> sent =
      size == 0 ? absl::StatusOr<size_t>(0) : SendSome(peer.get(), data, size);
  BATON_CHECK(sent.ok());
  shutdown(peer.get(), SHUT_WR);
  base::Buffer pool = *base::Buffer::Allocate(Layout().pool_bytes());
  std::fill(pool.data(), pool.data() + pool.size(), kUntouched);
  FuzzListener listener(peer_writes);
  FuzzSink sink;
  {
    DataConnection connection(UniqueFd(ends[1]), &listener, &sink, &pool, absl::ZeroDuration());
    while (connection.OnReadable().ok()) {
    }
  }
  sink.Finish();
  CheckPool(pool);
}

// What the prefill side reads.
void ParseAnswers(const uint8_t* data, size_t size) {
  const std::string body(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<GrantFrame> grant = ParseGrant({FrameType::kGrant, body});
  if (grant.ok()) BATON_CHECK(grant->blocks.size() * sizeof(uint32_t) <= size);
  (void)ParseWelcome({FrameType::kWelcome, body}).ok();
  (void)ParseAck({FrameType::kAck, body}).ok();
  (void)ParseNcclOffer({FrameType::kNcclOffer, body}).ok();
  (void)ParseNcclJoin({FrameType::kNcclJoin, body}).ok();
}

}  // namespace
}  // namespace baton::kvtransfer

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0 || size > baton::kvtransfer::kMaxInput) return 0;
  std::string bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  if ((data[0] & 2) == 0) baton::kvtransfer::SignFrames(&bytes);
  baton::kvtransfer::Run((data[0] & 1) == 1, reinterpret_cast<const uint8_t*>(bytes.data()),
                         bytes.size());
  baton::kvtransfer::ParseAnswers(data + 1, size - 1);
  return 0;
}
