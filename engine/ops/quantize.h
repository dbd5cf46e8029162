#pragma once

// How weights and activations become codes: one definition for all backends. Call with denormals
// flushed (flush_denormals.h), as everything that takes part in a sum.

#include <cstdint>

#include "engine/base/bf16.h"
#include "engine/ops/canonical_math.h"

namespace baton::ops {

inline constexpr int kQ4Group = 32;
inline constexpr float kInt8Max = 127.0f;

// A scale chosen from the largest magnitude: code = value * inverse, value = code * scale.
// Both are 0 for a row of (nearly) nothing. With an infinity or NaN in the row the scale is NaN and
// the codes are 0, so that everything computed from the row is NaN. inverse == 0 means: write
// zeros.
struct DynamicScale {
  float scale;
  float inverse;
};

// `magnitude_bits`: the largest of (bits & 0x7fffffff), compared as integers, so that NaN is larger
// than all.
[[gnu::always_inline]] inline DynamicScale ScaleFor(uint32_t magnitude_bits, float code_max) {
  if (magnitude_bits >= 0x7f800000u) return {base::FloatFromBits(0x7fc00000u), 0.0f};
  const float magnitude = base::FloatFromBits(magnitude_bits);
  if (magnitude < 1e-30f) return {0.0f, 0.0f};
  return {magnitude / code_max, code_max / magnitude};
}

[[gnu::always_inline]] inline uint32_t MagnitudeBits(float value) {
  return base::FloatBits(value) & 0x7fffffffu;
}

// Nearest even; |value * inverse| is at most 127 and a rounding error.
[[gnu::always_inline]] inline int8_t Int8Code(float value, float inverse) {
  const float magic = F32x1::Fma({value}, {inverse}, {kRoundMagic}).v;
  return static_cast<int8_t>(base::FloatBits(magic) - base::FloatBits(kRoundMagic));
}

// Of the largest of n values.
uint32_t LargestMagnitudeBits(const float* values, int n);
// codes [n]; returns the row's scale.
float QuantizeRowInt8(const float* values, int n, int8_t* codes);
// The same for a part of a row whose largest magnitude is given.
float QuantizeRowInt8(const float* values, int n, uint32_t largest, int8_t* codes);

// Activations of kQ4: groups of 32 (the last may be shorter), each as a row of its own. codes [n],
// by group its scale, and that scale times the sum of its codes.
void QuantizeGroupsInt8(const float* values, int n, int8_t* codes, float* scales, float* sums);

// Groups of 32; n % 32 == 0. codes [n] in 0..15, scales and minimums [n / 32], which are f16 values
// where they are within its range. A group that is not finite is NaN.
void QuantizeRowQ4(const float* values, int n, uint8_t* codes, float* scales, float* minimums);

// e4m3: values of a square block of this side share a scale.
inline constexpr int kFp8Block = 128;
// The smallest power of two with magnitude / scale <= 448; 1 for zeros, NaN where something is not
// finite (then codes are zeros). A power of two, because then scale * code has the four significant
// bits of the code, and is a bf16 number.
float Fp8BlockScale(uint32_t magnitude_bits);
// codes [n] of values with one scale.
void QuantizeFp8(const float* values, int n, float scale, uint8_t* codes);

// The weight that a 4-bit code stands for. Stored formats have scales of at most 17 significant
// bits, so the product is exact and this is what rounding it first would give.
[[gnu::always_inline]] inline float Q4Value(uint8_t code, float scale, float minimum) {
  return F32x1::Fma({scale}, {static_cast<float>(code)}, {minimum}).v;
}

}  // namespace baton::ops
