#pragma once

// The metrics that both workers keep, taken once.

#include <array>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "baton/worker/v1/common.pb.h"
#include "engine/base/metrics.h"
#include "engine/kv/block_pool.h"
#include "engine/kv/prefix_cache.h"
#include "engine/runtime/answer.h"

namespace baton::worker {

// When what happened to a request; zero: not yet.
struct RequestTimes {
  absl::Duration arrived;
  absl::Duration first_step;
  absl::Duration first_token;
  absl::Duration last_token;
};

enum class StepPhase { kPrefill, kDecode, kVerify, kMixed };

// Default-made it counts nothing. Thread-safe.
class WorkerMetrics {
 public:
  WorkerMetrics() = default;
  // `metrics` outlives the result.
  explicit WorkerMetrics(base::Metrics* metrics);

  // A request ended in this worker: exactly one call each.
  void OnRequestEnd(const absl::Status& status,
                    runtime::FinishReason reason,
                    const RequestTimes& times,
                    absl::Duration now,
                    int prompt_tokens,
                    int generated_tokens,
                    uint32_t max_tokens) const;
  void OnStep(StepPhase phase, int tokens, absl::Duration duration) const;
  // A step has drawn from `rows` rows of logits, on the device or on the host.
  void OnRows(int rows, bool on_device) const;
  // A hand-over has landed: `duration` as in TransferResult::busy or ReceiverEvent::arrival.
  void OnTransfer(absl::string_view transport,
                  bool send,
                  absl::Duration duration,
                  uint64_t bytes) const;
  // A step has verified `drafts` of a sequence, of which the first `accepted` were right.
  void OnDrafts(int drafts, int accepted) const;
  void OnTransferFailed(absl::string_view transport, const absl::Status& status) const;
  // Gauges.
  void SetLoad(const v1::WorkerLoad& load,
               uint32_t waiting_capacity,
               uint32_t waiting_blocks,
               uint32_t waiting_transfer) const;
  // `total` as in ModelRunner::saturated_samples; `counted` is what was counted of it before.
  void CountSaturated(const std::array<uint64_t, 2>& total, std::array<uint64_t, 2>* counted) const;
  void SetTransfers(int prealloc, int inflight, int waiting_prefill) const;

  base::Counter prompt_computed, prompt_cached, prompt_transferred;
  base::Counter generation_tokens;
  base::Counter cache_queries, cache_hits, cache_evictions;
  base::Counter preemptions;
  base::Counter nan_logits;
  base::Histogram inter_token_latency;
  base::Histogram time_to_first_token;
  base::Histogram append;
  base::Histogram step_gap;
  base::Histogram abort_to_free;
  // Prefill only.
  base::Counter units_skipped;
  // Decode only.
  base::Histogram quarantine, exposed;
  base::Counter reservations_expired;
  base::Counter draft_prompt_computed, draft_prompt_transferred;

 private:
  base::Metrics* metrics_ = nullptr;
  base::Counter drafts_, draft_tokens_, accepted_tokens_;
  std::vector<base::Counter> accepted_per_pos_;  // decode only
  base::Histogram accept_length_;
  base::Counter finished_stop_, finished_length_, finished_abort_, finished_error_;
  std::array<base::Counter, 2> saturated_;  // K, V
  base::Counter rows_on_device_, rows_on_host_;
  base::Histogram e2e_, queue_, prefill_, decode_, inference_, per_token_;
  base::Histogram prompt_tokens_, generated_tokens_, max_tokens_;
  base::Histogram iteration_tokens_;
  std::array<base::Histogram, 4> iteration_;  // by StepPhase
  base::Gauge running_, waiting_, waiting_capacity_, waiting_blocks_, waiting_transfer_;
  base::Gauge queue_tokens_, usage_;
  base::Gauge free_, cached_, active_, reserved_, quarantined_;
  base::Gauge prealloc_, inflight_, waiting_prefill_;
};

// A load report with the pool's block counts filled in.
v1::WorkerLoad LoadOf(const kv::BlockPool& pool);

}  // namespace baton::worker
