#pragma once

// Places for requests: so many at a time, so many waiting behind them, in order of arrival.

#include <cstdint>
#include <functional>
#include <map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "engine/base/clock.h"
#include "engine/base/metrics.h"
#include "engine/base/mutex.h"
#include "router/timers.h"

namespace baton::router {

struct AdmissionOptions {
  int max_running = 512;
  int max_queue = 1024;
  base::Gauge queue_depth;
};

// Thread-safe. Callbacks run without its lock, on the thread that made them due.
class Admission {
 public:
  using Id = uint64_t;

  // `timers` and `clock` outlive it, and it outlives every request.
  Admission(const AdmissionOptions& options, Timers* timers, const base::Clock* clock)
      : options_(options), timers_(timers), clock_(clock) {}

  // `done` is called once: OK when the request has a place, which it gives back by Leave;
  // DEADLINE_EXCEEDED when `deadline` (of the clock) passed while it waited. With a free place it
  // is called before Enter returns. Errors: RESOURCE_EXHAUSTED when the queue is full; `done` is
  // not called then.
  absl::StatusOr<Id> Enter(absl::Duration deadline, std::function<void(absl::Status)> done);
  // True: the request was waiting and `done` will not be called. False: it has been or is being
  // called.
  bool Cancel(Id id);
  void Leave();

  int num_running() const;
  int num_waiting() const;

 private:
  struct Waiting {
    std::function<void(absl::Status)> done;
    Timers::Id timer;
  };

  void Expire(Id id);
  void PublishDepth() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const AdmissionOptions options_;
  Timers* const timers_;
  const base::Clock* const clock_;
  mutable base::Mutex mutex_;
  Id next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<Id, Waiting> waiting_ ABSL_GUARDED_BY(mutex_);  // ids rise: the first is the oldest
};

}  // namespace baton::router
