#include "worker/worker_metrics.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace baton::worker {
namespace {

using base::CounterId;
using base::GaugeId;
using base::HistogramId;

absl::string_view FailureReason(const absl::Status& status) {
  if (absl::IsDataLoss(status)) return "checksum";
  if (absl::IsDeadlineExceeded(status)) return "stall";
  if (absl::IsCancelled(status) || absl::IsAborted(status)) return "abort";
  if (absl::IsUnavailable(status)) return "peer_gone";
  return "error";
}

// Places of drafts that are counted apart: as many as a decode worker drafts.
constexpr int kDraftPositions = 15;

double Seconds(absl::Duration duration) { return std::max(0.0, absl::ToDoubleSeconds(duration)); }

}  // namespace

WorkerMetrics::WorkerMetrics(base::Metrics* metrics)
    : prompt_computed(metrics->counter(CounterId::kPromptTokens, "computed")),
      prompt_cached(metrics->counter(CounterId::kPromptTokens, "cached")),
      prompt_transferred(metrics->counter(CounterId::kPromptTokens, "transferred")),
      generation_tokens(metrics->counter(CounterId::kGenerationTokens)),
      cache_queries(metrics->counter(CounterId::kPrefixCacheQueries)),
      cache_hits(metrics->counter(CounterId::kPrefixCacheHits)),
      cache_evictions(metrics->counter(CounterId::kPrefixCacheEvictions)),
      preemptions(metrics->counter(CounterId::kPreemptions)),
      nan_logits(metrics->counter(CounterId::kNanLogits)),
      inter_token_latency(metrics->histogram(HistogramId::kInterTokenLatency)),
      time_to_first_token(metrics->histogram(HistogramId::kTimeToFirstToken)),
      append(metrics->histogram(HistogramId::kKvAppend)),
      step_gap(metrics->histogram(HistogramId::kStepGap)),
      abort_to_free(metrics->histogram(HistogramId::kKvAbortToFree)),
      metrics_(metrics),
      finished_stop_(metrics->counter(CounterId::kRequestsFinished, "stop")),
      finished_length_(metrics->counter(CounterId::kRequestsFinished, "length")),
      finished_abort_(metrics->counter(CounterId::kRequestsFinished, "abort")),
      finished_error_(metrics->counter(CounterId::kRequestsFinished, "error")),
      saturated_{metrics->counter(CounterId::kKvFp8Saturated, "k"),
                 metrics->counter(CounterId::kKvFp8Saturated, "v")},
      rows_on_device_(metrics->counter(CounterId::kSampledRows, "device")),
      rows_on_host_(metrics->counter(CounterId::kSampledRows, "host")),
      e2e_(metrics->histogram(HistogramId::kE2eRequestLatency)),
      queue_(metrics->histogram(HistogramId::kRequestQueueTime)),
      prefill_(metrics->histogram(HistogramId::kRequestPrefillTime)),
      decode_(metrics->histogram(HistogramId::kRequestDecodeTime)),
      inference_(metrics->histogram(HistogramId::kRequestInferenceTime)),
      per_token_(metrics->histogram(HistogramId::kRequestTimePerOutputToken)),
      prompt_tokens_(metrics->histogram(HistogramId::kRequestPromptTokens)),
      generated_tokens_(metrics->histogram(HistogramId::kRequestGenerationTokens)),
      max_tokens_(metrics->histogram(HistogramId::kRequestParamsMaxTokens)),
      iteration_tokens_(metrics->histogram(HistogramId::kIterationTokens)),
      iteration_{metrics->histogram(HistogramId::kIterationDuration, "prefill"),
                 metrics->histogram(HistogramId::kIterationDuration, "decode"),
                 metrics->histogram(HistogramId::kIterationDuration, "verify"),
                 metrics->histogram(HistogramId::kIterationDuration, "mixed")},
      running_(metrics->gauge(GaugeId::kRequestsRunning)),
      waiting_(metrics->gauge(GaugeId::kRequestsWaiting)),
      waiting_capacity_(metrics->gauge(GaugeId::kRequestsWaitingByReason, "capacity")),
      waiting_blocks_(metrics->gauge(GaugeId::kRequestsWaitingByReason, "kv_blocks")),
      waiting_transfer_(metrics->gauge(GaugeId::kRequestsWaitingByReason, "kv_transfer")),
      queue_tokens_(metrics->gauge(GaugeId::kQueueTokens)),
      usage_(metrics->gauge(GaugeId::kKvCacheUsageRatio)),
      free_(metrics->gauge(GaugeId::kKvBlocks, "free")),
      cached_(metrics->gauge(GaugeId::kKvBlocks, "cached")),
      active_(metrics->gauge(GaugeId::kKvBlocks, "active")),
      reserved_(metrics->gauge(GaugeId::kKvBlocks, "reserved")),
      quarantined_(metrics->gauge(GaugeId::kKvBlocks, "quarantined")),
      prealloc_(metrics->gauge(GaugeId::kKvTransferRequests, "prealloc")),
      inflight_(metrics->gauge(GaugeId::kKvTransferRequests, "inflight")),
      waiting_prefill_(metrics->gauge(GaugeId::kKvTransferRequests, "waiting_prefill")) {
  if (metrics->role() == base::Role::kPrefill) {
    units_skipped = metrics->counter(CounterId::kKvTransferUnitsSkipped, "prefix");
  } else {
    quarantine = metrics->histogram(HistogramId::kKvQuarantine);
    exposed = metrics->histogram(HistogramId::kKvTransferExposed);
    reservations_expired = metrics->counter(CounterId::kKvReservationExpired);
    draft_prompt_computed = metrics->counter(CounterId::kSpecDecodeDraftPromptTokens, "computed");
    draft_prompt_transferred =
        metrics->counter(CounterId::kSpecDecodeDraftPromptTokens, "transferred");
    drafts_ = metrics->counter(CounterId::kSpecDecodeDrafts);
    draft_tokens_ = metrics->counter(CounterId::kSpecDecodeDraftTokens);
    accepted_tokens_ = metrics->counter(CounterId::kSpecDecodeAcceptedTokens);
    accept_length_ = metrics->histogram(HistogramId::kSpecDecodeAcceptLength);
    for (int position = 0; position < kDraftPositions; ++position) {
      accepted_per_pos_.push_back(
          metrics->counter(CounterId::kSpecDecodeAcceptedTokensPerPos, absl::StrCat(position)));
    }
  }
}

void WorkerMetrics::OnRequestEnd(const absl::Status& status,
                                 runtime::FinishReason reason,
                                 const RequestTimes& times,
                                 absl::Duration now,
                                 int prompt_tokens,
                                 int generated_tokens,
                                 uint32_t max_tokens) const {
  if (status.ok()) {
    (reason == runtime::FinishReason::kLength ? finished_length_ : finished_stop_).Increment();
  } else if (absl::IsCancelled(status) || absl::IsDeadlineExceeded(status)) {
    finished_abort_.Increment();
  } else {
    finished_error_.Increment();
  }
  e2e_.Observe(Seconds(now - times.arrived));
  prompt_tokens_.Observe(prompt_tokens);
  generated_tokens_.Observe(generated_tokens);
  max_tokens_.Observe(max_tokens);
  if (times.first_step == absl::ZeroDuration()) return;
  queue_.Observe(Seconds(times.first_step - times.arrived));
  if (times.first_token == absl::ZeroDuration()) return;
  prefill_.Observe(Seconds(times.first_token - times.first_step));
  const absl::Duration decode = times.last_token - times.first_token;
  decode_.Observe(Seconds(decode));
  inference_.Observe(Seconds(times.last_token - times.first_step));
  if (generated_tokens > 1) per_token_.Observe(Seconds(decode) / (generated_tokens - 1));
}

void WorkerMetrics::OnStep(StepPhase phase, int tokens, absl::Duration duration) const {
  iteration_tokens_.Observe(tokens);
  iteration_[static_cast<size_t>(phase)].Observe(Seconds(duration));
}

void WorkerMetrics::OnDrafts(int drafts, int accepted) const {
  drafts_.Increment();
  draft_tokens_.Increment(drafts);
  accepted_tokens_.Increment(accepted);
  accept_length_.Observe(accepted + 1);
  for (size_t i = 0; i < accepted_per_pos_.size() && static_cast<int>(i) < accepted; ++i)
    accepted_per_pos_[i].Increment();
}

void WorkerMetrics::OnTransfer(absl::string_view transport,
                               bool send,
                               absl::Duration duration,
                               uint64_t bytes) const {
  if (metrics_ == nullptr || transport.empty()) return;
  const absl::string_view labels[] = {transport, send ? "send" : "recv"};
  metrics_->histogram(HistogramId::kKvTransferDuration, labels).Observe(Seconds(duration));
  metrics_->histogram(HistogramId::kKvTransferBytes, labels).Observe(static_cast<double>(bytes));
}

void WorkerMetrics::OnTransferFailed(absl::string_view transport,
                                     const absl::Status& status) const {
  if (metrics_ == nullptr || transport.empty()) return;
  const absl::string_view labels[] = {transport, FailureReason(status)};
  metrics_->counter(CounterId::kKvTransferFailures, labels).Increment();
}

void WorkerMetrics::SetLoad(const v1::WorkerLoad& load,
                            uint32_t waiting_capacity,
                            uint32_t waiting_blocks,
                            uint32_t waiting_transfer) const {
  running_.Set(load.requests_running());
  waiting_.Set(load.requests_waiting());
  waiting_capacity_.Set(waiting_capacity);
  waiting_blocks_.Set(waiting_blocks);
  waiting_transfer_.Set(waiting_transfer);
  queue_tokens_.Set(static_cast<double>(load.queue_tokens()));
  free_.Set(load.kv_blocks_free());
  cached_.Set(load.kv_blocks_cached());
  active_.Set(load.kv_blocks_active());
  reserved_.Set(load.kv_blocks_reserved());
  quarantined_.Set(load.kv_blocks_quarantined());
  const double unused = static_cast<double>(load.kv_blocks_free()) + load.kv_blocks_cached();
  usage_.Set(load.kv_blocks_total() == 0 ? 0 : 1 - unused / load.kv_blocks_total());
}

void WorkerMetrics::CountSaturated(const std::array<uint64_t, 2>& total,
                                   std::array<uint64_t, 2>* counted) const {
  for (size_t side = 0; side < total.size(); ++side) {
    saturated_[side].Increment(
        static_cast<double>(total[side] - std::exchange((*counted)[side], total[side])));
  }
}

void WorkerMetrics::OnRows(int rows, bool on_device) const {
  (on_device ? rows_on_device_ : rows_on_host_).Increment(rows);
}

void WorkerMetrics::SetTransfers(int prealloc, int inflight, int waiting_prefill) const {
  prealloc_.Set(prealloc);
  inflight_.Set(inflight);
  waiting_prefill_.Set(waiting_prefill);
}

v1::WorkerLoad LoadOf(const kv::BlockPool& pool) {
  const kv::BlockCounts& counts = pool.counts();
  v1::WorkerLoad load;
  load.set_kv_blocks_total(static_cast<uint32_t>(pool.num_blocks()));
  load.set_kv_blocks_free(static_cast<uint32_t>(counts.free));
  load.set_kv_blocks_cached(static_cast<uint32_t>(counts.cached));
  load.set_kv_blocks_active(static_cast<uint32_t>(counts.active));
  load.set_kv_blocks_reserved(static_cast<uint32_t>(counts.reserved));
  load.set_kv_blocks_quarantined(static_cast<uint32_t>(counts.quarantined));
  return load;
}

}  // namespace baton::worker
