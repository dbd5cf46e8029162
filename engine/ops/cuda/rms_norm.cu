#include "engine/ops/cuda/device_vectors.h"
#include "engine/ops/cuda/gpu.h"
#include "engine/ops/cuda/kernels.h"
#include "engine/ops/cuda/norm_row.h"

namespace baton::ops::cuda {
namespace {

__device__ __forceinline__ void AddDelta(const RmsNormParams& p, int64_t at, float (&x)[8]) {
  float delta[8];
  if (p.delta_element == Element::kF32) {
    Load8(static_cast<const float*>(p.delta) + at, delta);
  } else {
    Load8(static_cast<const __nv_bfloat16*>(p.delta) + at, delta);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] += delta[i];
}

// One block per token.
template <int kChunks>
__global__ void __launch_bounds__(kNormThreads) RmsNormKernel(const RmsNormParams p) {
  const int64_t token = blockIdx.x;
  const int64_t row = p.rows != nullptr ? __ldg(p.rows + token) : token;
  float* residual = p.residual + row * p.width;
  float x[kChunks][8];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int chunk = NormChunk(c);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[c][i] = 0.0f;
    if (chunk >= p.width / 8) continue;
    Load8(residual + 8 * chunk, x[c]);
    if (p.delta != nullptr) {
      AddDelta(p, token * p.width + 8 * chunk, x[c]);
      Store8(residual + 8 * chunk, x[c]);
    }
  }
  NormRow(x, p.weight, p.width, p.eps, p.out, token);
}

}  // namespace

cudaError_t RmsNorm(const RmsNormParams& params, cudaStream_t stream) {
  if (params.num_tokens < 0 || !LinearRowsFit(params.out, params.width) ||
      params.width > kNormMaxWidth || (params.rows != nullptr && params.delta != nullptr))
    return cudaErrorInvalidValue;
  if (params.num_tokens == 0) return cudaSuccess;
  const int chunks = NormChunks(params.width);
  const auto kernel = chunks == 1   ? RmsNormKernel<1>
                      : chunks == 2 ? RmsNormKernel<2>
                      : chunks <= 4 ? RmsNormKernel<4>
                                    : RmsNormKernel<kNormMaxChunks>;
  return gpu::Launch(kernel, dim3(static_cast<unsigned>(params.num_tokens)), dim3(kNormThreads), 0,
                     stream, params);
}

}  // namespace baton::ops::cuda
