#pragma once

// The end of RMSNorm, shared by the kernels that make a row of the residual: device code.

#include "engine/ops/cuda/block_sum.h"
#include "engine/ops/cuda/device_vectors.h"
#include "engine/ops/cuda/linear_rows.h"

namespace baton::ops::cuda {

constexpr int kNormThreads = 256;
constexpr int kNormMaxChunks = 8;  // a thread's share of a row of kNormMaxWidth
constexpr int kNormMaxWidth = kNormMaxChunks * 8 * kNormThreads;

// The chunk of eight that a thread of the block holds as its c-th: kNormThreads chunks apart.
__device__ __forceinline__ int NormChunk(int c) {
  return c * kNormThreads + static_cast<int>(threadIdx.x);
}

// Normalises the block's row and stores it as the next linear's input. `x` is zero in chunks past
// the row's end; all threads of a block of kNormThreads call it.
template <int kChunks>
__device__ __forceinline__ void NormRow(float (&x)[kChunks][8],
                                        const float* weight,
                                        int width,
                                        float eps,
                                        const LinearRows& out,
                                        int64_t token) {
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(x[c][i], x[c][i], sum);
  }
  const float scale =
      ExactRsqrt(BlockSum<kNormThreads / 32>(sum) / static_cast<float>(width) + eps);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int chunk = NormChunk(c);
    const bool inside = chunk < width / 8;
    if (inside) {
      float w[8];
      Load8(weight + 8 * chunk, w);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[c][i] = (x[c][i] * scale) * w[i];
    }
    StoreLinear8(out, token, width, chunk, inside, x[c]);
  }
}

// How many chunks a thread needs for a row of this width.
inline int NormChunks(int width) { return (width / 8 + kNormThreads - 1) / kNormThreads; }

}  // namespace baton::ops::cuda
