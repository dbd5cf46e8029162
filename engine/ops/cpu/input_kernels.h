#pragma once

// How kernels write the input of the next linear layer, whatever its format.

#include <cstring>

#include "engine/ops/canonical_math.h"
#include "engine/ops/cpu/kernel_args.h"
#include "engine/ops/quantize.h"

namespace baton::ops::cpu {

template <typename V>
[[gnu::always_inline]] inline V LoadPartial(const float* p, int n) {
  if (n >= 16) return V::Load(p);
  float lanes[16] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return V::Load(lanes);
}

template <typename V>
[[gnu::always_inline]] inline void StorePartial(float* p, V x, int n) {
  if (n >= 16) {
    V::Store(p, x);
    return;
  }
  float lanes[16];
  V::Store(lanes, x);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

// Sum of the 16 lanes, in the order of lanes16.
template <typename V>
[[gnu::always_inline]] inline float SumLanes(V x) {
  float lanes[16];
  V::Store(lanes, x);
  return ReduceLanes16(lanes);
}

// lanes16 of the squares of x [n].
template <typename V>
[[gnu::always_inline]] inline float SumOfSquares(const float* x, int n) {
  V sum = V::Zero();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const V v = V::Load(x + i);
    sum = V::Fma(v, v, sum);
  }
  if (i < n) {
    const V v = LoadPartial<V>(x + i, n - i);
    sum = V::Fma(v, v, sum);
  }
  return SumLanes(sum);
}

// Address of (token t, k) in AMX tiles; `element`: bytes of one value.
[[gnu::always_inline]] inline uint8_t* TileAddress(const Input& input, int t, int k, int element) {
  const int step_values = 64 / element;
  const size_t step = static_cast<size_t>(t / 32) * input.num_steps + k / step_values;
  return input.codes + step * 2048 + (t % 32) * 64 + static_cast<size_t>(k % step_values) * element;
}

// Values [k, k + n) of token t, n <= 16. For the formats with codes QuantizeInput must follow when
// the token is complete.
template <typename V>
[[gnu::always_inline]] inline void StoreInput(const Input& out, int t, int k, V x, int n) {
  if (out.format == InputFormat::kTilesBf16) {
    uint16_t bits[16];
    V::StoreBf16(bits, x);
    if (k % 16 == 0) {
      std::memcpy(TileAddress(out, t, k, 2), bits, 2 * static_cast<size_t>(n));
    } else {
      for (int i = 0; i < n; ++i) std::memcpy(TileAddress(out, t, k + i, 2), bits + i, 2);
    }
    return;
  }
  if (out.format == InputFormat::kRowsBf16) x = V::RoundBf16(x);
  StorePartial(out.rows + static_cast<size_t>(t) * out.stride + k, x, n);
}

template <typename V>
[[gnu::always_inline]] inline uint32_t LargestMagnitude(const float* x, int n) {
  V largest = V::Zero();
  for (int i = 0; i < n; i += 16) largest = V::MaxMagnitude(largest, LoadPartial<V>(x + i, n - i));
  return V::LargestBits(largest);
}

// The largest magnitude of each token's row.
template <typename V>
void LargestOfInput(const Input& input, int begin, int end, uint32_t* out) {
  for (int t = begin; t < end; ++t) {
    out[t] = LargestMagnitude<V>(input.rows + static_cast<size_t>(t) * input.stride, input.width);
  }
}

// Whether the f32 of a complete row have to be quantised.
[[gnu::always_inline]] inline bool HasCodes(const Input& input) {
  return input.format == InputFormat::kRowsInt8 || input.format == InputFormat::kTilesInt8 ||
         input.format == InputFormat::kRowsGroups;
}

// The same of one row of kRowsGroups.
template <typename V>
[[gnu::always_inline]] inline void QuantizeGroups(const Input& input, int t) {
  const float* x = input.rows + static_cast<size_t>(t) * input.stride;
  auto* codes = reinterpret_cast<int8_t*>(input.codes) + static_cast<size_t>(t) * input.code_stride;
  float* scales = input.scales + static_cast<size_t>(t) * input.scale_stride;
  for (int k = 0; k < input.width; k += kQ4Group, codes += kQ4Group, scales += 2) {
    const int left = input.width - k;
    V low = LoadPartial<V>(x + k, left), high = LoadPartial<V>(x + k + 16, left - 16);
    const V magnitudes = V::MaxMagnitude(V::MaxMagnitude(V::Zero(), low), high);
    const DynamicScale scale = ScaleFor(V::LargestBits(magnitudes), kInt8Max);
    if (scale.inverse == 0.0f) low = high = V::Zero();
    V::StoreInt8(codes, low, scale.inverse);
    V::StoreInt8(codes + 16, high, scale.inverse);
    scales[0] = scale.scale;
    scales[1] = scale.scale * static_cast<float>(V::SumInt8(codes));
  }
}

// Rows of f32 -> codes and scales, for tokens [begin, end).
template <typename V>
void QuantizeInput(const Input& input, const uint32_t* largest, int begin, int end) {
  for (int t = begin; t < end; ++t) {
    if (input.format == InputFormat::kRowsGroups) {
      QuantizeGroups<V>(input, t);
      continue;
    }
    const float* x = input.rows + static_cast<size_t>(t) * input.stride;
    const uint32_t magnitude =
        largest != nullptr ? largest[t] : LargestMagnitude<V>(x, input.width);
    const DynamicScale scale = ScaleFor(magnitude, kInt8Max);
    input.scales[t] = scale.scale;
    for (int k = 0; k < input.width; k += 16) {
      // Values past the end are zeros of the padding, and so are their codes.
      V value = LoadPartial<V>(x + k, input.width - k);
      if (scale.inverse == 0.0f) value = V::Zero();
      if (input.format == InputFormat::kTilesInt8) {
        V::StoreInt8(reinterpret_cast<int8_t*>(TileAddress(input, t, k, 1)), value, scale.inverse);
      } else {
        uint8_t* row = input.codes + static_cast<size_t>(t) * input.code_stride;
        V::StoreCodes(row + static_cast<size_t>(k) * sizeof(typename V::Code), value,
                      scale.inverse);
      }
    }
  }
}

}  // namespace baton::ops::cpu
