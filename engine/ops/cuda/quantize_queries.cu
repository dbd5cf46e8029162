#include <cmath>

#include "engine/ops/cuda/device_vectors.h"
#include "engine/ops/cuda/gpu.h"
#include "engine/ops/cuda/kernels.h"

namespace baton::ops::cuda {
namespace {

constexpr int kThreads = 256;

// One thread per eight elements of a row; the grid is (chunks of a row, tokens).
__global__ void __launch_bounds__(kThreads)
    QuantizeQueriesKernel(const QuantizeQueriesParams p, float inverse_scale) {
  const int chunk = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (chunk >= p.width / 8) return;
  for (int64_t token = blockIdx.y; token < p.num_tokens; token += gridDim.y) {
    const int64_t at = token * p.width + 8 * chunk;
    float x[8];
    Load8(static_cast<const __half*>(p.q) + at, x);
    StoreFp8x8(p.out + at, x, inverse_scale);
  }
}

}  // namespace

cudaError_t QuantizeQueries(const QuantizeQueriesParams& params, cudaStream_t stream) {
  int exponent = 0;
  const bool power_of_two = params.scale > 0 && std::frexp(params.scale, &exponent) == 0.5f;
  if (params.num_tokens < 0 || params.q == nullptr || params.out == nullptr || params.width <= 0 ||
      params.width % 8 != 0 || !power_of_two)
    return cudaErrorInvalidValue;
  if (params.num_tokens == 0) return cudaSuccess;
  return gpu::Launch(QuantizeQueriesKernel, GridOf8(params.width, params.num_tokens, kThreads),
                     dim3(kThreads), 0, stream, params, 1.0f / params.scale);
}

}  // namespace baton::ops::cuda
