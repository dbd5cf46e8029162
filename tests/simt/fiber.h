#pragma once

// Stacks that take turns on one OS thread: one per CUDA thread. x86-64 System V only.

#include <cstddef>

#if !defined(__x86_64__)
#error "the context switch is written for x86-64"
#endif

// The engine is compiled without the thread sanitizer (only kernels are judged), so the build says
// whether the program has it.
#if defined(BATON_SIMT_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace baton::simt {

struct Fiber {
  void* stack_pointer = nullptr;  // where it stopped
  char* stack = nullptr;          // lowest usable address; a guard page lies below
  size_t stack_bytes = 0;
  void* asan_stack = nullptr;
  void* tsan_fiber = nullptr;
};

// Maps a stack of `stack_bytes` with a guard page. Never freed: fibers are used again by every
// launch. `number` staggers the tops, so that the hot lines of 32 stacks do not share cache sets.
void CreateFiber(Fiber* fiber, size_t stack_bytes, unsigned number);

// The next switch to `fiber` calls `entry`, which must call FinishSwitch first and never return.
// Whatever was on the stack is forgotten: no destructor runs.
void ResetFiber(Fiber* fiber, void (*entry)(), unsigned number);

// Stands for the stack that the caller of a launch runs on.
void AdoptCurrentStack(Fiber* fiber);

// Stops `from`, which is running, and goes on with `to`. Returns when somebody switches back.
void SwitchFiber(Fiber* from, Fiber* to);
// First thing on the new stack after a switch. `main`: the adopted stack, whose bounds the address
// sanitizer tells at the first switch away from it.
void FinishSwitch(Fiber* self, Fiber* main);

// An edge of CUDA's memory model, for the thread sanitizer; nothing in other builds.
inline void ReleaseMemory(void* address) {
#if defined(BATON_SIMT_TSAN)
  __tsan_release(address);
#else
  static_cast<void>(address);
#endif
}
inline void AcquireMemory(void* address) {
#if defined(BATON_SIMT_TSAN)
  __tsan_acquire(address);
#else
  static_cast<void>(address);
#endif
}

}  // namespace baton::simt
