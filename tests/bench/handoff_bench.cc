// The hand-over between two pools of one process, over each transport: bytes a second beside a
// plain memcpy of the same blocks, and how long it takes from a revoke to blocks that may be used
// again. Layout of Qwen3-8B with an FP8 cache: 128 KiB a block and layer, 36 layers.

#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include "engine/base/bounded_queue.h"
#include "engine/base/log.h"
#include "engine/base/mutex.h"
#include "kvtransfer/receiver.h"
#include "kvtransfer/sender.h"

namespace baton::kvtransfer {
namespace {

constexpr int kNumBlocks = 16;

class DirectLink : public PeerLink {
 public:
  using Deliver = std::function<void(const worker::v1::PeerMessage&)>;

  // Waits for a delivery that is under way.
  void Connect(Deliver deliver) {
    base::MutexLock lock(&mutex_);
    deliver_ = std::move(deliver);
  }
  bool Send(worker::v1::PeerMessage message) override {
    base::MutexLock lock(&mutex_);
    if (deliver_) deliver_(message);
    return true;
  }
  void Close() override {}

 private:
  base::Mutex mutex_;
  Deliver deliver_ ABSL_GUARDED_BY(mutex_);
};

class Pair {
 public:
  explicit Pair(const std::string& transport) {
    layout_ = {.num_layers = 36,
               .num_kv_heads = 8,
               .head_dim = 128,
               .num_blocks = kNumBlocks,
               .format = kv::KvFormat::kFp8};
    from_ = *base::Buffer::Allocate(layout_.pool_bytes());
    to_ = *base::Buffer::AllocateShared("bench", layout_.pool_bytes());
    std::memset(from_.data(), 1, from_.size());
    std::memset(to_.data(), 2, to_.size());
    worker::v1::LayoutFingerprint fingerprint;
    fingerprint.set_num_layers(36);
    fingerprint.set_num_kv_heads(8);
    fingerprint.set_head_dim(128);
    fingerprint.set_block_tokens(kv::kBlockTokens);
    fingerprint.set_kv_dtype("fp8");
    fingerprint.set_tp(1);
    ReceiverOptions receive;
    receive.pool = &to_;
    receive.layout = layout_;
    receive.fingerprint = fingerprint;
    receive.transports = {transport};
    receiver_ = *Receiver::Create(
        receive, [this](ReceiverEvent event) { events.TryPush(std::move(event)); });
    SenderOptions send;
    send.pool = &from_;
    send.layout = layout_;
    send.stall_timeout_min = absl::Seconds(5);
    send.hello.set_role("prefill");
    *send.hello.mutable_fingerprint() = fingerprint;
    SessionId session = 0;
    const worker::v1::Hello hello = *receiver_->OnPeerHello(send.hello, &to_prefill_, &session);
    sender_ = *Sender::Create(send, hello, &to_decode_);
    to_decode_.Connect([=, this](const auto& message) { receiver_->OnMessage(session, message); });
    to_prefill_.Connect([=, this](const auto& message) { sender_->OnMessage(message); });
  }
  ~Pair() {
    to_prefill_.Connect(nullptr);
    sender_.reset();
    to_decode_.Connect(nullptr);
    receiver_.reset();
  }

  // Begins a hand-over of all blocks and pushes them layer by layer.
  uint64_t Push(bool commit) {
    Reservation reservation;
    reservation.prompt_tokens = kNumBlocks * kv::kBlockTokens;
    reservation.blocks = blocks_;
    TransferSpec spec;
    spec.handoff = receiver_->Reserve(reservation);
    spec.prompt_tokens = reservation.prompt_tokens;
    spec.peer_blocks = blocks_;
    spec.on_done = [this](TransferResult result) { done.TryPush(std::move(result)); };
    const uint64_t reservation_id = spec.handoff.reservation_id();
    const TransferId id = sender_->Begin(std::move(spec));
    for (int layer = 0; layer < layout_.num_layers; ++layer) {
      sender_->Push(id, 0, kNumBlocks, layer, layer + 1, blocks_);
    }
    if (commit) sender_->Commit(id, {});
    return reservation_id;
  }

  Receiver& receiver() { return *receiver_; }
  size_t bytes() const { return layout_.pool_bytes(); }
  void Copy() { std::memcpy(to_.data(), from_.data(), bytes()); }

  base::BoundedQueue<ReceiverEvent> events{16};
  base::BoundedQueue<TransferResult> done{16};

 private:
  static std::vector<kv::BlockId> AllBlocks() {
    std::vector<kv::BlockId> blocks(kNumBlocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    return blocks;
  }

  kv::KvLayout layout_;
  base::Buffer from_;
  base::Buffer to_;
  const std::vector<kv::BlockId> blocks_ = AllBlocks();
  DirectLink to_decode_;
  DirectLink to_prefill_;
  std::unique_ptr<Receiver> receiver_;
  std::unique_ptr<Sender> sender_;
};

void BM_Copy(benchmark::State& state) {
  Pair pair("shm");
  for (auto _ : state) pair.Copy();
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * pair.bytes()));
}
BENCHMARK(BM_Copy)->UseRealTime();

void BM_Handoff(benchmark::State& state, const std::string& transport) {
  Pair pair(transport);
  for (auto _ : state) {
    pair.Push(/*commit=*/true);
    const auto event = pair.events.Pop();
    const auto result = pair.done.Pop();
    BATON_CHECK(event->kind == ReceiverEvent::Kind::kLanded && result->status.ok());
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * pair.bytes()));
}
BENCHMARK_CAPTURE(BM_Handoff, shm, "shm")->UseRealTime();
BENCHMARK_CAPTURE(BM_Handoff, tcp, "tcp")->UseRealTime();

// From Revoke, in the middle of a hand-over, to the event that frees its blocks.
void BM_RevokeToQuiet(benchmark::State& state, const std::string& transport) {
  Pair pair(transport);
  for (auto _ : state) {
    const uint64_t id = pair.Push(/*commit=*/false);
    absl::SleepFor(absl::Milliseconds(1));  // let it write
    const absl::Duration start = base::Clock::Real().Now();
    BATON_CHECK(pair.receiver().Revoke(id, "bench"));
    BATON_CHECK(pair.events.Pop()->kind == ReceiverEvent::Kind::kQuiesced);
    state.SetIterationTime(absl::ToDoubleSeconds(base::Clock::Real().Now() - start));
    pair.done.Pop();
  }
}
BENCHMARK_CAPTURE(BM_RevokeToQuiet, shm, "shm")->UseManualTime();
BENCHMARK_CAPTURE(BM_RevokeToQuiet, tcp, "tcp")->UseManualTime();

}  // namespace
}  // namespace baton::kvtransfer

BENCHMARK_MAIN();
