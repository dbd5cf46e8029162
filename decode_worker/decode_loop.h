#pragma once

// The engine thread of a decode worker: promises blocks, takes over prompts that have landed,
// generates.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "baton/worker/v1/decode.pb.h"
#include "decode_worker/decode_scheduler.h"
#include "decode_worker/draft_intake.h"
#include "decode_worker/reservation_table.h"
#include "decode_worker/speculator.h"
#include "engine/base/clock.h"
#include "engine/base/mutex.h"
#include "engine/runtime/answer.h"
#include "engine/runtime/batch.h"
#include "engine/runtime/model_runner.h"
#include "kvtransfer/receiver.h"
#include "worker/call_sink.h"
#include "worker/command_queue.h"
#include "worker/kv_event_log.h"
#include "worker/worker_metrics.h"

namespace baton::decode {

using DecodeSink = worker::CallSink<worker::v1::DecodeResponse>;

struct DecodeLoopOptions {
  DecodeSchedulerOptions scheduler;
  SpeculationOptions speculation;
  int max_calls = 1024;           // above it calls are refused
  std::string model_fingerprint;  // names model, precision and tokenizer for the prefix cache
  int block_hash_bits = 256;      // below it: tests of collisions
  absl::Duration test_step_delay =
      absl::ZeroDuration();        // tests only: each step takes this much longer
  bool test_poison_freed = false;  // tests only: blocks that become free are filled with NaN
  const base::Clock* clock = &base::Clock::Real();
};

// Open, Cancel, OnReceiverEvent, load and num_calls are thread-safe and never block. Everything
// else belongs to the engine thread: the loop's own between Start and Stop, a test's that calls
// RunOnce.
class DecodeLoop : private runtime::LayerObserver {
 public:
  // All references outlive the loop. `runner` takes steps of all the tokens and rows that the
  // options allow: of the batch, its drafts and a chunk.
  DecodeLoop(const DecodeLoopOptions& options,
             runtime::ModelRunner& runner,
             const text::Tokenizer& tokenizer,
             const worker::WorkerMetrics& metrics);
  ~DecodeLoop() override;

  // The receiver's events come to OnReceiverEvent, hence it is made after the loop. Before Start.
  // Without one, only prompts that are computed here are taken.
  void set_receiver(kvtransfer::Receiver* receiver);
  // Where preempted sequences go; it outlives the loop. Before Start.
  void set_swap_space(SwapSpace* swap) { scheduler_.set_swap_space(swap); }
  // What a step costs here, and drafters besides look-up. Before Start.
  void set_step_cost(StepCost cost) { speculator_.set_cost(std::move(cost)); }
  void AddDrafter(std::unique_ptr<Drafter> drafter) { speculator_.AddDrafter(std::move(drafter)); }

  // Where a draft model's prompts are handed over; it outlives the loop. Its receiver's events come
  // to OnDraftReceiverEvent. Before Start.
  void set_draft_intake(DraftIntake* intake) { draft_intake_ = intake; }

  // Queues a request. `sink` gets Reserved unless the prompt is computed here; then Tokens, Done
  // and Finish(OK); or Finish with an error at any moment. RESOURCE_EXHAUSTED: the blocks are not
  // there now. Errors: RESOURCE_EXHAUSTED above max_calls; `sink` is not used then.
  absl::StatusOr<CallId> Open(runtime::EngineRequest request,
                              bool prefill_locally,
                              std::shared_ptr<DecodeSink> sink);
  // The router has gone or does not want it any more: blocks that no step computes on are free
  // within one layer, the others after the step; the sink is finished with `status`. At most once
  // per call; a call that has ended is left alone.
  void Cancel(CallId call, absl::Status status);
  void OnReceiverEvent(kvtransfer::ReceiverEvent event);
  void OnDraftReceiverEvent(kvtransfer::ReceiverEvent event);

  void Start();
  // Ends what is open with UNAVAILABLE and joins the thread. Idempotent.
  void Stop();
  // Runs what is queued, then one step if there is work; waits up to `idle_wait` when there is
  // none. True if a step ran.
  bool RunOnce(absl::Duration idle_wait);

  worker::v1::WorkerLoad load() const;
  const worker::KvEventLog& kv_events() const { return kv_events_; }
  int num_calls() const { return num_calls_.load(); }
  runtime::RequestLimits limits() const { return limits_; }
  // Engine thread only.
  const runtime::KvMemory& memory() const { return memory_; }

 private:
  struct Choice;
  struct Call;
  // Whose sequence takes part in a step: a choice's, or a call's prompt (`choice` is null).
  struct StepPart {
    Call* call;
    Choice* choice;
    runtime::Sequence* sequence;
  };

  void OnLayerDone(int layer) override;
  bool reads_kv_pool() const override { return false; }

  void HandleOpen(std::unique_ptr<Call> call);
  void Reserve(Call* call);
  void HandleCancel(CallId id, absl::Status status, absl::Duration asked_at);
  void HandleReceiverEvent(const kvtransfer::ReceiverEvent& event);
  void HandleLanded(Call* call, const kvtransfer::ReceiverEvent& event);

  void RunStep();
  StepPart PartOf(runtime::Sequence* sequence);
  void AddPart(runtime::Sequence* sequence);
  // Drafts for the plan's decoding sequences.
  void MakeDrafts();
  // Also what is to be drawn from the step's rows.
  void AddToBatch();
  void FinishStep(const runtime::StepTimings& timings);
  // Draws the first token of every choice of a prompt computed here, from row `row` of the step.
  void FinishPrompt(Call* call, int row);
  // Draws the next tokens of one choice, from the rows of its last token and its drafts, as long
  // as the drafts are right.
  void FinishDecode(size_t index, int first_row);
  // A preempted choice has been computed again: draws its next token.
  void FinishRecomputed(const StepPart& part, int row);
  // What is not finished goes on running; what is, is released.
  void Settle(const StepPart& part);
  // False: the call has failed.
  bool DrawToken(Call* call, Choice* choice, int row);
  // The prompt is computed and every choice has its first token: each choice that goes on gets a
  // sequence.
  void Fork(Call* call);
  void ForkChoice(Call* call, Choice* choice, bool takes_over);
  // Marks a call to be ended with an error when the step's results have been looked at.
  void Fail(Call* call, absl::Status status);
  // Every call that took part in the step: Flush.
  void SettleCalls();
  // Sends what the step has brought; ends the call if it has failed or all choices have finished.
  void Flush(Call* call);

  Call* Find(CallId id);
  void End(Call* call, absl::Status status);
  // Gives back what no running step uses; then the call may be gone.
  void Release(Call* call);
  void ReleaseSequence(runtime::Sequence* sequence);
  void PublishLoad();

  const DecodeLoopOptions options_;
  runtime::ModelRunner& runner_;
  const text::Tokenizer& tokenizer_;
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
  kvtransfer::Receiver* receiver_ = nullptr;
  std::unique_ptr<ReservationTable> reservations_;
  DraftIntake* draft_intake_ = nullptr;
  DecodeScheduler scheduler_;
  Speculator speculator_;
  runtime::StepSampler sampler_;
  runtime::Batch batch_;
  std::vector<StepPart> parts_;   // of the running step
  std::vector<CallId> touched_;   // scratch of SettleCalls
  StepLoad load_of_step_;         // its decoding sequences
  absl::Duration last_step_end_;  // zero: there was nothing to do since
  absl::flat_hash_map<CallId, std::unique_ptr<Call>> calls_;
  uint64_t counted_queries_ = 0, counted_hits_ = 0, counted_evictions_ = 0;
  int64_t counted_preemptions_ = 0, counted_draft_tokens_ = 0;
  std::array<uint64_t, 2> counted_saturated_ = {0, 0};

  mutable base::Mutex load_mutex_;
  worker::v1::WorkerLoad load_ ABSL_GUARDED_BY(load_mutex_);
};

}  // namespace baton::decode
