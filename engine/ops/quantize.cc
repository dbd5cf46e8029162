#include "engine/ops/quantize.h"

#include <algorithm>
#include <cmath>

#include "engine/base/dequant.h"
#include "engine/base/fp8.h"

namespace baton::ops {
namespace {

// The nearest f16 value; what is too large for one stays as it is.
float RoundToF16(float value) {
  const float rounded = base::F16ToF32(base::F32ToF16(value));
  return MagnitudeBits(rounded) < 0x7f800000u ? rounded : value;
}

}  // namespace

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
    const uint32_t infinity = 0x7f800000u;
    if (LargestMagnitudeBits(w, kQ4Group) >= infinity || MagnitudeBits(range) >= infinity) {
      scales[group] = minimums[group] = base::FloatFromBits(0x7fc00000u);
      std::fill_n(codes + group * kQ4Group, kQ4Group, uint8_t{0});
      continue;
    }
    const float scale = RoundToF16(range / 15.0f), minimum = RoundToF16(*lowest);
    scales[group] = scale;
    minimums[group] = minimum;
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    for (int i = 0; i < kQ4Group; ++i) {
      const float code = std::nearbyint((w[i] - minimum) * inverse);
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
