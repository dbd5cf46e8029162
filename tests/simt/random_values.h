#pragma once

// Inputs of the kernel tests, drawn from a seed.

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <numbers>
#include <random>
#include <vector>

#include "engine/base/bf16.h"

namespace baton::simt {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  int Between(int low, int high) {  // both included
    return low + static_cast<int>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  int Pick(std::initializer_list<int> values) {
    return *(values.begin() + Between(0, static_cast<int>(values.size()) - 1));
  }
  // Normal, rounded to bf16, so that it is the same in f32 and in bf16.
  float Value(float spread = 1.0f, float center = 0.0f) {
    const double u = (engine_() >> 11) * 0x1p-53, v = (engine_() >> 11) * 0x1p-53;
    const double normal = std::sqrt(-2 * std::log1p(-u)) * std::cos(2 * std::numbers::pi * v);
    return base::RoundToBf16(static_cast<float>(center + spread * normal));
  }
  std::vector<float> Values(size_t count, float spread = 1.0f, float center = 0.0f) {
    std::vector<float> values(count);
    for (float& value : values) value = Value(spread, center);
    return values;
  }
  // A random selection of `count` of 0 .. range - 1, in random order.
  std::vector<int> Distinct(int count, int range) {
    std::vector<int> all(range);
    for (int i = 0; i < range; ++i) all[i] = i;
    for (int i = 0; i < count; ++i) std::swap(all[i], all[Between(i, range - 1)]);
    all.resize(count);
    return all;
  }

 private:
  std::mt19937_64 engine_;
};

inline std::vector<uint16_t> ToBf16(const std::vector<float>& values) {
  std::vector<uint16_t> bits(values.size());
  for (size_t i = 0; i < values.size(); ++i) bits[i] = base::Bf16FromFloat(values[i]);
  return bits;
}

inline float FloatFromF16(uint16_t bits) {
  const float sign = (bits & 0x8000u) != 0 ? -1.0f : 1.0f;
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
}

}  // namespace baton::simt
