#pragma once

// Where a token's row lies in the paged cache, and how eight of its values are written and read.

#include "engine/ops/cuda/device_vectors.h"
#include "engine/ops/cuda/kernels.h"

namespace baton::ops::cuda {

inline constexpr int kBlockTokens = 64;

__device__ __forceinline__ int ElementBytes(CacheFormat format) {
  return format == CacheFormat::kF32 ? 4 : format == CacheFormat::kBf16 ? 2 : 1;
}

// Index of (side, head, row) among the rows of a block.
__device__ __forceinline__ int RowIndex(const CacheLayer& cache, int side, int head, int row) {
  return (side * cache.num_kv_heads + head) * kBlockTokens + row;
}

// The rows of (side, head) of a block.
__device__ __forceinline__ uint8_t* HeadRows(const CacheLayer& cache,
                                             int64_t block,
                                             int side,
                                             int head) {
  return cache.base + block * cache.block_bytes +
         static_cast<int64_t>(RowIndex(cache, side, head, 0)) * cache.head_dim *
             ElementBytes(cache.format);
}

// kFp8Dynamic: the scale of a row.
__device__ __forceinline__ float* RowScale(const CacheLayer& cache, int64_t block, int row_index) {
  const int64_t payload = int64_t{2} * cache.num_kv_heads * kBlockTokens * cache.head_dim;
  return reinterpret_cast<float*>(cache.base + block * cache.block_bytes + payload) + row_index;
}

}  // namespace baton::ops::cuda
