#include "engine/ops/cuda/gpu.h"
#include "engine/ops/cuda/kernels.h"

namespace baton::ops::cuda {
namespace {

// Few threads keep a link busy, and the SMs belong to the model.
constexpr int kThreads = 256, kBlocksPerCopy = 4, kMaxGrid = 65535;

// blockIdx.y: the cache block; the blocks of blockIdx.x share its bytes.
template <bool kGather>
__global__ void __launch_bounds__(kThreads) BlockCopyKernel(const BlockCopyParams p) {
  const int64_t vectors = p.block_bytes / 16;
  for (int i = static_cast<int>(blockIdx.y); i < p.num_blocks; i += static_cast<int>(gridDim.y)) {
    const int64_t block = __ldg(p.blocks + i);
    if (block < 0) continue;
    uint4* pool = reinterpret_cast<uint4*>(p.pool + block * p.block_bytes);
    uint4* staging = reinterpret_cast<uint4*>(p.staging + i * p.block_bytes);
    for (int64_t v = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; v < vectors;
         v += static_cast<int64_t>(gridDim.x) * kThreads) {
      if (kGather) {
        staging[v] = pool[v];
      } else {
        pool[v] = staging[v];
      }
    }
  }
}

template <bool kGather>
cudaError_t Copy(const BlockCopyParams& params, cudaStream_t stream) {
  if (params.num_blocks < 0 || params.block_bytes <= 0 || params.block_bytes % 16 != 0)
    return cudaErrorInvalidValue;
  if (params.num_blocks == 0) return cudaSuccess;
  const dim3 grid(kBlocksPerCopy, static_cast<unsigned>(
                                      params.num_blocks < kMaxGrid ? params.num_blocks : kMaxGrid));
  return gpu::Launch(BlockCopyKernel<kGather>, grid, dim3(kThreads), 0, stream, params);
}

}  // namespace

cudaError_t GatherBlocks(const BlockCopyParams& params, cudaStream_t stream) {
  return Copy<true>(params, stream);
}
cudaError_t ScatterBlocks(const BlockCopyParams& params, cudaStream_t stream) {
  return Copy<false>(params, stream);
}

}  // namespace baton::ops::cuda
