#include "tests/sim/engine.h"

#include <utility>

namespace baton::sim {
namespace {

constexpr absl::Duration kPollInterval = absl::Milliseconds(50);

}  // namespace

Engine::Engine(World* world,
               std::shared_ptr<Process> process,
               absl::Duration layer_time_max,
               std::function<bool()> run_once,
               std::function<bool()> busy)
    : world_(world),
      process_(std::move(process)),
      layer_time_max_(layer_time_max),
      run_once_(std::move(run_once)),
      busy_(std::move(busy)) {}

void Engine::Schedule(absl::Duration delay, const char* label) {
  const uint64_t number = ++scheduled_;
  world_->After(delay, process_, label, [this, number] {
    own_event_ = true;
    if (number == scheduled_) Tick();
  });
}

void Engine::Kick() {
  if (std::exchange(own_event_, false) || fiber_.running() || soon_ || dying_) return;
  soon_ = true;
  Schedule(world_->random().Between(absl::Microseconds(1), absl::Microseconds(20)), "engine");
}

void Engine::Tick() {
  soon_ = false;
  if (dying_) return;
  fiber_.Start([this] { worked_ = run_once_(); });
  AfterRun();
}

void Engine::OnLayer() {
  if (dying_) return;
  world_->After(world_->random().Between(absl::Microseconds(10), layer_time_max_), process_,
                "layer", [this] {
                  own_event_ = true;
                  if (dying_) return;  // it has gone on to the end
                  fiber_.Resume();
                  AfterRun();
                });
  fiber_.Yield();
}

void Engine::AfterRun() {
  if (fiber_.running() || dying_) return;
  if (worked_) {
    soon_ = true;
    Schedule(absl::Microseconds(1), "engine");
  } else if (busy_()) {
    Schedule(kPollInterval, "engine poll");
  }
}

void Engine::Finish() {
  dying_ = true;
  while (fiber_.running()) fiber_.Resume();
}

}  // namespace baton::sim
