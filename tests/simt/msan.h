#pragma once

// What the emulator tells clang's memory sanitizer of the memory it hands out and moves: nothing in
// other builds. Only kernels are judged (CMakeLists.txt); for all other code, memory is what it is.

#include <cstddef>

#if defined(BATON_SIMT_MSAN)
#include <sanitizer/msan_interface.h>
#endif

namespace baton::simt {

// Nobody has written this: a kernel must not act on it.
inline void ForgetMemory([[maybe_unused]] const void* memory, [[maybe_unused]] size_t bytes) {
#if defined(BATON_SIMT_MSAN)
  __msan_poison(memory, bytes);
#endif
}
// Somebody has, whom the sanitizer did not see.
inline void KnowMemory([[maybe_unused]] const void* memory, [[maybe_unused]] size_t bytes) {
#if defined(BATON_SIMT_MSAN)
  __msan_unpoison(memory, bytes);
#endif
}
// Ends the program with a report unless all of this has been written.
inline void CheckMemory([[maybe_unused]] const void* memory, [[maybe_unused]] size_t bytes) {
#if defined(BATON_SIMT_MSAN)
  __msan_check_mem_is_initialized(memory, bytes);
#endif
}

}  // namespace baton::simt
