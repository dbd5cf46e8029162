#pragma once

// How threads talk: a queue with a named limit, closed from either side.

#include <deque>
#include <optional>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "engine/base/mutex.h"

namespace baton::base {

// Thread-safe, any number of producers and consumers.
template <typename T>
class BoundedQueue {
 public:
  explicit BoundedQueue(size_t capacity) : capacity_(capacity) {}

  // False when the queue is full or closed; `item` is moved from only on success. Never blocks.
  bool TryPush(T&& item) {
    {
      MutexLock lock(&mutex_);
      if (closed_ || items_.size() >= capacity_) return false;
      items_.push_back(std::move(item));
    }
    not_empty_.NotifyOne();
    return true;
  }

  // Nothing when the queue is empty. Never blocks.
  std::optional<T> TryPop() {
    MutexLock lock(&mutex_);
    return PopLocked();
  }

  // Waits at most `timeout`. Nothing when that passed, or when the queue is closed and empty.
  std::optional<T> PopFor(absl::Duration timeout) {
    const absl::Time deadline = absl::Now() + timeout;
    MutexLock lock(&mutex_);
    while (items_.empty() && !closed_) {
      const absl::Duration left = deadline - absl::Now();
      if (left <= absl::ZeroDuration()) return std::nullopt;
      not_empty_.WaitFor(&mutex_, left);
    }
    return PopLocked();
  }

  // Waits until there is an item. Nothing only when the queue is closed and empty.
  std::optional<T> Pop() {
    MutexLock lock(&mutex_);
    while (items_.empty() && !closed_) not_empty_.Wait(&mutex_);
    return PopLocked();
  }

  // No more pushes; what is queued can still be popped.
  void Close() {
    {
      MutexLock lock(&mutex_);
      closed_ = true;
    }
    not_empty_.NotifyAll();
  }

  size_t size() const {
    MutexLock lock(&mutex_);
    return items_.size();
  }

 private:
  std::optional<T> PopLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (items_.empty()) return std::nullopt;
    T item = std::move(items_.front());
    items_.pop_front();
    return item;
  }

  const size_t capacity_;
  mutable Mutex mutex_;
  CondVar not_empty_;
  std::deque<T> items_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace baton::base
