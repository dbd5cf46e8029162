#include "tests/sim/fiber.h"

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/base/log.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define BATON_ASAN_FIBERS 1
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define BATON_TSAN_FIBERS 1
#endif

namespace baton::sim {
namespace {

constexpr size_t kStackBytes = size_t{1} << 20;

// Stacks are used again: a simulation makes many short-lived workers.
std::vector<std::unique_ptr<char[]>>& FreeStacks() {
  static auto* const stacks = new std::vector<std::unique_ptr<char[]>>;
  return *stacks;
}

}  // namespace

struct Fiber::Context {
  ucontext_t inside{};
  ucontext_t outside{};
  std::unique_ptr<char[]> stack;
#if defined(BATON_ASAN_FIBERS)
  void* fake_stack = nullptr;
  const void* outside_stack = nullptr;
  size_t outside_size = 0;
#endif
#if defined(BATON_TSAN_FIBERS)
  void* inside_tsan = nullptr;
  void* outside_tsan = nullptr;
#endif
};

Fiber::Fiber() : context_(std::make_unique<Context>()) {
  if (FreeStacks().empty()) {
    context_->stack.reset(new char[kStackBytes]);
  } else {
    context_->stack = std::move(FreeStacks().back());
    FreeStacks().pop_back();
  }
}

Fiber::~Fiber() {
  BATON_CHECK(!running_);
  FreeStacks().push_back(std::move(context_->stack));
}

void Fiber::Enter(unsigned low, unsigned high) {
  auto* fiber = reinterpret_cast<Fiber*>((static_cast<uintptr_t>(high) << 32) | low);
#if defined(BATON_ASAN_FIBERS)
  __sanitizer_finish_switch_fiber(nullptr, &fiber->context_->outside_stack,
                                  &fiber->context_->outside_size);
#endif
  fiber->body_();
  fiber->running_ = false;
#if defined(BATON_ASAN_FIBERS)
  __sanitizer_start_switch_fiber(nullptr, fiber->context_->outside_stack,
                                 fiber->context_->outside_size);
#endif
#if defined(BATON_TSAN_FIBERS)
  __tsan_switch_to_fiber(fiber->context_->outside_tsan, 0);
#endif
  setcontext(&fiber->context_->outside);
}

void Fiber::Start(std::function<void()> body) {
  BATON_CHECK(!running_);
  body_ = std::move(body);
  running_ = true;
  Context& c = *context_;
  getcontext(&c.inside);
  c.inside.uc_stack.ss_sp = c.stack.get();
  c.inside.uc_stack.ss_size = kStackBytes;
  c.inside.uc_link = nullptr;
  const auto self = reinterpret_cast<uintptr_t>(this);
  makecontext(&c.inside, reinterpret_cast<void (*)()>(&Fiber::Enter), 2,
              static_cast<unsigned>(self & 0xffffffffu), static_cast<unsigned>(self >> 32));
#if defined(BATON_TSAN_FIBERS)
  c.inside_tsan = __tsan_create_fiber(0);
#endif
  Resume();
}

void Fiber::Resume() {
  Context& c = *context_;
#if defined(BATON_ASAN_FIBERS)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, c.stack.get(), kStackBytes);
#endif
#if defined(BATON_TSAN_FIBERS)
  c.outside_tsan = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(c.inside_tsan, 0);
#endif
  swapcontext(&c.outside, &c.inside);
#if defined(BATON_ASAN_FIBERS)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
#if defined(BATON_TSAN_FIBERS)
  if (!running_) __tsan_destroy_fiber(std::exchange(c.inside_tsan, nullptr));
#endif
  if (!running_) body_ = nullptr;
}

void Fiber::Yield() {
  Context& c = *context_;
#if defined(BATON_ASAN_FIBERS)
  __sanitizer_start_switch_fiber(&c.fake_stack, c.outside_stack, c.outside_size);
#endif
#if defined(BATON_TSAN_FIBERS)
  __tsan_switch_to_fiber(c.outside_tsan, 0);
#endif
  swapcontext(&c.inside, &c.outside);
#if defined(BATON_ASAN_FIBERS)
  __sanitizer_finish_switch_fiber(c.fake_stack, &c.outside_stack, &c.outside_size);
#endif
}

}  // namespace baton::sim
