#pragma once

// Time, chance and processes of a simulation: one queue of events, one source of random numbers, so
// that a seed decides everything.

#include <cstdint>
#include <functional>
#include <memory>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "engine/base/clock.h"

namespace baton::sim {

// Same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // In [low, high].
  int64_t Between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(Next() % static_cast<uint64_t>(high - low + 1));
  }
  bool OneIn(uint64_t n) { return Next() % n == 0; }
  absl::Duration Between(absl::Duration low, absl::Duration high) {
    return absl::Nanoseconds(
        Between(absl::ToInt64Nanoseconds(low), absl::ToInt64Nanoseconds(high)));
  }

 private:
  uint64_t state_;
};

class World;

// One process: alive or dead, stopped (SIGSTOP) or not, with a monotonic clock of its own. A
// restarted process is another one.
class Process {
 public:
  Process(World* world, std::string name) : clock_(world), world_(world), name_(std::move(name)) {}

  const std::string& name() const { return name_; }
  bool alive() const { return alive_; }
  bool stopped() const { return stopped_; }
  const base::Clock& clock() const { return clock_; }
  // Nothing of it runs from here on.
  void Die() {
    alive_ = false;
    // They may hold this process.
    const auto dropped = std::exchange(held_, {});
  }
  void Stop() { stopped_ = true; }
  // What should have happened meanwhile happens now.
  void Continue();
  void JumpClock(absl::Duration by) { clock_.offset += by; }
  // Runs after every event of this process.
  void set_after_event(std::function<void()> after_event) { after_event_ = std::move(after_event); }

 private:
  friend class World;
  struct OwnClock : base::Clock {
    explicit OwnClock(World* w) : world(w) {}
    absl::Duration Now() const override;
    World* const world;
    absl::Duration offset;
  };

  OwnClock clock_;
  World* const world_;
  const std::string name_;
  bool alive_ = true;
  bool stopped_ = false;
  std::function<void()> after_event_;
  std::vector<std::pair<const char*, std::function<void()>>> held_;  // while stopped
};

// One thread only.
class World {
 public:
  explicit World(uint64_t seed) : random_(seed) {}

  absl::Duration now() const { return now_; }
  Random& random() { return random_; }

  // Runs `event` after `delay`: in `process` if that is alive then (later, if it is stopped), or
  // nowhere in particular (null). Of two events at one moment the one that was asked for first goes
  // first. `label` is a literal.
  void After(absl::Duration delay,
             std::shared_ptr<Process> process,
             const char* label,
             std::function<void()> event);
  // The next event; false when there is none.
  bool RunOne();
  uint64_t num_events() const { return num_events_; }
  // Runs after every event.
  void set_after_event(std::function<void()> after_event) { after_event_ = std::move(after_event); }

  // For people. Nothing is kept unless tracing.
  void set_tracing(bool on) { tracing_ = on; }
  bool tracing() const { return tracing_; }
  template <typename... Parts>
  void Trace(const Parts&... parts) {
    if (tracing_) AddToTrace(absl::StrCat(parts...));
  }
  const std::string& trace() const { return trace_; }
  // Of all events so far: equal for equal runs.
  uint64_t digest() const { return digest_; }

 private:
  friend class Process;
  struct Event {
    absl::Duration at;
    uint64_t number;
    std::shared_ptr<Process> process;  // shared with its owner and with what is under way to it
    const char* label;
    std::function<void()> run;
  };
  struct Later {
    bool operator()(const Event& a, const Event& b) const {
      return a.at != b.at ? a.at > b.at : a.number > b.number;
    }
  };

  void AddToTrace(const std::string& line);
  void Run(const std::shared_ptr<Process>& process,
           const char* label,
           const std::function<void()>& run);

  Random random_;
  absl::Duration now_;
  uint64_t last_number_ = 0;
  uint64_t num_events_ = 0;
  uint64_t digest_ = 0;
  std::vector<Event> events_;  // a heap
  std::function<void()> after_event_;
  bool tracing_ = false;
  std::string trace_;
};

}  // namespace baton::sim
