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

// As a thread that computes for another one must, for the same results: with that one's modes.
class ScopedFloatModes {
 public:
  // `modes`: what Current() says there.
  explicit ScopedFloatModes(unsigned modes) : saved_(_mm_getcsr()) { _mm_setcsr(modes); }
  ~ScopedFloatModes() { _mm_setcsr(saved_); }
  ScopedFloatModes(const ScopedFloatModes&) = delete;
  ScopedFloatModes& operator=(const ScopedFloatModes&) = delete;
  static unsigned Current() { return _mm_getcsr(); }

 private:
  const unsigned saved_;
};

}  // namespace baton::ops
