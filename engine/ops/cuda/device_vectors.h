#pragma once

// Eight neighbouring elements at a time, the unit in which kernels load and store: 8, 16 or 32
// bytes, aligned to that (at most 16).

#include <cstdint>

#include "engine/ops/cuda/gpu.h"

namespace baton::ops::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ void Load8(const float* from, float (&x)[8]) {
  const float4* vectors = reinterpret_cast<const float4*>(from);
  const float4 low = __ldg(vectors), high = __ldg(vectors + 1);
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

__device__ __forceinline__ void Load8(const __nv_bfloat16* from, float (&x)[8]) {
  const uint4 words = __ldg(reinterpret_cast<const uint4*>(from));
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(pairs[i] << 16);
    x[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void Load8(const __half* from, float (&x)[8]) {
  const uint4 words = __ldg(reinterpret_cast<const uint4*>(from));
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(pairs[i])));
    x[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(pairs[i] >> 16)));
  }
}

__device__ __forceinline__ void Store8(float* to, const float (&x)[8]) {
  float4* vectors = reinterpret_cast<float4*>(to);
  vectors[0] = make_float4(x[0], x[1], x[2], x[3]);
  vectors[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// Nearest even.
__device__ __forceinline__ void Store8(__nv_bfloat16* to, const float (&x)[8]) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162_raw raw = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    pairs[i] = static_cast<uint32_t>(raw.x) | static_cast<uint32_t>(raw.y) << 16;
  }
  *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Nearest even; beyond the range becomes infinity.
__device__ __forceinline__ void Store8(__half* to, const float (&x)[8]) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half2_raw raw = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
    pairs[i] = static_cast<uint32_t>(raw.x) | static_cast<uint32_t>(raw.y) << 16;
  }
  *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// e4m3, nearest even, saturating at +-448; NaN stays NaN.
__device__ __forceinline__ void StoreFp8x8(uint8_t* to, const float (&x)[8], float inverse_scale) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = make_float2(x[2 * i] * inverse_scale, x[2 * i + 1] * inverse_scale);
    pairs[i] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
  }
  *reinterpret_cast<uint2*>(to) = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// The sum over the kWidth lanes of the caller's segment.
template <int kWidth>
__device__ __forceinline__ float SegmentSum(float value) {
#pragma unroll
  for (int bit = kWidth / 2; bit > 0; bit /= 2) value += __shfl_xor_sync(kAllLanes, value, bit);
  return value;
}

template <int kWidth>
__device__ __forceinline__ uint32_t SegmentMax(uint32_t value) {
#pragma unroll
  for (int bit = kWidth / 2; bit > 0; bit /= 2)
    value = max(value, __shfl_xor_sync(kAllLanes, value, bit));
  return value;
}

template <int kWidth>
__device__ __forceinline__ float SegmentMax(float value) {
#pragma unroll
  for (int bit = kWidth / 2; bit > 0; bit /= 2)
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, bit));
  return value;
}

// The largest magnitude as bits: compared as integers a NaN is larger than all.
__device__ __forceinline__ uint32_t LargestMagnitude(const float (&x)[8]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
  return largest;
}

// As ScaleFor of engine/ops/quantize.h: code = value * inverse, value = code * scale.
struct GroupScale {
  float scale, inverse;
};
__device__ __forceinline__ GroupScale ScaleForMagnitude(uint32_t magnitude_bits) {
  constexpr float kE4m3Max = 448.0f, kLeast = 1e-30f;
  if (magnitude_bits >= 0x7f800000u) return {__uint_as_float(0x7fc00000u), 0.0f};
  const float magnitude = __uint_as_float(magnitude_bits);
  if (magnitude < kLeast) return {0.0f, 0.0f};
  return {__fdiv_rn(magnitude, kE4m3Max), __fdiv_rn(kE4m3Max, magnitude)};
}

// 1 / sqrt(x), both steps correctly rounded, as canonical_math.h.
__device__ __forceinline__ float ExactRsqrt(float x) { return __fdiv_rn(1.0f, __fsqrt_rn(x)); }

// A thread for each eight of `columns`, a block's row of threads for each of `rows`; kernels go on
// to further rows where a grid has no more.
inline dim3 GridOf8(int columns, int rows, int threads) {
  constexpr int kMaxRows = 65535;  // of a grid's second dimension
  return {static_cast<unsigned>((columns / 8 + threads - 1) / threads),
          static_cast<unsigned>(rows < kMaxRows ? rows : kMaxRows)};
}

}  // namespace baton::ops::cuda
