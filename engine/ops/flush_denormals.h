#pragma once

// FTZ and DAZ for the current thread: part of the canonical order of sums, because AMX tiles always
// flush.

#include <cstdint>
#include <xmmintrin.h>

namespace baton::ops {

// Sets FTZ+DAZ and round-to-nearest; the destructor restores what was set before. On the stack
// only.
class ScopedFlushDenormals {
 public:
  ScopedFlushDenormals() : saved_(_mm_getcsr()) {
    _mm_setcsr((saved_ & ~kRoundingMask) | kFlushBits);
  }
  ~ScopedFlushDenormals() { _mm_setcsr(saved_); }
  ScopedFlushDenormals(const ScopedFlushDenormals&) = delete;
  ScopedFlushDenormals& operator=(const ScopedFlushDenormals&) = delete;

 private:
  static constexpr uint32_t kFlushBits = 0x8040;     // FTZ bit 15, DAZ bit 6
  static constexpr uint32_t kRoundingMask = 0x6000;  // both bits 0: nearest even
  uint32_t saved_;
};

}  // namespace baton::ops
