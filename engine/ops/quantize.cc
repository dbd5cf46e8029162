#include "engine/ops/quantize.h"

#include <algorithm>
#include <cmath>

#include "engine/base/fp8.h"

namespace baton::ops {

uint32_t LargestMagnitudeBits(const float* values, int n) {
  uint32_t largest = 0;
  for (int i = 0; i < n; ++i) largest = std::max(largest, MagnitudeBits(values[i]));
  return largest;
}

float QuantizeRowInt8(const float* values, int n, int8_t* codes) {
  return QuantizeRowInt8(values, n, LargestMagnitudeBits(values, n), codes);
}

float QuantizeRowInt8(const float* values, int n, uint32_t largest, int8_t* codes) {
  const DynamicScale scale = ScaleFor(largest, kInt8Max);
  for (int i = 0; i < n; ++i)
    codes[i] = scale.inverse == 0.0f ? 0 : Int8Code(values[i], scale.inverse);
  return scale.scale;
}

void QuantizeGroupsInt8(const float* values, int n, int8_t* codes, float* scales, float* sums) {
  for (int group = 0; group * kQ4Group < n; ++group) {
    const int first = group * kQ4Group, count = std::min(n - first, kQ4Group);
    scales[group] = QuantizeRowInt8(values + first, count, codes + first);
    int32_t sum = 0;
    for (int i = 0; i < count; ++i) sum += codes[first + i];
    sums[group] = scales[group] * static_cast<float>(sum);
  }
}

void QuantizeRowQ4(const float* values, int n, uint8_t* codes, float* scales, float* minimums) {
  for (int group = 0; group < n / kQ4Group; ++group) {
    const float* w = values + group * kQ4Group;
    const auto [lowest, highest] = std::minmax_element(w, w + kQ4Group);
    const float range = *highest - *lowest;
    const bool flat = !(range > 1e-30f);
    scales[group] = flat ? 0.0f : range / 15.0f;
    minimums[group] = *lowest;
    const float inverse = flat ? 0.0f : 15.0f / range;
    for (int i = 0; i < kQ4Group; ++i) {
      const float code = std::nearbyint((w[i] - *lowest) * inverse);
      codes[group * kQ4Group + i] = static_cast<uint8_t>(std::clamp(code, 0.0f, 15.0f));
    }
  }
}

float Fp8BlockScale(uint32_t magnitude_bits) {
  constexpr uint32_t kInfinity = 0x7f800000u, kMantissa = 0x007fffffu;
  constexpr uint32_t kE4m3Max = 0x43e00000u;  // 448 = 1.75 * 2^8
  if (magnitude_bits >= kInfinity) return base::FloatFromBits(0x7fc00000u);
  if (magnitude_bits == 0) return 1.0f;
  // Denormals count as the least exponent there is.
  int exponent =
      std::max<int>(static_cast<int>(magnitude_bits >> 23), 1) - static_cast<int>(kE4m3Max >> 23);
  if ((magnitude_bits & kMantissa) > (kE4m3Max & kMantissa)) ++exponent;
  return std::ldexp(1.0f, std::max(exponent, -126));
}

void QuantizeFp8(const float* values, int n, float scale, uint8_t* codes) {
  const float inverse = 1.0f / scale;  // exact, but for NaN
  for (int i = 0; i < n; ++i)
    codes[i] = inverse == inverse ? base::Fp8FromFloat(values[i] * inverse) : 0;
}

}  // namespace baton::ops
