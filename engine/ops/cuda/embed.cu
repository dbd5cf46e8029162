#include "engine/ops/cuda/device_vectors.h"
#include "engine/ops/cuda/gpu.h"
#include "engine/ops/cuda/kernels.h"

namespace baton::ops::cuda {
namespace {

constexpr int kThreads = 128;

// One block per token.
template <typename T>
__global__ void __launch_bounds__(kThreads) EmbedKernel(const EmbedParams p) {
  const int64_t token = blockIdx.x;
  const T* row =
      static_cast<const T*>(p.table) + static_cast<int64_t>(__ldg(p.ids + token)) * p.width;
  for (int i = static_cast<int>(threadIdx.x) * 8; i < p.width; i += kThreads * 8) {
    float x[8];
    Load8(row + i, x);
    Store8(p.residual + token * p.width + i, x);
  }
}

}  // namespace

cudaError_t Embed(const EmbedParams& params, cudaStream_t stream) {
  if (params.num_tokens < 0 || params.width <= 0 || params.width % 8 != 0)
    return cudaErrorInvalidValue;
  if (params.num_tokens == 0) return cudaSuccess;
  const auto kernel = params.table_element == Element::kF32    ? EmbedKernel<float>
                      : params.table_element == Element::kBf16 ? EmbedKernel<__nv_bfloat16>
                                                               : nullptr;
  if (kernel == nullptr) return cudaErrorInvalidValue;
  return gpu::Launch(kernel, dim3(static_cast<unsigned>(params.num_tokens)), dim3(kThreads), 0,
                     stream, params);
}

}  // namespace baton::ops::cuda
