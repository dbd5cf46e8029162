#include "engine/base/hash_weights.h"
#include "engine/ops/cuda/device_vectors.h"
#include "engine/ops/cuda/gpu.h"
#include "engine/ops/cuda/kernels.h"

namespace baton::ops::cuda {
namespace {

constexpr int kThreads = 256;

// One thread per eight neighbouring columns; the grid is (chunks of a row, rows).
__global__ void __launch_bounds__(kThreads) HashFillKernel(const HashFillParams p) {
  const int chunk = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (chunk >= p.cols / 8) return;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i] = base::HashWeight(p.seed, p.first_row + row, p.first_col + 8 * chunk + i, p.std);
    const int64_t at = row * p.cols + 8 * chunk;
    if (p.element == Element::kFp8) {
      StoreFp8x8(static_cast<uint8_t*>(p.out) + at, x, p.inverse_scale);
    } else if (p.element == Element::kBf16) {
      Store8(static_cast<__nv_bfloat16*>(p.out) + at, x);
    } else {
      Store8(static_cast<float*>(p.out) + at, x);
    }
  }
}

}  // namespace

cudaError_t HashFill(const HashFillParams& params, cudaStream_t stream) {
  if (params.out == nullptr || params.rows < 0 || params.cols <= 0 || params.cols % 8 != 0 ||
      params.element == Element::kF16)
    return cudaErrorInvalidValue;
  if (params.rows == 0) return cudaSuccess;
  return gpu::Launch(HashFillKernel, GridOf8(params.cols, params.rows, kThreads), dim3(kThreads), 0,
                     stream, params);
}

}  // namespace baton::ops::cuda
