#pragma once

// What a router has heard of its workers, written down beside its own table and in another way;
// says which of them may not get new work.

#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "baton/worker/v1/cluster.pb.h"
#include "router/route_policy.h"
#include "tests/sim/workers.h"

namespace baton::sim {

class RouterBook {
 public:
  explicit RouterBook(const base::Clock* clock) : clock_(*clock) {}

  void OnStatus(const std::string& address, const worker::v1::WorkerStatus& status);
  void OnDown(const std::string& address) { heard_[address] = Heard(); }
  // The router looks for silent workers now.
  void OnSweep();
  // Of calls to a worker: it has said something; it has refused one without a reason in the
  // request.
  void OnAnswer(const std::string& address);
  void OnRefusal(const std::string& address);

  // Why no new request may go there; "" when one may.
  std::string WhyNot(const std::string& address) const;

 private:
  struct Heard {
    worker::v1::WorkerState state = worker::v1::WORKER_STATE_UNSPECIFIED;
    std::string incarnation;
    absl::Duration at;
    bool silent = false;  // when it was last looked for silence
    int refusals = 0;     // in a row
    absl::Duration pause_began_at;
    absl::Duration answered_at = -absl::InfiniteDuration();
  };

  const base::Clock& clock_;
  std::map<std::string, Heard> heard_;
};

// `policy`, with each of its choices that is to be sent looked up in `book`, which outlives it.
std::unique_ptr<router::RoutePolicy> WatchChoices(std::unique_ptr<router::RoutePolicy> policy,
                                                  const RouterBook* book,
                                                  Env* env);

}  // namespace baton::sim
