#include "engine/ops/cuda/device_vectors.h"
#include "engine/ops/cuda/gpu.h"
#include "engine/ops/cuda/kernels.h"
#include "engine/ops/cuda/linear_rows.h"

namespace baton::ops::cuda {
namespace {

constexpr int kThreads = 256;

// One thread per eight elements of a row; the grid is (chunks of a row, tokens).
template <typename T>
__global__ void __launch_bounds__(kThreads) QuantizeRowsKernel(const QuantizeRowsParams p) {
  const int chunk = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  const bool active = chunk < p.width / 8;
  for (int64_t token = blockIdx.y; token < p.num_tokens; token += gridDim.y) {
    float x[8] = {};
    if (active) Load8(static_cast<const T*>(p.rows) + token * p.width + 8 * chunk, x);
    StoreLinear8(p.out, token, p.width, chunk, active, x);
  }
}

}  // namespace

cudaError_t QuantizeRows(const QuantizeRowsParams& params, cudaStream_t stream) {
  if (params.num_tokens < 0 || params.rows == nullptr || !LinearRowsFit(params.out, params.width))
    return cudaErrorInvalidValue;
  if (params.num_tokens == 0) return cudaSuccess;
  const auto kernel = params.element == Element::kF32    ? QuantizeRowsKernel<float>
                      : params.element == Element::kBf16 ? QuantizeRowsKernel<__nv_bfloat16>
                                                         : nullptr;
  if (kernel == nullptr) return cudaErrorInvalidValue;
  return gpu::Launch(kernel, GridOf8(params.width, params.num_tokens, kThreads), dim3(kThreads), 0,
                     stream, params);
}

}  // namespace baton::ops::cuda
