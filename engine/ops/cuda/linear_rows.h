#pragma once

// How a kernel writes the input of the next linear layer.

#include "engine/ops/cuda/device_vectors.h"
#include "engine/ops/cuda/kernels.h"

namespace baton::ops::cuda {

// Elements that share one scale in e4m3.
inline constexpr int kScaleGroup = 128;

// Writes x to columns 8 * chunk .. + 7 of row t. All lanes of the warp call it, sixteen
// neighbouring lanes with sixteen neighbouring chunks of one row (one group of scales); `store`:
// this lane's chunk exists.
__device__ __forceinline__ void StoreLinear8(
    const LinearRows& out, int64_t t, int width, int chunk, bool store, const float (&x)[8]) {
  const int64_t at = t * width + int64_t{8} * chunk;
  if (out.element == Element::kFp8) {
    const GroupScale scale = ScaleForMagnitude(SegmentMax<16>(LargestMagnitude(x)));
    if (!store) return;
    uint8_t* to = static_cast<uint8_t*>(out.data) + at;
    if (scale.inverse == 0.0f) {  // zeros, even where the group holds infinities
      *reinterpret_cast<uint2*>(to) = make_uint2(0, 0);
    } else {
      StoreFp8x8(to, x, scale.inverse);
    }
    constexpr int kChunks = kScaleGroup / 8;
    if (chunk % kChunks == 0) out.scales[chunk / kChunks * out.pitch + t] = scale.scale;
  } else if (store) {
    if (out.element == Element::kBf16) {
      Store8(static_cast<__nv_bfloat16*>(out.data) + at, x);
    } else {
      Store8(static_cast<float*>(out.data) + at, x);
    }
  }
}

// Whether rows of `width` can be written so.
inline bool LinearRowsFit(const LinearRows& out, int width) {
  if (out.data == nullptr || width <= 0 || width % 8 != 0) return false;
  if (out.element == Element::kFp8) return width % kScaleGroup == 0 && out.scales != nullptr;
  return out.element == Element::kBf16 || out.element == Element::kF32;
}

}  // namespace baton::ops::cuda
