#include "engine/ops/cuda/block_sum.h"
#include "engine/ops/cuda/device_vectors.h"
#include "engine/ops/cuda/gpu.h"
#include "engine/ops/cuda/kernels.h"
#include "engine/ops/cuda/linear_rows.h"

namespace baton::ops::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMaxChunks = 8;  // a thread's share of a row of 16384

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

// One block per token; a thread holds kChunks chunks of eight, kThreads chunks apart.
template <int kChunks>
__global__ void __launch_bounds__(kThreads) RmsNormKernel(const RmsNormParams p) {
  const int64_t token = blockIdx.x;
  const int64_t row = p.rows != nullptr ? __ldg(p.rows + token) : token;
  float* residual = p.residual + row * p.width;
  const int chunks = p.width / 8;
  float x[kChunks][8];
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int chunk = c * kThreads + static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[c][i] = 0.0f;
    if (chunk < chunks) {
      Load8(residual + 8 * chunk, x[c]);
      if (p.delta != nullptr) {
        AddDelta(p, token * p.width + 8 * chunk, x[c]);
        Store8(residual + 8 * chunk, x[c]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(x[c][i], x[c][i], sum);
  }
  const float scale = ExactRsqrt(BlockSum<kWarps>(sum) / static_cast<float>(p.width) + p.eps);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int chunk = c * kThreads + static_cast<int>(threadIdx.x);
    if (chunk < chunks) {
      float weight[8];
      Load8(p.weight + 8 * chunk, weight);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[c][i] = (x[c][i] * scale) * weight[i];
    }
    StoreLinear8(p.out, token, p.width, chunk, chunk < chunks, x[c]);
  }
}

}  // namespace

cudaError_t RmsNorm(const RmsNormParams& params, cudaStream_t stream) {
  if (params.num_tokens < 0 || !LinearRowsFit(params.out, params.width) ||
      params.width > kMaxChunks * 8 * kThreads ||
      (params.rows != nullptr && params.delta != nullptr))
    return cudaErrorInvalidValue;
  if (params.num_tokens == 0) return cudaSuccess;
  const int chunks = (params.width / 8 + kThreads - 1) / kThreads;
  const auto kernel = chunks == 1   ? RmsNormKernel<1>
                      : chunks == 2 ? RmsNormKernel<2>
                      : chunks <= 4 ? RmsNormKernel<4>
                                    : RmsNormKernel<kMaxChunks>;
  return gpu::Launch(kernel, dim3(static_cast<unsigned>(params.num_tokens)), dim3(kThreads), 0,
                     stream, params);
}

}  // namespace baton::ops::cuda
