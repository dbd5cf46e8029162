#include "tests/simt/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Saves the callee-saved registers of the running stack, takes those of the other. (ucontext would
// cost a system call a switch.)
extern "C" void baton_simt_switch(void** save, void* load);
asm(R"(
.text
.type baton_simt_switch,@function
baton_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size baton_simt_switch,.-baton_simt_switch
)");

namespace baton::simt {
namespace {

constexpr size_t kPage = 4096;
constexpr int kSavedRegisters = 6;

}  // namespace

void CreateFiber(Fiber* fiber, size_t stack_bytes, unsigned number) {
  void* memory = mmap(nullptr, stack_bytes + kPage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kPage, PROT_NONE) != 0) std::abort();
  fiber->stack = static_cast<char*>(memory) + kPage;
  fiber->stack_bytes = stack_bytes;
#if defined(BATON_SIMT_TSAN)
  fiber->tsan_fiber = __tsan_create_fiber(0);
#endif
  static_cast<void>(number);
}

void ResetFiber(Fiber* fiber, void (*entry)(), unsigned number) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(fiber->stack, fiber->stack_bytes);
#endif
  fiber->asan_stack = nullptr;
  constexpr size_t kStagger = 320, kStaggerSpan = 8192, kLine = 64;
  char* top = fiber->stack + fiber->stack_bytes - kLine - number * kStagger % kStaggerSpan;
  top -= reinterpret_cast<uintptr_t>(top) % kLine;
  void** frame = reinterpret_cast<void**>(top);
  *--frame = nullptr;  // where a return address would be: keeps the ABI's alignment
  *--frame = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedRegisters; ++i) *--frame = nullptr;
  fiber->stack_pointer = frame;
}

void AdoptCurrentStack(Fiber* fiber) {
  *fiber = Fiber();
#if defined(BATON_SIMT_TSAN)
  fiber->tsan_fiber = __tsan_get_current_fiber();
#endif
}

void SwitchFiber(Fiber* from, Fiber* to) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from->asan_stack, to->stack, to->stack_bytes);
#endif
#if defined(BATON_SIMT_TSAN)
  __tsan_switch_to_fiber(to->tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
  baton_simt_switch(&from->stack_pointer, to->stack_pointer);
}

void FinishSwitch(Fiber* self, Fiber* main) {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom = nullptr;
  size_t size = 0;
  __sanitizer_finish_switch_fiber(self->asan_stack, &bottom, &size);
  if (self != main && main->stack == nullptr) {
    main->stack = static_cast<char*>(const_cast<void*>(bottom));
    main->stack_bytes = size;
  }
#else
  static_cast<void>(self);
  static_cast<void>(main);
#endif
}

}  // namespace baton::simt
