#include "router/timers.h"

namespace baton::router {

ThreadTimers::ThreadTimers() : thread_([this] { Run(); }) {}

ThreadTimers::~ThreadTimers() {
  {
    base::MutexLock lock(&mutex_);
    stopping_ = true;
    wake_.NotifyAll();
  }
  thread_.join();
}

Timers::Id ThreadTimers::At(absl::Duration when, std::function<void()> callback) {
  base::MutexLock lock(&mutex_);
  const Id id = next_id_++;
  const bool first = waiting_.empty() || when < waiting_.begin()->first.first;
  waiting_[{when, id}] = std::move(callback);
  when_[id] = when;
  if (first) wake_.NotifyAll();
  return id;
}

bool ThreadTimers::Cancel(Id id) {
  std::function<void()> dropped;  // destroyed outside the lock: it may own whatever it likes
  base::MutexLock lock(&mutex_);
  const auto found = when_.find(id);
  if (found == when_.end()) return false;
  const auto entry = waiting_.find({found->second, id});
  dropped = std::move(entry->second);
  waiting_.erase(entry);
  when_.erase(found);
  return true;
}

void ThreadTimers::Run() {
  const base::Clock& clock = base::Clock::Real();
  while (true) {
    std::function<void()> due;
    {
      base::MutexLock lock(&mutex_);
      if (stopping_) return;
      const absl::Duration left =
          waiting_.empty() ? absl::Seconds(60) : waiting_.begin()->first.first - clock.Now();
      if (left > absl::ZeroDuration()) {
        wake_.WaitFor(&mutex_, left);
        continue;
      }
      due = std::move(waiting_.begin()->second);
      when_.erase(waiting_.begin()->first.second);
      waiting_.erase(waiting_.begin());
    }
    due();
  }
}

}  // namespace baton::router
