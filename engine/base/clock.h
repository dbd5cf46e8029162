#pragma once

// Time as a collaborator: real in the processes, fake in tests and in the simulation.

#include <atomic>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace baton::base {

// Thread-safe. Now() never goes back.
class Clock {
 public:
  virtual ~Clock() = default;
  // Monotonic time since an arbitrary start.
  virtual absl::Duration Now() const = 0;

  static const Clock& Real();
};

// Thread-safe. Moves only when told to.
class FakeClock : public Clock {
 public:
  absl::Duration Now() const override { return absl::Nanoseconds(now_ns_.load()); }
  void Advance(absl::Duration by) { now_ns_.fetch_add(absl::ToInt64Nanoseconds(by)); }

 private:
  std::atomic<int64_t> now_ns_{0};
};

}  // namespace baton::base
