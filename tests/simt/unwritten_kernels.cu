#include "tests/simt/unwritten_kernels.h"

#include "engine/ops/cuda/gpu.h"

namespace baton::simt {
namespace {

namespace gpu = ops::gpu;

// (A store that depends on it: of two values a compiler would take one without a branch.)
__device__ __forceinline__ void Branch(int value, int* out) {
  if (value > 0) *out = 1;
}

__global__ void UnwrittenKernel(Unwritten fault, const int* fresh, int* out) {
  BATON_SHARED(int4, words, [32]);
  const int lane = static_cast<int>(threadIdx.x);
  const bool is_last = lane == 31;
  if (fault != Unwritten::kSharedBranch || !is_last) words[lane].x = 1;
  __syncthreads();
  int value = words[lane].x;
  if (fault == Unwritten::kDeviceBranch && is_last) value = fresh[lane];
  if (fault == Unwritten::kShuffledBranch) {
    const int seen = is_last ? fresh[lane] : 1;
    value = __shfl_sync(0xffffffffu, seen, 31);
  }
  if (fault == Unwritten::kAsyncCopyBranch) {
    gpu::AsyncCopy16(&words[lane], out);
    gpu::AsyncCommit();
    value = words[lane].x;
  }
  if (fault == Unwritten::kDeviceIndex) {
    out[fresh[lane] & 31] = 1;
  } else if (fault == Unwritten::kOutput) {
    if (!is_last) out[lane] = value;
  } else {
    Branch(value, out + lane);
  }
}

}  // namespace

cudaError_t RunUnwritten(Unwritten fault, const int* fresh, int* out) {
  return gpu::Launch(UnwrittenKernel, dim3(1), dim3(32), 0, nullptr, fault, fresh, out);
}

}  // namespace baton::simt
