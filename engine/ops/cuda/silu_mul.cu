#include "engine/ops/cuda/device_vectors.h"
#include "engine/ops/cuda/gpu.h"
#include "engine/ops/cuda/kernels.h"
#include "engine/ops/cuda/linear_rows.h"

namespace baton::ops::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float Silu(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  return __fdividef(x, 1.0f + gpu::FastExp2(-x * kLog2E));
}

// One thread per eight elements of a row; the grid is (chunks of a row, tokens).
template <typename T>
__global__ void __launch_bounds__(kThreads) SiluMulKernel(const SiluMulParams p) {
  const int chunk = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  const bool active = chunk < p.width / 8;
  for (int64_t token = blockIdx.y; token < p.num_tokens; token += gridDim.y) {
    float gate[8] = {}, up[8];
    if (active) {
      const T* row = static_cast<const T*>(p.gate_up) + token * 2 * p.width + 8 * chunk;
      Load8(row, gate);
      Load8(row + p.width, up);
#pragma unroll
      for (int i = 0; i < 8; ++i) gate[i] = Silu(gate[i]) * up[i];
    }
    StoreLinear8(p.out, token, p.width, chunk, active, gate);
  }
}

}  // namespace

cudaError_t SiluMul(const SiluMulParams& params, cudaStream_t stream) {
  if (params.num_tokens < 0 || !LinearRowsFit(params.out, params.width))
    return cudaErrorInvalidValue;
  if (params.num_tokens == 0) return cudaSuccess;
  const auto kernel = params.element == Element::kF32    ? SiluMulKernel<float>
                      : params.element == Element::kBf16 ? SiluMulKernel<__nv_bfloat16>
                                                         : nullptr;
  if (kernel == nullptr) return cudaErrorInvalidValue;
  return gpu::Launch(kernel, GridOf8(params.width, params.num_tokens, kThreads), dim3(kThreads), 0,
                     stream, params);
}

}  // namespace baton::ops::cuda
