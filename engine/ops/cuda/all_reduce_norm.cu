// The sum over two ranks, on each of two devices, with what follows it. Both ranks launch the same
// grid. A block tells the other device's block of the same number that its rank's part is there
// (the matrix product before this kernel wrote it), waits to be told the same, and reads both
// parts, its own and, over the link, the other's: one message each way and no second round. The
// sums are taken in the order of the ranks, so both devices get the same bits.
//
// A part is written again two reductions later. By then the other rank has told of the one between,
// and so has read this one.

#include "engine/ops/cuda/device_vectors.h"
#include "engine/ops/cuda/gpu.h"
#include "engine/ops/cuda/kernels.h"
#include "engine/ops/cuda/norm_row.h"

namespace baton::ops::cuda {
namespace {

// Looks at the peer's word between two looks at the host's, which is further away.
constexpr int kLooks = 256;

// The other rank's block has come: its part may be read. Or the host has called the reduction off.
__device__ __forceinline__ void MeetPeer(const AllReduceNormParams& p) {
  if (threadIdx.x == 0) {
    uint32_t* own = p.signals + blockIdx.x;
    const uint32_t round = own[0] + 1;
    own[0] = round;
    gpu::StoreReleaseSystem(p.peer_signals + kReduceBlocksMax + blockIdx.x, round);
    const uint32_t* told = own + kReduceBlocksMax;
    // The peer may be a round ahead by the time of this look: it has been told of this one, and
    // need not wait for it to be over. (The difference is signed, since rounds wrap.)
    const auto has_come = [&] {
      return static_cast<int32_t>(gpu::LoadAcquireSystem(told) - round) >= 0;
    };
    for (int look = 1; !has_come(); ++look) {
      if (look % kLooks == 0 && gpu::LoadAcquireSystem(p.called_off) != 0) break;
      gpu::WaitForPeer();
    }
  }
  __syncthreads();
}

// Past the first-level cache, which does not hear of the other device's writes.
__device__ __forceinline__ void LoadPart(const float* part, float (&x)[8]) {
  const float4 low = __ldcg(reinterpret_cast<const float4*>(part));
  const float4 high = __ldcg(reinterpret_cast<const float4*>(part) + 1);
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// One block for every gridDim.x-th token.
template <int kChunks>
__global__ void __launch_bounds__(kNormThreads)
    AllReduceNormKernel(const __grid_constant__ AllReduceNormParams p) {
  MeetPeer(p);
  for (int token = static_cast<int>(blockIdx.x); token < p.num_tokens; token += gridDim.x) {
    const int64_t row = static_cast<int64_t>(token) * p.width;
    float x[kChunks][8];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int chunk = NormChunk(c);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[c][i] = 0.0f;
      if (chunk >= p.width / 8) continue;
      float low[8], high[8];
      LoadPart(p.parts[0] + row + 8 * chunk, low);
      LoadPart(p.parts[1] + row + 8 * chunk, high);
      Load8(p.residual + row + 8 * chunk, x[c]);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[c][i] += low[i] + high[i];
      Store8(p.residual + row + 8 * chunk, x[c]);
    }
    if (p.weight == nullptr) continue;
    NormRow(x, p.weight, p.width, p.eps, p.out, token);
    __syncthreads();  // the sum's place in shared memory is used again
  }
}

}  // namespace

cudaError_t AllReduceNorm(const AllReduceNormParams& params, cudaStream_t stream) {
  const bool pointers = params.parts[0] != nullptr && params.parts[1] != nullptr &&
                        params.signals != nullptr && params.peer_signals != nullptr &&
                        params.called_off != nullptr && params.residual != nullptr;
  const bool norm = params.weight == nullptr || LinearRowsFit(params.out, params.width);
  if (params.num_tokens < 0 || params.width <= 0 || params.width % 8 != 0 ||
      params.width > kNormMaxWidth || !pointers || !norm)
    return cudaErrorInvalidValue;
  if (params.num_tokens == 0) return cudaSuccess;
  const int chunks = NormChunks(params.width);
  const auto kernel = chunks == 1   ? AllReduceNormKernel<1>
                      : chunks == 2 ? AllReduceNormKernel<2>
                      : chunks <= 4 ? AllReduceNormKernel<4>
                                    : AllReduceNormKernel<kNormMaxChunks>;
  const int blocks = params.num_tokens < kReduceBlocksMax ? params.num_tokens : kReduceBlocksMax;
  return gpu::Launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kNormThreads), 0, stream,
                     params);
}

}  // namespace baton::ops::cuda
