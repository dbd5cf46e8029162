#pragma once

// Handles of the router's metrics, taken once.

#include <string>

#include "absl/status/status.h"

#include "engine/base/metrics.h"

namespace baton::router {

// Thread-safe. A default-made one counts nothing.
class RouterMetrics {
 public:
  RouterMetrics() = default;
  // `metrics` outlives it.
  explicit RouterMetrics(base::Metrics* metrics);

  // One outcome for each request received. `method`: generate or generate_unary.
  void CountRequest(const std::string& method, absl::StatusCode code) const;
  void CountRejected(absl::string_view reason) const;
  void CountRetry(absl::string_view reason) const;
  void CountDecision(absl::string_view decision) const;
  void CountSlo(absl::string_view slo, bool met) const;
  base::Histogram Stage(absl::string_view stage) const;
  base::Histogram TimeToFirstToken(const std::string& method) const;
  base::Histogram InterTokenLatency(const std::string& method) const;
  base::Histogram RequestDuration(const std::string& method) const;

  base::Gauge in_flight;
  base::Histogram queue_time;
  base::Histogram tokenize;
  base::Histogram detokenize;
  base::Histogram prediction_error;
  base::Histogram overhead_dispatch;
  base::Histogram overhead_forward;
  base::Histogram overhead_total;
  base::Counter generation_tokens;

 private:
  base::Metrics* metrics_ = nullptr;
};

}  // namespace baton::router
