#include "engine/ops/cuda/cache_rows.h"
#include "engine/ops/cuda/device_vectors.h"
#include "engine/ops/cuda/gpu.h"
#include "engine/ops/cuda/kernels.h"

namespace baton::ops::cuda {
namespace {

constexpr int kThreads = 256, kBlocksPerSm = 4;
// For the 132 SMs of an H200; more work than that takes turns in a loop.
constexpr int kMaxBlocks = 132 * kBlocksPerSm;

// A lane's share of a head: dims 8j .. 8j + 7 and the same above D / 2, so that both members of
// each rotated pair (i, i + D / 2) are in one lane.
struct HeadShare {
  float low[8], high[8];
};

__device__ __forceinline__ float SumOfSquares(const HeadShare& x) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(x.low[i], x.low[i], fmaf(x.high[i], x.high[i], sum));
  return sum;
}

__device__ __forceinline__ void Scale(HeadShare* x, float scale, const float* weight, int half) {
  float low[8], high[8];
  Load8(weight, low);
  Load8(weight + half, high);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x->low[i] = (x->low[i] * scale) * low[i];
    x->high[i] = (x->high[i] * scale) * high[i];
  }
}

// `rope`: the lane's cosines; its sines are D / 2 further.
__device__ __forceinline__ void Rotate(HeadShare* x, const float* rope, int half) {
  float cosine[8], sine[8];
  Load8(rope, cosine);
  Load8(rope + half, sine);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float low = x->low[i], high = x->high[i];
    x->low[i] = fmaf(low, cosine[i], -(high * sine[i]));
    x->high[i] = fmaf(high, cosine[i], low * sine[i]);
  }
}

// All lanes of the warp call it. `store`: this lane's head has a slot.
template <int kLanes>
__device__ __forceinline__ void StoreRow(const CacheLayer& cache,
                                         int64_t slot,
                                         int side,
                                         int head,
                                         int dim,
                                         bool store,
                                         const HeadShare& x) {
  const int half = cache.head_dim / 2;
  const int64_t block = slot / kBlockTokens;
  const int row_index = RowIndex(cache, side, head, static_cast<int>(slot % kBlockTokens));
  uint8_t* row = cache.base + block * cache.block_bytes +
                 static_cast<int64_t>(row_index) * cache.head_dim * ElementBytes(cache.format);
  if (cache.format == CacheFormat::kFp8) {
    if (!store) return;
    const float inverse = __fdiv_rn(1.0f, __ldg(cache.scales + side * cache.num_kv_heads + head));
    StoreFp8x8(row + dim, x.low, inverse);
    StoreFp8x8(row + half + dim, x.high, inverse);
  } else if (cache.format == CacheFormat::kFp8Dynamic) {
    const uint32_t largest = max(LargestMagnitude(x.low), LargestMagnitude(x.high));
    const GroupScale scale = ScaleForMagnitude(SegmentMax<kLanes>(largest));
    if (!store) return;
    if (scale.inverse == 0.0f) {  // zeros, even where the row holds infinities
      *reinterpret_cast<uint2*>(row + dim) = make_uint2(0, 0);
      *reinterpret_cast<uint2*>(row + half + dim) = make_uint2(0, 0);
    } else {
      StoreFp8x8(row + dim, x.low, scale.inverse);
      StoreFp8x8(row + half + dim, x.high, scale.inverse);
    }
    if (dim == 0) *RowScale(cache, block, row_index) = scale.scale;
  } else if (cache.format == CacheFormat::kBf16) {
    if (!store) return;
    Store8(reinterpret_cast<__nv_bfloat16*>(row) + dim, x.low);
    Store8(reinterpret_cast<__nv_bfloat16*>(row) + half + dim, x.high);
  } else {
    if (!store) return;
    Store8(reinterpret_cast<float*>(row) + dim, x.low);
    Store8(reinterpret_cast<float*>(row) + half + dim, x.high);
  }
}

__device__ __forceinline__ void StoreQuery(
    const QkNormRopeAppendParams& p, int token, int head, int dim, int half, const HeadShare& x) {
  const int64_t at = (static_cast<int64_t>(token) * p.num_heads + head) * p.cache.head_dim + dim;
  if (p.q_element == Element::kF16) {
    Store8(static_cast<__half*>(p.q_out) + at, x.low);
    Store8(static_cast<__half*>(p.q_out) + at + half, x.high);
  } else {
    Store8(static_cast<float*>(p.q_out) + at, x.low);
    Store8(static_cast<float*>(p.q_out) + at + half, x.high);
  }
}

// D / 16 lanes per (token, head), heads of a token side by side: with D = 128 a warp has four
// heads, and as a rule all of one kind.
template <typename In, int kHeadDim>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    QkNormRopeAppendKernel(const __grid_constant__ QkNormRopeAppendParams p) {
  constexpr int kLanes = kHeadDim / 16, kHalf = kHeadDim / 2, kHeads = kThreads / kLanes;
  const int num_kv_heads = p.cache.num_kv_heads;
  const int heads = p.num_heads + 2 * num_kv_heads;
  const int64_t total = static_cast<int64_t>(p.num_tokens) * heads;
  const int dim = static_cast<int>(threadIdx.x) % kLanes * 8;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kHeads;
  // Every lane stays in the loop as long as its warp does: all take part in the shuffles.
  constexpr int kWarpHeads = 32 / kLanes;
  const int in_warp = static_cast<int>(threadIdx.x) % 32 / kLanes;
  int64_t first = static_cast<int64_t>(blockIdx.x) * kHeads + threadIdx.x / 32 * kWarpHeads;
  for (; first < total; first += step) {
    const bool active = first + in_warp < total;
    const int64_t index = active ? first + in_warp : total - 1;
    const int token = static_cast<int>(index / heads), head = static_cast<int>(index % heads);
    const In* source = static_cast<const In*>(p.qkv) + index * kHeadDim + dim;
    HeadShare x;
    Load8(source, x.low);
    Load8(source + kHalf, x.high);

    const bool is_query = head < p.num_heads, is_value = head >= p.num_heads + num_kv_heads;
    const float sum = SegmentSum<kLanes>(SumOfSquares(x));
    const float* weight = is_query ? p.q_weight : p.k_weight;
    if (!is_value && weight != nullptr)
      Scale(&x, ExactRsqrt(sum / kHeadDim + p.eps), weight + dim, kHalf);
    if (!is_value) {
      const int64_t position = __ldg(p.positions + token);
      Rotate(&x, p.rope + position * kHeadDim + dim, kHalf);
    }
    if (is_query && active) StoreQuery(p, token, head, dim, kHalf, x);
    const int64_t slot = __ldg(p.slots + token);
    const int kv_head = is_query ? 0 : (head - p.num_heads) % num_kv_heads;
    StoreRow<kLanes>(p.cache, slot < 0 ? 0 : slot, is_value ? 1 : 0, kv_head, dim,
                     active && !is_query && slot >= 0, x);
  }
}

template <typename In, int kHeadDim>
cudaError_t LaunchFor(const QkNormRopeAppendParams& p, cudaStream_t stream) {
  constexpr int kHeads = kThreads / (kHeadDim / 16);
  const int64_t total =
      static_cast<int64_t>(p.num_tokens) * (p.num_heads + 2 * p.cache.num_kv_heads);
  const int64_t blocks = (total + kHeads - 1) / kHeads;
  return gpu::Launch(QkNormRopeAppendKernel<In, kHeadDim>,
                     dim3(static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks)),
                     dim3(kThreads), 0, stream, p);
}

template <typename In>
cudaError_t LaunchForElement(const QkNormRopeAppendParams& p, cudaStream_t stream) {
  switch (p.cache.head_dim) {
    case 32:
      return LaunchFor<In, 32>(p, stream);
    case 64:
      return LaunchFor<In, 64>(p, stream);
    case 128:
      return LaunchFor<In, 128>(p, stream);
    case 256:
      return LaunchFor<In, 256>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t QkNormRopeAppend(const QkNormRopeAppendParams& params, cudaStream_t stream) {
  if (params.num_tokens < 0 || params.num_heads <= 0 || params.cache.num_kv_heads <= 0)
    return cudaErrorInvalidValue;
  if (params.num_tokens == 0) return cudaSuccess;
  if (params.q_element != Element::kF32 && params.q_element != Element::kF16)
    return cudaErrorInvalidValue;
  if (params.qkv_element == Element::kF32) return LaunchForElement<float>(params, stream);
  if (params.qkv_element == Element::kBf16) return LaunchForElement<__nv_bfloat16>(params, stream);
  return cudaErrorInvalidValue;
}

}  // namespace baton::ops::cuda
