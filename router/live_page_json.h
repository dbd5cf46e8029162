#pragma once

// What the live page shows beside the workers: the last requests and two minutes of history.

#include <array>
#include <cstdint>
#include <deque>
#include <string>

#include "absl/time/time.h"

#include "engine/base/mutex.h"
#include "router/request_report.h"

namespace baton::router {

// Thread-safe.
class RequestHistory {
 public:
  static constexpr size_t kRequests = 40;
  static constexpr int64_t kSeconds = 120;

  void Note(const RequestReport& report);
  // A JSON object: "series" (an array a second each, oldest first, null where nothing ended) and
  // "requests", newest first.
  std::string Json(absl::Time now) const;

 private:
  struct Second {
    int64_t at = -1;  // since the epoch
    int requests = 0;
    int failures = 0;
    int first_tokens = 0;
    int gap_means = 0;
    uint64_t tokens = 0;
    double ttft_s = 0;  // sums
    double itl_s = 0;
  };

  mutable base::Mutex mutex_;
  std::deque<RequestReport> requests_ ABSL_GUARDED_BY(mutex_);    // newest first
  std::array<Second, kSeconds> seconds_ ABSL_GUARDED_BY(mutex_);  // by time modulo kSeconds
};

}  // namespace baton::router
