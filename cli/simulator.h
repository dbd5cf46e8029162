#pragma once

// A whole deployment in virtual time: the router's own policy, queue and books against simulated
// workers.

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "cli/sim_workers.h"
#include "cli/trace.h"
#include "router/admission.h"

namespace baton::cli {

struct SimOptions {
  int prefill = 1;  // workers; 0: decode workers compute the prompts
  int decode = 1;
  std::string policy = "prefix";
  router::RoutePolicyOptions policy_options;
  router::AdmissionOptions admission{.max_running = 1 << 20, .max_queue = 1 << 20};
  uint64_t prefill_queue_tokens = router::WorkerTableOptions{}.prefill_queue_tokens;
  double deadline_s = 600;  // of each request, after its arrival
  double slo_ttft_s = 1;
  double slo_tpot_s = 0.05;
  double report_s = 0.1;  // between two reports of a worker
  WorkerSpeed speed;
};

// Counts in bins of 1 %: percentiles of any number of values in little memory. Thread-compatible.
class SimHistogram {
 public:
  void Add(double seconds, uint64_t count = 1);
  // Of nothing: 0.
  double Percentile(double percent) const;
  double mean() const { return count_ == 0 ? 0 : sum_ / static_cast<double>(count_); }
  uint64_t count() const { return count_; }

 private:
  static constexpr int kBins = 2400;  // from 1 us up, times 1.01 each
  std::array<uint64_t, kBins> bins_{};
  uint64_t count_ = 0;
  double sum_ = 0;
};

struct SimResult {
  uint64_t requests = 0;
  uint64_t completed = 0;
  uint64_t refused = 0;  // by admission
  uint64_t late = 0;     // their deadline passed in the queue
  uint64_t good = 0;     // completed within both objectives
  uint64_t output_tokens = 0;
  uint64_t local_prefills = 0;
  uint64_t refused_by_workers = 0;  // times a decode worker had no room
  double duration_s = 0;            // first arrival to last token
  double goodput = 0;               // good requests a second
  double prefix_hit_ratio = 0;      // prompt tokens that were not computed
  double prefill_busy = 0;          // mean share of the time
  double decode_busy = 0;
  double prediction_error_s = 0;  // mean, of the time from dispatch to first token
  SimHistogram ttft;
  SimHistogram itl;
  SimHistogram e2e;
};

// The same trace and options give the same result.
// Errors: INVALID_ARGUMENT for an unknown policy, numbers of workers that serve nothing, or a
// request that no worker could ever take.
absl::StatusOr<SimResult> Simulate(const std::vector<TraceRequest>& trace,
                                   const SimOptions& options);

// How to split `workers` between the roles: the number of prefill workers with the best goodput, of
// equals the one with the least mean time to first token. Looks at a grid, then around its best.
struct SplitResult {
  int prefill = 0;
  int decode = 0;
  SimResult result;
  std::vector<std::pair<int, double>> tried;  // prefill workers, goodput
};
absl::StatusOr<SplitResult> FindBestSplit(const std::vector<TraceRequest>& trace,
                                          SimOptions options,
                                          int workers);

}  // namespace baton::cli
