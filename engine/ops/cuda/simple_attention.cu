#include "engine/ops/cuda/cache_rows.h"
#include "engine/ops/cuda/gpu.h"
#include "engine/ops/cuda/kernels.h"

namespace baton::ops::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;

__device__ __forceinline__ float ReadElement(const uint8_t* row, int i, CacheFormat format) {
  if (format == CacheFormat::kF32) return reinterpret_cast<const float*>(row)[i];
  if (format == CacheFormat::kBf16)
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[i]);
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(row[i], __NV_E4M3)));
}

// The factor of row `row` of a block's K or V rows.
__device__ __forceinline__ float RowFactor(
    const CacheLayer& cache, int64_t block, int side, int head, int row) {
  if (cache.format == CacheFormat::kFp8) return cache.scales[side * cache.num_kv_heads + head];
  if (cache.format == CacheFormat::kFp8Dynamic)
    return *RowScale(cache, block, RowIndex(cache, side, head, row));
  return 1.0f;
}

// One warp per (query, head) of a sequence; a lane has every 32nd element of the head.
template <int kPerLane>
__global__ void __launch_bounds__(kThreads) SimpleAttentionKernel(const PagedAttentionParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int dim = 32 * kPerLane;
  const int sequence = p.sequences[blockIdx.z];
  const int head = static_cast<int>(blockIdx.y);
  const int start = p.query_starts[sequence];
  const int query_len = p.query_starts[sequence + 1] - start;
  const int query = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (query >= query_len) return;  // whole warps; no barrier follows
  const int kv_head = head / (p.num_heads / p.cache.num_kv_heads);
  const int64_t at = (static_cast<int64_t>(start + query) * p.num_heads + head) * dim;

  float q[kPerLane], sum[kPerLane], largest = -INFINITY, total = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    q[i] = p.q_element == Element::kF32
               ? static_cast<const float*>(p.q)[at + lane + 32 * i]
               : __half2float(static_cast<const __half*>(p.q)[at + lane + 32 * i]);
    sum[i] = 0.0f;
  }
  const int visible = p.context_lens[sequence] - query_len + query + 1;
  for (int token = 0; token < visible; ++token) {
    const int64_t block =
        p.block_tables[static_cast<int64_t>(sequence) * p.max_blocks + token / kBlockTokens];
    const int row = token % kBlockTokens;
    const int64_t offset = static_cast<int64_t>(row) * dim * ElementBytes(p.cache.format);
    const uint8_t* key = HeadRows(p.cache, block, 0, kv_head) + offset;
    const uint8_t* value = HeadRows(p.cache, block, 1, kv_head) + offset;
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      score = fmaf(q[i], ReadElement(key, lane + 32 * i, p.cache.format), score);
    score = SegmentSum<32>(score) * RowFactor(p.cache, block, 0, kv_head, row) * p.softmax_scale;
    const float now_largest = fmaxf(largest, score);
    // (A NaN score must stay one: fmaxf would drop it.)
    const float decay = expf(largest - now_largest), weight = expf(score - now_largest);
    largest = now_largest;
    total = fmaf(total, decay, weight);
    const float factor = weight * RowFactor(p.cache, block, 1, kv_head, row);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      sum[i] = fmaf(factor, ReadElement(value, lane + 32 * i, p.cache.format), sum[i] * decay);
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const float result = sum[i] / total;
    if (p.out.element == Element::kF32) {
      static_cast<float*>(p.out.data)[at + lane + 32 * i] = result;
    } else {
      static_cast<__nv_bfloat16*>(p.out.data)[at + lane + 32 * i] = __float2bfloat16(result);
    }
  }
}

}  // namespace

cudaError_t SimpleAttention(const PagedAttentionParams& params,
                            int max_query_len,
                            cudaStream_t stream) {
  const int dim = params.cache.head_dim;
  if (params.num_heads <= 0 || params.cache.num_kv_heads <= 0 ||
      params.num_heads % params.cache.num_kv_heads != 0 || max_query_len < 0 ||
      params.num_sequences < 0 || params.out.element == Element::kFp8)
    return cudaErrorInvalidValue;
  if (params.num_sequences == 0 || max_query_len == 0) return cudaSuccess;
  const auto kernel = dim == 32    ? SimpleAttentionKernel<1>
                      : dim == 64  ? SimpleAttentionKernel<2>
                      : dim == 96  ? SimpleAttentionKernel<3>
                      : dim == 128 ? SimpleAttentionKernel<4>
                      : dim == 256 ? SimpleAttentionKernel<8>
                                   : nullptr;
  if (kernel == nullptr) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>((max_query_len + kWarps - 1) / kWarps),
                  static_cast<unsigned>(params.num_heads),
                  static_cast<unsigned>(params.num_sequences));
  return gpu::Launch(kernel, grid, dim3(kThreads), 0, stream, params);
}

}  // namespace baton::ops::cuda
