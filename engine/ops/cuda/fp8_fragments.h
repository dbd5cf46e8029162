#pragma once

// e4m3 bytes to the f16 fragments of the tensor cores, and the arithmetic of the online softmax.

#include "engine/ops/cuda/device_vectors.h"

namespace baton::ops::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;

// Two e4m3 codes (the low 16 bits) as two f16: exact.
__device__ __forceinline__ uint32_t HalvesOfFp8x2(uint32_t codes) {
  const __half2_raw halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  return static_cast<uint32_t>(halves.x) | static_cast<uint32_t>(halves.y) << 16;
}

__device__ __forceinline__ uint32_t PackHalves(float low, float high) {
  const __half2_raw raw = __floats2half2_rn(low, high);
  return static_cast<uint32_t>(raw.x) | static_cast<uint32_t>(raw.y) << 16;
}

// Four codes with every NaN made zero.
__device__ __forceinline__ uint32_t NanCodesToZero(uint32_t codes) {
  const uint32_t carries = ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  return codes & ~((carries >> 7) * 0xffu);
}

// The running maximum as something that can be subtracted: 0 while no token was seen.
__device__ __forceinline__ float FiniteMaximum(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

}  // namespace baton::ops::cuda
