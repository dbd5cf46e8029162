#pragma once

// Runs events one after the other, whatever threads they come from, without a lock held while they
// run.

#include <deque>
#include <functional>
#include <utility>

#include "engine/base/mutex.h"

namespace baton::router {

// Thread-safe. An event posted from inside an event runs after it.
class Strand {
 public:
  // Runs `event` now, or leaves it to the thread that is running one.
  void Post(std::function<void()> event) {
    {
      base::MutexLock lock(&mutex_);
      events_.push_back(std::move(event));
      if (running_) return;
      running_ = true;
    }
    while (RunNext()) {
    }
  }

 private:
  bool RunNext() {
    std::function<void()> event;
    {
      base::MutexLock lock(&mutex_);
      if (events_.empty()) {
        running_ = false;
        return false;
      }
      event = std::move(events_.front());
      events_.pop_front();
    }
    event();
    return true;
  }

  base::Mutex mutex_;
  std::deque<std::function<void()>> events_ ABSL_GUARDED_BY(mutex_);
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace baton::router
