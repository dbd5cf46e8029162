#pragma once

// bfloat16 as bits. Integer arithmetic only, so the results do not depend on the thread's FTZ/DAZ
// mode. Everything is forced inline: the headers of the CPU kernels are compiled at several
// instruction set levels, and an out-of-line copy made at a high level must never be linked into
// code for a lower one.

#include <cstdint>
#include <cstring>

namespace baton::base {

[[gnu::always_inline]] inline uint32_t FloatBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

[[gnu::always_inline]] inline float FloatFromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Round to nearest even; beyond the largest finite value becomes infinity; NaN stays NaN (made
// quiet).
[[gnu::always_inline]] inline uint16_t Bf16FromFloat(float value) {
  const uint32_t bits = FloatBits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

[[gnu::always_inline]] inline float FloatFromBf16(uint16_t bits) {
  return FloatFromBits(static_cast<uint32_t>(bits) << 16);
}

// The nearest bf16 value, as f32.
[[gnu::always_inline]] inline float RoundToBf16(float value) {
  return FloatFromBf16(Bf16FromFloat(value));
}

}  // namespace baton::base
