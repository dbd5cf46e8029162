#pragma once

// The engine thread of a prefill worker: computes prompts in chunks, ships their blocks, draws the
// first tokens.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "baton/worker/v1/prefill.pb.h"
#include "engine/base/clock.h"
#include "engine/base/mutex.h"
#include "engine/runtime/answer.h"
#include "engine/runtime/batch.h"
#include "engine/runtime/model_runner.h"
#include "engine/runtime/prefill_scheduler.h"
#include "prefill_worker/draft_prefill.h"
#include "prefill_worker/kv_shipper.h"
#include "prefill_worker/peer_connector.h"
#include "worker/call_sink.h"
#include "worker/command_queue.h"
#include "worker/kv_event_log.h"
#include "worker/worker_metrics.h"

namespace baton::prefill {

using PrefillSink = worker::CallSink<worker::v1::PrefillResponse>;
using Ticket = worker::v1::PrefillRequest::Ticket;

struct PrefillLoopOptions {
  int chunk_tokens = 512;  // most prompt tokens in one step
  int max_sequences = 64;  // most prompts in one step
  int max_calls = 1024;    // above it calls are refused
  // A computed prompt whose ticket has not come by then is given up.
  absl::Duration ticket_timeout = absl::Seconds(60);
  std::string model_fingerprint;  // names model, precision and tokenizer for the prefix cache
  int block_hash_bits = 256;      // below it: tests of collisions
  absl::Duration test_step_delay =
      absl::ZeroDuration();        // tests only: each step takes this much longer
  bool test_poison_freed = false;  // tests only: blocks that become free are filled with NaN
  const base::Clock* clock = &base::Clock::Real();
};

// Open, GiveTicket, Cancel, load and num_calls are thread-safe and never block. Everything else
// belongs to the engine thread: the loop's own between Start and Stop, a test's that calls RunOnce.
class PrefillLoop : private runtime::LayerObserver {
 public:
  // All references outlive the loop.
  PrefillLoop(const PrefillLoopOptions& options,
              runtime::ModelRunner& runner,
              const text::Tokenizer& tokenizer,
              PeerConnector& peers,
              const worker::WorkerMetrics& metrics);
  ~PrefillLoop() override;

  // Queues a request. `sink` gets FirstTokens, then Done, then Finish(OK); or Finish with an error
  // at any moment. Errors: RESOURCE_EXHAUSTED above max_calls; `sink` is not used then.
  absl::StatusOr<CallId> Open(runtime::EngineRequest request,
                              bool needs_handoff,
                              std::shared_ptr<PrefillSink> sink);
  // At most once per call.
  void GiveTicket(CallId call, Ticket ticket);
  // The router has gone or does not want it any more: everything is released within one layer, and
  // the sink is finished with `status`. At most once per call; a call that has ended is left alone.
  void Cancel(CallId call, absl::Status status);

  // Computes prompts with a draft model of this runner too, and hands its KV over. Before Start.
  void SetDraftModel(runtime::ModelRunner& runner, PeerConnector& peers);

  void Start();
  // Ends what is open with UNAVAILABLE and joins the thread. Idempotent.
  void Stop();
  // Runs what is queued, then one step if there is work; waits up to `idle_wait` when there is
  // none. True if a step ran.
  bool RunOnce(absl::Duration idle_wait);

  worker::v1::WorkerLoad load() const;
  const worker::KvEventLog& kv_events() const { return kv_events_; }
  // Calls not completely gone yet: with a client, or with blocks that a transfer still reads.
  int num_calls() const { return num_calls_.load(); }
  runtime::RequestLimits limits() const { return limits_; }
  // Engine thread only.
  const runtime::KvMemory& memory() const { return memory_; }

 private:
  struct Call;

  void OnLayerDone(int layer) override;

  void HandleOpen(std::unique_ptr<Call> call);
  void HandleTicket(CallId id, Ticket ticket);
  void HandleSender(CallId id, absl::StatusOr<std::shared_ptr<kvtransfer::Sender>> sender);
  void HandleTransferDone(CallId id, const kvtransfer::TransferResult& result);
  void HandleCancel(CallId id, absl::Status status, absl::Duration asked_at);

  void RunStep();
  void FailStep(const absl::Status& status);
  // The step's next row is for the first token of every choice.
  void AskFirstTokens(Call* call);
  void FinishChunks(const runtime::StepTimings& timings);
  // Draws the first token of every choice, from row `row` of the step, and sends them.
  void FinishPrompt(Call* call, int row);
  absl::StatusOr<worker::v1::PrefillResponse> DrawFirstTokens(Call* call, int row);
  void CheckTimeouts();

  Call* Find(CallId id);
  // Ends the call towards the router. What a transfer still reads is kept until it has ended.
  void End(Call* call, absl::Status status);
  // Blocks back, if nothing holds them; then the call is gone.
  void ReleaseIfQuiet(Call* call);
  void PublishLoad();

  const PrefillLoopOptions options_;
  runtime::ModelRunner& runner_;
  const text::Tokenizer& tokenizer_;
  PeerConnector& peers_;
  const worker::WorkerMetrics metrics_;
  const base::Clock& clock_;
  const runtime::RequestLimits limits_;

  worker::CommandQueue commands_;
  std::atomic<int> num_calls_{0};
  std::atomic<CallId> next_call_{1};
  std::atomic<bool> stopping_{false};
  std::thread thread_;

  // Engine thread only.
  worker::KvEventLog kv_events_;  // outlives memory_, which writes it
  runtime::KvMemory memory_;
  runtime::PrefillScheduler scheduler_;
  runtime::StepSampler sampler_;
  runtime::Batch batch_;
  KvShipper shipper_;
  std::unique_ptr<DraftPrefill> draft_;  // null without a draft model
  std::vector<runtime::PrefillChunk> chunks_;
  std::vector<Call*> step_calls_;  // of the running step, one per chunk
  absl::flat_hash_map<CallId, std::unique_ptr<Call>> calls_;
  std::vector<std::unique_ptr<Call>> gone_;  // ended while a step reads them
  bool in_step_ = false;
  uint64_t counted_queries_ = 0, counted_hits_ = 0, counted_evictions_ = 0;
  std::array<uint64_t, 2> counted_saturated_ = {0, 0};

  mutable base::Mutex load_mutex_;
  worker::v1::WorkerLoad load_ ABSL_GUARDED_BY(load_mutex_);
};

}  // namespace baton::prefill
