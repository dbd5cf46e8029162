// Attention for sequences with many queries. One block per (tile of 128 query rows, KV head); its
// eight warps have 16 rows each. A cache block's e4m3 bytes come in by cp.async, two stages ahead,
// are made f16 once for all warps, and are read by ldmatrix; 16-byte chunks of a row are exchanged
// by the row's number, so that eight rows never meet in a bank.

#include "engine/ops/cuda/cache_rows.h"
#include "engine/ops/cuda/fp8_fragments.h"
#include "engine/ops/cuda/gpu.h"
#include "engine/ops/cuda/kernels.h"
#include "engine/ops/cuda/linear_rows.h"
#include "engine/ops/cuda/online_softmax.h"

namespace baton::ops::cuda {
namespace {

constexpr int kWarps = kPrefillRows / 16, kThreads = 32 * kWarps, kStages = 2;

struct Work {
  int sequence, query_start, query_len, context_len;
  int kv_head, heads_per_kv, first_row, num_rows;
};

__device__ __forceinline__ Work WorkOfBlock(const PagedAttentionParams& p,
                                            const PrefillTile* tiles) {
  const PrefillTile tile = tiles[blockIdx.x];
  Work w;
  w.sequence = tile.sequence;
  w.query_start = p.query_starts[w.sequence];
  w.query_len = p.query_starts[w.sequence + 1] - w.query_start;
  w.context_len = p.context_lens[w.sequence];
  w.kv_head = static_cast<int>(blockIdx.y);
  w.heads_per_kv = p.num_heads / p.cache.num_kv_heads;
  w.first_row = tile.first_row;
  w.num_rows = min(kPrefillRows, w.query_len * w.heads_per_kv - w.first_row);
  return w;
}

__device__ __forceinline__ int Visible(const Work& w, int row) {
  return w.context_len - w.query_len + (w.first_row + row) / w.heads_per_kv + 1;
}

// Dynamic shared memory of one block.
template <int kDim>
struct Tiles {
  static constexpr int kRowBytes = kDim, kHalfChunks = kDim / 8;  // of 16 bytes, in f16
  uint4 codes[kStages][2][kBlockTokens * kRowBytes / 16];         // as in the cache: K, V
  uint4 halves[2][kBlockTokens * kHalfChunks];                    // exchanged chunks
  float scales[2][kBlockTokens];                                  // kFp8Dynamic
};

template <int kDim>
__device__ __forceinline__ int ChunkAt(int row, int chunk) {
  return row * (kDim / 8) + (chunk ^ (row & 7));
}

// Brings in a cache block. Tokens behind the context are zeros.
template <int kDim>
__device__ __forceinline__ void Fetch(
    const PagedAttentionParams& p, const Work& w, int index, int num_blocks, Tiles<kDim>* tiles) {
  constexpr int kChunks = kDim / 16;  // 16-byte chunks of a row
  if (index < num_blocks) {
    const int64_t block =
        __ldg(p.block_tables + static_cast<int64_t>(w.sequence) * p.max_blocks + index);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const uint8_t* rows = HeadRows(p.cache, block, side, w.kv_head);
      for (int i = static_cast<int>(threadIdx.x); i < kBlockTokens * kChunks; i += kThreads) {
        const bool there = index * kBlockTokens + i / kChunks < w.context_len;
        gpu::AsyncCopy16(&tiles->codes[index % kStages][side][i], rows + 16 * i, there ? 16 : 0);
      }
    }
  }
  gpu::AsyncCommit();
}

// The block's codes as f16. `masked`: a value that some row must not see must not reach it as 0 *
// NaN.
template <int kDim, bool kDynamic>
__device__ __forceinline__ void Convert(
    const PagedAttentionParams& p, const Work& w, int index, bool masked, Tiles<kDim>* tiles) {
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const uint2* codes = reinterpret_cast<const uint2*>(tiles->codes[index % kStages][side]);
    for (int i = static_cast<int>(threadIdx.x); i < kBlockTokens * (kDim / 8); i += kThreads) {
      uint2 eight = codes[i];
      if (masked && side == 1) eight = make_uint2(NanCodesToZero(eight.x), NanCodesToZero(eight.y));
      tiles->halves[side][ChunkAt<kDim>(i / (kDim / 8), i % (kDim / 8))] =
          make_uint4(HalvesOfFp8x2(eight.x & 0xffffu), HalvesOfFp8x2(eight.x >> 16),
                     HalvesOfFp8x2(eight.y & 0xffffu), HalvesOfFp8x2(eight.y >> 16));
    }
  }
  if constexpr (kDynamic) {
    const int64_t block =
        __ldg(p.block_tables + static_cast<int64_t>(w.sequence) * p.max_blocks + index);
    const int row = static_cast<int>(threadIdx.x) % kBlockTokens;
    const int side = static_cast<int>(threadIdx.x) / kBlockTokens;
    if (side < 2) {
      const bool there = index * kBlockTokens + row < w.context_len;
      const float scale =
          there ? *RowScale(p.cache, block, RowIndex(p.cache, side, w.kv_head, row)) : 0.0f;
      tiles->scales[side][row] = side == 0 ? scale : ValueBias(scale);
    }
  }
}

// The warp's rows as A fragments; missing rows are zeros.
template <int kDim>
__device__ __forceinline__ void LoadQueries(const PagedAttentionParams& p,
                                            const Work& w,
                                            int warp_row,
                                            uint32_t (&queries)[kDim / 16][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + g + 8 * half;
    const bool there = row < w.num_rows;
    const int64_t token = w.query_start + (w.first_row + row) / w.heads_per_kv;
    const int head = w.kv_head * w.heads_per_kv + (w.first_row + row) % w.heads_per_kv;
    const uint32_t* from = reinterpret_cast<const uint32_t*>(static_cast<const __half*>(p.q) +
                                                             (token * p.num_heads + head) * kDim);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
      for (int k = 0; k < 2; ++k)
        queries[step][half + 2 * k] = there ? __ldg(from + step * 8 + k * 4 + t) : 0u;
    }
  }
}

// Scores of the warp's rows and the 64 tokens of the block.
template <int kDim>
__device__ __forceinline__ void Scores(const Tiles<kDim>& tiles,
                                       const uint32_t (&queries)[kDim / 16][4],
                                       float (&scores)[8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int r = 0; r < 4; ++r) scores[n][r] = 0.0f;
  }
  // Matrices 0, 1: tokens 16 pair .. + 7, dims 16 step .. + 7 and + 8 .. + 15; 2, 3: the next eight
  // tokens.
  const int token = lane % 8 + lane / 16 * 8, chunk = lane / 8 % 2;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t b[4];
      gpu::LdMatrixX4(b, &tiles.halves[0][ChunkAt<kDim>(16 * pair + token, 2 * step + chunk)]);
      const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
      gpu::MmaF16(scores[2 * pair], queries[step], first, scores[2 * pair]);
      gpu::MmaF16(scores[2 * pair + 1], queries[step], second, scores[2 * pair + 1]);
    }
  }
}

template <int kDim>
__device__ __forceinline__ void AddValues(const Tiles<kDim>& tiles,
                                          const uint32_t (&weights)[8][2],
                                          float (&out)[kDim / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Matrices 0, 1: tokens 16 group .. + 7 and + 8 .. + 15, dims 16 pair .. + 7; 2, 3: the next
  // eight dims.
  const int token = lane % 16, chunk = lane / 16;
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    const uint32_t a[4] = {weights[2 * group][0], weights[2 * group][1], weights[2 * group + 1][0],
                           weights[2 * group + 1][1]};
#pragma unroll
    for (int pair = 0; pair < kDim / 16; ++pair) {
      uint32_t b[4];
      gpu::LdMatrixX4Transposed(
          b, &tiles.halves[1][ChunkAt<kDim>(16 * group + token, 2 * pair + chunk)]);
      const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
      gpu::MmaF16(out[2 * pair], a, first, out[2 * pair]);
      gpu::MmaF16(out[2 * pair + 1], a, second, out[2 * pair + 1]);
    }
  }
}

// Rows g and g + 8 of the warp; all lanes call it. A lane has dims 8 j + 2 t and the next.
template <int kDim>
__device__ __forceinline__ void StoreRows(const PagedAttentionParams& p,
                                          const Work& w,
                                          int warp_row,
                                          float value_scale,
                                          const RowState& state,
                                          const float (&out)[kDim / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + g + 8 * half;
    const float factor = value_scale / SegmentSum<4>(state.sum[half]);
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e)
        largest = max(largest, __float_as_uint(out[j][2 * half + e] * factor) & 0x7fffffffu);
    }
    const GroupScale scale = ScaleForMagnitude(SegmentMax<4>(largest));
    if (row >= w.num_rows) continue;
    const int64_t token = w.query_start + (w.first_row + row) / w.heads_per_kv;
    const int head = w.kv_head * w.heads_per_kv + (w.first_row + row) % w.heads_per_kv;
    const int64_t at = (token * p.num_heads + head) * kDim + 2 * t;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      const float low = out[j][2 * half] * factor, high = out[j][2 * half + 1] * factor;
      if (p.out.element == Element::kFp8) {
        const float2 scaled = make_float2(low * scale.inverse, high * scale.inverse);
        const uint16_t codes = scale.inverse == 0.0f
                                   ? uint16_t{0}
                                   : __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
        *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(p.out.data) + at + 8 * j) = codes;
      } else if (p.out.element == Element::kBf16) {
        *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.out.data) + at + 8 * j) =
            __floats2bfloat162_rn(low, high);
      } else {
        *reinterpret_cast<float2*>(static_cast<float*>(p.out.data) + at + 8 * j) =
            make_float2(low, high);
      }
    }
    if (p.out.element == Element::kFp8 && t == 0)
      p.out.scales[head * p.out.pitch + token] = scale.scale;
  }
}

template <int kDim, bool kDynamic>
__global__ void __launch_bounds__(kThreads, 1)
    PrefillAttentionKernel(const __grid_constant__ PagedAttentionParams p,
                           const PrefillTile* list) {
  BATON_DYNAMIC_SHARED(Tiles<kDim>, tiles);
  const Work w = WorkOfBlock(p, list);
  const int lane = static_cast<int>(threadIdx.x) % 32, t = lane % 4;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const float score_factor =
      p.softmax_scale * kLog2E * (kDynamic ? 1.0f : __ldg(p.cache.scales + w.kv_head));
  const int visible[2] = {Visible(w, warp_row + lane / 4), Visible(w, warp_row + lane / 4 + 8)};
  const int least_visible = Visible(w, 0);
  const int num_blocks = (Visible(w, w.num_rows - 1) + kBlockTokens - 1) / kBlockTokens;

  uint32_t queries[kDim / 16][4];
  LoadQueries<kDim>(p, w, warp_row, queries);
  RowState state;
  float out[kDim / 8][4];
#pragma unroll
  for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
    for (int r = 0; r < 4; ++r) out[j][r] = 0.0f;
  }
  for (int stage = 0; stage < kStages; ++stage) Fetch<kDim>(p, w, stage, num_blocks, tiles);
  for (int index = 0; index < num_blocks; ++index) {
    const int first = index * kBlockTokens;
    const bool masked = first + kBlockTokens > least_visible;
    gpu::AsyncWait<kStages - 1>();
    __syncthreads();  // the codes are there for all, and nobody reads the last block's halves any
                      // more
    Convert<kDim, kDynamic>(p, w, index, masked, tiles);
    __syncthreads();
    Fetch<kDim>(p, w, index + kStages, num_blocks, tiles);

    float scores[8][4], decay[2];
    uint32_t weights[8][2];
    Scores<kDim>(*tiles, queries, scores);
    OnlineSoftmax<8, kDynamic>(
        scores, first, visible, masked,
        [&](int n, int e) {
          return kDynamic ? score_factor * tiles->scales[0][8 * n + 2 * t + e] : score_factor;
        },
        [&](int n, int e) { return kDynamic ? tiles->scales[1][8 * n + 2 * t + e] : 0.0f; }, &state,
        weights, decay);
    ApplyDecay(decay, out);
    AddValues<kDim>(*tiles, weights, out);
  }
  const float value_scale =
      kDynamic ? 1.0f : __ldg(p.cache.scales + p.cache.num_kv_heads + w.kv_head);
  StoreRows<kDim>(p, w, warp_row, value_scale, state, out);
}

template <int kDim, bool kDynamic>
cudaError_t LaunchFor(const PagedAttentionParams& params,
                      const PrefillTile* tiles,
                      int num_tiles,
                      cudaStream_t stream) {
  const auto kernel = PrefillAttentionKernel<kDim, kDynamic>;
  const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(sizeof(Tiles<kDim>)));
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(num_tiles),
                  static_cast<unsigned>(params.cache.num_kv_heads));
  return gpu::Launch(kernel, grid, dim3(kThreads), sizeof(Tiles<kDim>), stream, params, tiles);
}

}  // namespace

cudaError_t PrefillAttention(const PagedAttentionParams& params,
                             const PrefillTile* tiles,
                             int num_tiles,
                             cudaStream_t stream) {
  const CacheLayer& cache = params.cache;
  const bool dynamic = cache.format == CacheFormat::kFp8Dynamic;
  const bool shapes = params.num_heads > 0 && cache.num_kv_heads > 0 &&
                      params.num_heads % cache.num_kv_heads == 0 && num_tiles >= 0;
  const bool out = LinearRowsFit(params.out, params.num_heads * cache.head_dim) &&
                   (params.out.element != Element::kFp8 || cache.head_dim == kScaleGroup);
  if (!shapes || !out || params.q_element != Element::kF16 ||
      (cache.format != CacheFormat::kFp8 && !dynamic))
    return cudaErrorInvalidValue;
  if (num_tiles == 0) return cudaSuccess;
  if (cache.head_dim == 64) {
    return dynamic ? LaunchFor<64, true>(params, tiles, num_tiles, stream)
                   : LaunchFor<64, false>(params, tiles, num_tiles, stream);
  }
  if (cache.head_dim == 128) {
    return dynamic ? LaunchFor<128, true>(params, tiles, num_tiles, stream)
                   : LaunchFor<128, false>(params, tiles, num_tiles, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace baton::ops::cuda
