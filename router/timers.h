#pragma once

// Things to be done later. One thread for all of them; tests run them by hand.

#include <cstdint>
#include <functional>
#include <map>
#include <thread>
#include <utility>

#include "absl/time/time.h"

#include "engine/base/clock.h"
#include "engine/base/mutex.h"

namespace baton::router {

// Thread-safe.
class Timers {
 public:
  using Id = uint64_t;
  virtual ~Timers() = default;
  // Runs `callback`, which must not block, once the clock shows `when`.
  virtual Id At(absl::Duration when, std::function<void()> callback) = 0;
  // True when the callback will not run any more. False: it has run or is running.
  virtual bool Cancel(Id id) = 0;
};

// Over the real clock.
class ThreadTimers : public Timers {
 public:
  ThreadTimers();
  // What is still waiting is dropped.
  ~ThreadTimers() override;

  Id At(absl::Duration when, std::function<void()> callback) override;
  bool Cancel(Id id) override;

 private:
  void Run();

  base::Mutex mutex_;
  base::CondVar wake_;
  std::map<std::pair<absl::Duration, Id>, std::function<void()>> waiting_ ABSL_GUARDED_BY(mutex_);
  std::map<Id, absl::Duration> when_ ABSL_GUARDED_BY(mutex_);
  Id next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace baton::router
