#include "engine/ops/cuda/gpu.h"
#include "engine/ops/cuda/kernels.h"

namespace baton::ops::cuda {
namespace {

constexpr int kThreads = 128;

// One thread a token.
__global__ void __launch_bounds__(kThreads) TakeDrawnKernel(const TakeDrawnParams p) {
  const int t = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (t >= p.num_tokens) return;
  const int32_t draw = p.drawn[t];
  int32_t id = p.ids[t];
  if (draw >= 0) {
    const SampleResult& result = p.results[draw];
    id = result.status == SampleStatus::kOk ? result.id : kNoTokenDrawn;
  }
  p.out[t] = id;
}

}  // namespace

cudaError_t TakeDrawn(const TakeDrawnParams& params, cudaStream_t stream) {
  if (params.num_tokens < 0 || params.ids == nullptr || params.drawn == nullptr ||
      params.results == nullptr || params.out == nullptr)
    return cudaErrorInvalidValue;
  if (params.num_tokens == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((params.num_tokens + kThreads - 1) / kThreads);
  return gpu::Launch(TakeDrawnKernel, dim3(blocks), dim3(kThreads), 0, stream, params);
}

}  // namespace baton::ops::cuda
