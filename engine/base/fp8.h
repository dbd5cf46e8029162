#pragma once

// FP8 E4M3 (the "fn" kind: no infinity, S.1111.111 is NaN, largest value 448, smallest 2^-9) for
// the host. Correct in any FTZ/DAZ mode.

#include <cstdint>

#include "engine/base/bf16.h"

namespace baton::base {

inline constexpr float kFp8Max = 448.0f;
inline constexpr uint8_t kFp8Nan = 0x7f;

// Round to nearest even, saturating: everything beyond +-448, infinities too, becomes +-448. NaN
// stays NaN. -0 stays -0.
[[gnu::always_inline]] inline uint8_t Fp8FromFloat(float value) {
  const uint32_t bits = FloatBits(value);
  const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | kFp8Nan;
  if (magnitude >= 0x43e00000u) return sign | 0x7eu;  // >= 448
  if (magnitude < 0x3c800000u) {                      // < 2^-6: a multiple of 2^-9
    // The sum's last place is 2^-9, so the addition rounds to it, and the low bits are the code (8:
    // the least normal).
    const float shifted = FloatFromBits(magnitude) + 16384.0f;
    return sign | static_cast<uint8_t>(FloatBits(shifted) & 0xfu);
  }
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return sign | static_cast<uint8_t>((rounded >> 20) - (120u << 3));
}

// Exact.
[[gnu::always_inline]] inline float FloatFromFp8(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7fu;
  if (magnitude == kFp8Nan) return FloatFromBits(sign | 0x7fc00000u);
  if (magnitude < 8) {  // a multiple of 2^-9
    return FloatFromBits(FloatBits(static_cast<float>(magnitude) * 0.001953125f) | sign);
  }
  return FloatFromBits(sign | ((magnitude << 20) + (120u << 23)));
}

}  // namespace baton::base
