#include "tests/sim/world.h"

#include <algorithm>

namespace baton::sim {

absl::Duration Process::OwnClock::Now() const { return world->now() + offset; }

void Process::Continue() {
  if (!stopped_) return;
  stopped_ = false;
  for (auto& [label, event] : std::exchange(held_, {})) {
    if (!alive_) return;
    event();
    if (after_event_) after_event_();
  }
}

void World::After(absl::Duration delay,
                  std::shared_ptr<Process> process,
                  const char* label,
                  std::function<void()> event) {
  events_.push_back({now_ + std::max(delay, absl::ZeroDuration()), ++last_number_,
                     std::move(process), label, std::move(event)});
  std::push_heap(events_.begin(), events_.end(), Later());
}

bool World::RunOne() {
  if (events_.empty()) return false;
  std::pop_heap(events_.begin(), events_.end(), Later());
  const Event event = std::move(events_.back());
  events_.pop_back();
  now_ = event.at;
  if (event.process != nullptr && !event.process->alive()) return true;
  if (event.process != nullptr && event.process->stopped()) {
    event.process->held_.emplace_back(event.label, event.run);
    return true;
  }
  Run(event.process, event.label, event.run);
  return true;
}

void World::Run(const std::shared_ptr<Process>& process,
                const char* label,
                const std::function<void()>& run) {
  ++num_events_;
  digest_ = digest_ * 0x100000001b3u + static_cast<uint64_t>(absl::ToInt64Nanoseconds(now_)) +
            static_cast<uint64_t>(label[0]) * 31;
  if (tracing_) Trace(process == nullptr ? "-" : process->name(), " ", label);
  run();
  if (process != nullptr && process->alive() && process->after_event_) process->after_event_();
  if (after_event_) after_event_();
}

void World::AddToTrace(const std::string& line) {
  absl::StrAppend(&trace_, num_events_, " ", absl::ToInt64Microseconds(now_), "us ", line, "\n");
}

}  // namespace baton::sim
