#pragma once

// How other threads talk to an engine thread: closures that it runs between steps and between
// layers.

#include <atomic>
#include <functional>
#include <optional>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "engine/base/bounded_queue.h"
#include "engine/base/log.h"

namespace baton::worker {

// Most commands that one call can have in the queue at a time: open, ticket, cancel, and of each of
// its two hand-overs peer found, transfer ended or landed, quiesced; and the loop's own. With a
// bounded number of calls the queue cannot be full.
inline constexpr int kCommandsPerCall = 12;

// Post is thread-safe; the rest is for the engine thread.
class CommandQueue {
 public:
  using Command = std::function<void()>;

  explicit CommandQueue(int max_calls)
      : queue_(static_cast<size_t>(max_calls) * kCommandsPerCall + 64) {}

  // Never blocks. Dropped only after Close.
  void Post(Command command) {
    if (!queue_.TryPush(std::move(command))) BATON_CHECK(closed_.load(), "command queue is full");
  }

  // Runs what is queued now. True if that was anything.
  bool RunPending() {
    bool any = false;
    while (std::optional<Command> command = queue_.TryPop()) {
      (*command)();
      any = true;
    }
    return any;
  }
  // The same, but waits up to `wait` for the first.
  bool RunPendingFor(absl::Duration wait) {
    std::optional<Command> command = queue_.PopFor(wait);
    if (!command) return false;
    (*command)();
    RunPending();
    return true;
  }

  // For tests that make steps slow: takes `duration`, and runs what comes meanwhile.
  void RunPendingThroughout(absl::Duration duration) {
    const absl::Time end = absl::Now() + duration;
    for (absl::Duration left = duration; left > absl::ZeroDuration() && !closed_.load();
         left = end - absl::Now()) {
      RunPendingFor(left);
    }
  }

  void Close() {
    closed_.store(true);
    queue_.Close();
  }

 private:
  base::BoundedQueue<Command> queue_;
  std::atomic<bool> closed_{false};
};

}  // namespace baton::worker
