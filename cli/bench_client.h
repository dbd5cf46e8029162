#pragma once

// Sends a plan to a router and notes what comes back. Calls are asynchronous: one thread keeps the
// schedule, gRPC's own few threads read answers.

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "cli/bench_summary.h"
#include "cli/client.h"
#include "cli/trace.h"

namespace baton::cli {

struct BenchClientOptions {
  std::string address;
  ClientOptions access;
  int channels = 4;  // connections
  // Requests under way at a time; a request is due when the one before it in its place has ended.
  // 0: each is due at its arrival, whatever has ended.
  int concurrency = 0;
  absl::Duration timeout = absl::Minutes(10);  // of a request, from when it is due
  uint64_t seed = 1;
  double temperature = 0;
};

struct BenchRun {
  std::string model;
  std::vector<BenchRecord> records;  // in the order of the plan
};

// Errors: UNAVAILABLE when there is no router; what fails later is in the records.
absl::StatusOr<BenchRun> RunPlan(const std::vector<TraceRequest>& plan,
                                 const BenchClientOptions& options);

}  // namespace baton::cli
