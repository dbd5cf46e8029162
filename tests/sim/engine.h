#pragma once

// The engine thread of a simulated worker: runs the real loop's RunOnce, which stands still between
// layers while the rest of the world goes on.

#include <functional>
#include <memory>

#include "tests/sim/fiber.h"
#include "tests/sim/world.h"

namespace baton::sim {

class Engine {
 public:
  // `run_once` is the loop's RunOnce(0). `busy` says whether calls are open: then the loop comes
  // round by itself too, as a real one does.
  Engine(World* world,
         std::shared_ptr<Process> process,
         absl::Duration layer_time_max,
         std::function<bool()> run_once,
         std::function<bool()> busy);

  // After each layer of a step, from inside it.
  void OnLayer();
  // After an event of the process, which may have posted something.
  void Kick();
  // The process dies or stops its engine: what is under way ends at once, and nothing follows.
  void Finish();

 private:
  void Tick();
  void AfterRun();
  void Schedule(absl::Duration delay, const char* label);

  World* const world_;
  const std::shared_ptr<Process> process_;
  const absl::Duration layer_time_max_;
  const std::function<bool()> run_once_;
  const std::function<bool()> busy_;
  Fiber fiber_;
  bool worked_ = false;
  bool own_event_ = false;  // the event that is ending was ours
  bool dying_ = false;
  uint64_t scheduled_ = 0;  // number of the tick that counts; earlier ones are void
  bool soon_ = false;       // it comes at once
};

}  // namespace baton::sim
