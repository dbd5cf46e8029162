#pragma once

// Virtual time: events in order, and the router's timers on it.

#include <cstdint>
#include <functional>
#include <queue>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/time/time.h"

#include "engine/base/clock.h"
#include "router/admission.h"

namespace baton::cli {

// Of events at the same time, the one that was asked for first comes first: a run repeats itself.
// Thread-compatible.
class SimClock : public router::Timers {
 public:
  const base::Clock* clock() const { return &clock_; }
  absl::Duration Now() const { return clock_.Now(); }

  void After(double seconds, std::function<void()> event) {
    At(Now() + absl::Seconds(seconds), std::move(event));
  }
  Id At(absl::Duration when, std::function<void()> event) override {
    events_.push({std::max(when, Now()), ++last_id_, std::move(event)});
    return last_id_;
  }
  bool Cancel(Id id) override { return cancelled_.insert(id).second; }

  // Runs the next event; false when none is left.
  bool RunNext() {
    if (events_.empty()) return false;
    Event event = std::move(const_cast<Event&>(events_.top()));
    events_.pop();
    if (cancelled_.erase(event.id) > 0) return true;
    clock_.Advance(event.when - clock_.Now());
    event.run();
    return true;
  }

 private:
  struct Event {
    absl::Duration when;
    Id id;
    std::function<void()> run;
    bool operator<(const Event& other) const {  // the top of the heap is the earliest
      return std::pair(other.when, other.id) < std::pair(when, id);
    }
  };

  base::FakeClock clock_;
  Id last_id_ = 0;
  std::priority_queue<Event> events_;
  std::unordered_set<Id> cancelled_;
};

}  // namespace baton::cli
