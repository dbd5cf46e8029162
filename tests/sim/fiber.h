#pragma once

// A thread of control that runs when it is told to: engine threads of simulated workers, which are
// in the middle of a step while other things happen, without real threads.

#include <functional>
#include <memory>

namespace baton::sim {

// One thread only.
class Fiber {
 public:
  Fiber();
  // Not while a body is under way.
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs `body` until it ends or yields. Not while one is under way.
  void Start(std::function<void()> body);
  // Goes on behind the Yield.
  void Resume();
  // From inside the body: back to whoever called Start or Resume.
  void Yield();
  bool running() const { return running_; }

 private:
  struct Context;
  static void Enter(unsigned low, unsigned high);

  std::unique_ptr<Context> context_;
  std::function<void()> body_;
  bool running_ = false;
};

}  // namespace baton::sim
