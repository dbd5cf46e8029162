#pragma once

// From a request that is ready to be sent to workers that have room for it: places, queue, order,
// deadlines, and early refusal of what would be late.

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "engine/base/clock.h"
#include "engine/base/metrics.h"
#include "engine/base/mutex.h"
#include "router/fair_queue.h"
#include "router/timers.h"
#include "router/worker_table.h"

namespace baton::router {

struct AdmissionOptions {
  int max_running = 512;
  int max_queue = 1024;
  // A prompt of more missing tokens than this is long: it goes through a lane of its own.
  uint32_t long_prompt_tokens = 8192;
  // The oldest of a lane, once it has waited this long for room on workers, is not overtaken by the
  // other lane any more.
  absl::Duration patience = absl::Seconds(5);
  // Refuse requests whose first token is predicted to come too late because of the queue.
  bool refuse_late = true;
  std::array<base::Gauge, kNumPriorities> queue_depth;
};

// Reason of the ErrorInfo of a request whose first token would come too late.
inline constexpr char kPredictedLate[] = "PREDICTED_LATE";

// What waits.
struct AdmissionRequest {
  std::string tenant;
  Priority priority = Priority::kNormal;
  RouteRequest route;
  std::vector<BlockKey> keys;  // of the prompt's full blocks
  absl::Duration deadline;     // of the clock
  // A first token predicted for later than this is refused at once.
  absl::Duration first_token_by = absl::InfiniteDuration();
  // Goes on with a request that has a place already: needs none, is never refused, and stands
  // before all others of its lane.
  bool resumes = false;
};

// Thread-safe. Callbacks run without its lock, on the thread that made them due.
class Admission {
 public:
  using Id = uint64_t;
  // OK: the request has workers, booked in the table, and, unless it resumes, a place, which it
  // gives back by Leave. Otherwise it has nothing: DEADLINE_EXCEEDED when its deadline passed while
  // it waited, or what RoutePolicy::Choose answers but RESOURCE_EXHAUSTED.
  using Done = std::function<void(absl::StatusOr<Placement>)>;

  // All outlive it, and it outlives every request. Call Pump when the table has something new.
  Admission(const AdmissionOptions& options,
            const RoutePolicy* policy,
            WorkerTable* table,
            Timers* timers,
            const base::Clock* clock)
      : options_(options), policy_(policy), table_(table), timers_(timers), clock_(clock) {}

  // `done` is called once, before Enter returns where workers have room now. Errors, `done` is not
  // called then: RESOURCE_EXHAUSTED with RetryInfo, computed from the queue, when the queue is full
  // or, with ErrorInfo PREDICTED_LATE, when it would make the first token come too late.
  absl::StatusOr<Id> Enter(AdmissionRequest request, Done done);
  // True: the request was waiting and `done` will not be called. False: it has been or is being
  // called.
  bool Cancel(Id id);
  void Leave();
  // Lets through what there is room for now.
  void Pump();

  int num_running() const;
  int num_waiting() const;

 private:
  struct Waiting {
    AdmissionRequest request;
    Done done;
    Timers::Id timer = 0;
    absl::Duration since;
  };
  struct Granted {
    Done done;
    absl::StatusOr<Placement> placement = absl::UnknownError("");
  };

  absl::Status CheckInTime(const AdmissionRequest& request,
                           const QueueEntry& entry,
                           const WorkerTable::Prediction& prediction) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status QueueFull(const WorkerTable::Prediction& prediction) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The next one that goes through, or fails; false: none does now.
  bool TakeNext(Granted* out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  enum class Tried { kTaken, kBlocked, kBlocksAll };
  Tried TryLane(Lane lane, Granted* out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Waiting Extract(Id id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Expire(Id id);
  void PublishDepth() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const AdmissionOptions options_;
  const RoutePolicy* const policy_;
  WorkerTable* const table_;
  Timers* const timers_;
  const base::Clock* const clock_;
  mutable base::Mutex mutex_;
  Id next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
  FairQueue queue_ ABSL_GUARDED_BY(mutex_);
  std::map<Id, Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> empty_{true};  // so that reports of workers cost nothing while none waits
};

}  // namespace baton::router
