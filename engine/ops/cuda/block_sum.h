#pragma once

#include "engine/ops/cuda/device_vectors.h"
#include "engine/ops/cuda/gpu.h"

namespace baton::ops::cuda {

// The sum over a block of kWarps warps, in every thread. A block that calls it again has met at a
// barrier in between.
template <int kWarps>
__device__ __forceinline__ float BlockSum(float value) {
  BATON_SHARED(float, partial, [kWarps]);
  value = SegmentSum<32>(value);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp];
  return sum;
}

}  // namespace baton::ops::cuda
