#include "router/router_metrics.h"

namespace baton::router {

using base::CounterId;
using base::HistogramId;

RouterMetrics::RouterMetrics(base::Metrics* metrics) : metrics_(metrics) {
  in_flight = metrics->gauge(base::GaugeId::kRouterRequestsInFlight);
  queue_time = metrics->histogram(HistogramId::kRouterQueueTime);
  tokenize = metrics->histogram(HistogramId::kRouterTokenize);
  detokenize = metrics->histogram(HistogramId::kRouterDetokenize);
  prediction_error = metrics->histogram(HistogramId::kRouterTtftPredictionError);
  overhead_dispatch = metrics->histogram(HistogramId::kRouterOverhead, "dispatch");
  overhead_forward = metrics->histogram(HistogramId::kRouterOverhead, "forward");
  overhead_total = metrics->histogram(HistogramId::kRouterOverhead, "total");
  generation_tokens = metrics->counter(CounterId::kGenerationTokens);
  // So that error panels have data before the first error.
  for (const char* method : {"generate", "generate_unary"}) {
    for (int code : {0, 1, 3, 4, 5, 8, 13, 14}) {
      metrics->counter(
          CounterId::kRouterRequests,
          {"grpc", method, absl::StatusCodeToString(static_cast<absl::StatusCode>(code))});
    }
  }
}

void RouterMetrics::CountRequest(const std::string& method, absl::StatusCode code) const {
  if (metrics_ == nullptr) return;
  metrics_->counter(CounterId::kRouterRequests, {"grpc", method, absl::StatusCodeToString(code)})
      .Increment();
}

void RouterMetrics::CountRejected(absl::string_view reason) const {
  if (metrics_ != nullptr) metrics_->counter(CounterId::kRouterRejected, reason).Increment();
}

void RouterMetrics::CountRetry(absl::string_view reason) const {
  if (metrics_ != nullptr) metrics_->counter(CounterId::kRouterRetries, reason).Increment();
}

void RouterMetrics::CountDecision(absl::string_view decision) const {
  if (metrics_ != nullptr) metrics_->counter(CounterId::kRouterDecisions, decision).Increment();
}

void RouterMetrics::CountSlo(absl::string_view slo, bool met) const {
  if (metrics_ == nullptr) return;
  metrics_->counter(met ? CounterId::kRouterSloMet : CounterId::kRouterSloMissed, slo).Increment();
}

base::Histogram RouterMetrics::Stage(absl::string_view stage) const {
  return metrics_ == nullptr ? base::Histogram()
                             : metrics_->histogram(HistogramId::kRouterTtftStage, stage);
}

base::Histogram RouterMetrics::TimeToFirstToken(const std::string& method) const {
  return metrics_ == nullptr ? base::Histogram()
                             : metrics_->histogram(HistogramId::kRouterTimeToFirstToken, method);
}

base::Histogram RouterMetrics::InterTokenLatency(const std::string& method) const {
  return metrics_ == nullptr ? base::Histogram()
                             : metrics_->histogram(HistogramId::kRouterInterTokenLatency, method);
}

base::Histogram RouterMetrics::RequestDuration(const std::string& method) const {
  return metrics_ == nullptr ? base::Histogram()
                             : metrics_->histogram(HistogramId::kRouterRequestDuration, method);
}

}  // namespace baton::router
