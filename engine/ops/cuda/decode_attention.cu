// Attention for sequences with few queries. One block per (split of the context, KV head and chunk
// of query rows, sequence); a query row is one (query, head) pair of the KV head. Its four warps
// take groups of 16 tokens in turn and never meet before the end: K and V go from global memory
// straight into the fragments of mma.m16n8k16, because
//   scores   sum over dims, in any order: lane t of four takes D / 4 neighbouring dims of a token's
//   row; values   sum over tokens in the order of the scores' own fragments, and column g of the
//   j-th tile
//            of eight output dims stands for dim g * D / 8 + j, so that a lane's bytes are
//            neighbours.
// Splits leave (maximum, sum, output) in the workspace; the last to finish adds them in order.

#include "engine/ops/cuda/cache_rows.h"
#include "engine/ops/cuda/fp8_fragments.h"
#include "engine/ops/cuda/gpu.h"
#include "engine/ops/cuda/kernels.h"
#include "engine/ops/cuda/linear_rows.h"
#include "engine/ops/cuda/online_softmax.h"

namespace baton::ops::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kGroup = 16;  // tokens a warp takes at a time

// What one block works on.
struct Work {
  int sequence, query_start, query_len, context_len;
  int kv_head, heads_per_kv, first_row, num_rows;  // rows of this chunk
  int begin, end;                                  // tokens of this split
};

template <int kTiles>
__device__ __forceinline__ Work WorkOfBlock(const DecodeAttentionParams& params, int row_chunks) {
  const PagedAttentionParams& p = params.attention;
  Work w;
  w.sequence = p.sequences[blockIdx.z];
  w.query_start = p.query_starts[w.sequence];
  w.query_len = p.query_starts[w.sequence + 1] - w.query_start;
  w.context_len = p.context_lens[w.sequence];
  w.kv_head = static_cast<int>(blockIdx.y) / row_chunks;
  w.heads_per_kv = p.num_heads / p.cache.num_kv_heads;
  w.first_row = static_cast<int>(blockIdx.y) % row_chunks * 16 * kTiles;
  w.num_rows = min(16 * kTiles, w.query_len * w.heads_per_kv - w.first_row);
  const int blocks = (w.context_len + kBlockTokens - 1) / kBlockTokens;
  const int per_split = (blocks + params.num_splits - 1) / params.num_splits;
  w.begin = static_cast<int>(blockIdx.x) * per_split * kBlockTokens;
  w.end = min(w.begin + per_split * kBlockTokens, w.context_len);
  return w;
}

// Tokens that row `row` of the chunk sees.
__device__ __forceinline__ int Visible(const Work& w, int row) {
  return w.context_len - w.query_len + (w.first_row + row) / w.heads_per_kv + 1;
}

// Sixteen tokens of K and V as this lane's bytes.
template <int kDim>
struct TokenBytes {
  static constexpr int kKeyWords = kDim / 16, kValueWords = kDim / 32;
  uint32_t key[2][kKeyWords];          // token 8n + g, dims t * D / 4 ..
  uint32_t value[4][kValueWords];      // tokens 2t, 2t + 1, 2t + 8, 2t + 9; dims g * D / 8 ..
  float key_scale[4], value_scale[4];  // kFp8Dynamic: of those four tokens
};

template <int kWords>
__device__ __forceinline__ void LoadWords(const uint8_t* from, uint32_t (&words)[kWords]) {
  if constexpr (kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 four = __ldg(reinterpret_cast<const uint4*>(from) + i / 4);
      words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
    }
  } else {
    const uint2 two = __ldg(reinterpret_cast<const uint2*>(from));
    words[0] = two.x, words[1] = two.y;
  }
}

// Token of the value fragment's i-th element, within the group.
__device__ __forceinline__ int ValueToken(int t, int i) { return 2 * t + i % 2 + i / 2 * 8; }

// Tokens from `end` on read as zeros.
template <int kDim, bool kDynamic>
__device__ __forceinline__ void LoadTokens(const PagedAttentionParams& p,
                                           const Work& w,
                                           int first,
                                           TokenBytes<kDim>* bytes) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int64_t block = __ldg(p.block_tables + static_cast<int64_t>(w.sequence) * p.max_blocks +
                              first / kBlockTokens);
  const int row = first % kBlockTokens;
  const uint8_t* keys = HeadRows(p.cache, block, 0, w.kv_head) + row * kDim + t * (kDim / 4);
  const uint8_t* values = HeadRows(p.cache, block, 1, w.kv_head) + row * kDim + g * (kDim / 8);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    if (first + 8 * n + g < w.end) {
      LoadWords(keys + (8 * n + g) * kDim, bytes->key[n]);
    } else {
#pragma unroll
      for (uint32_t& word : bytes->key[n]) word = 0;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = ValueToken(t, i);
    const bool there = first + token < w.end;
    if (there) {
      LoadWords(values + token * kDim, bytes->value[i]);
    } else {
#pragma unroll
      for (uint32_t& word : bytes->value[i]) word = 0;
    }
    if constexpr (kDynamic) {
      const float* scales = RowScale(p.cache, block, RowIndex(p.cache, 0, w.kv_head, row + token));
      bytes->key_scale[i] = there ? scales[0] : 0.0f;
      bytes->value_scale[i] = there ? scales[p.cache.num_kv_heads * kBlockTokens] : 0.0f;
    }
  }
}

// The softmax and the output of a warp's rows.
template <int kDim, int kTiles>
struct State {
  RowState rows[kTiles];
  float out[kTiles][kDim / 8][4];
};

// Scores of 16 rows and 16 tokens: [n][row g: tokens 2t, 2t + 1; row g + 8: the same].
template <int kDim>
__device__ __forceinline__ void Scores(const uint4* queries,
                                       const TokenBytes<kDim>& bytes,
                                       float (&scores)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int r = 0; r < 4; ++r) scores[n][r] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const uint4 q = queries[step * 32];
    const uint32_t a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t word = bytes.key[n][step];
      const uint32_t b[2] = {HalvesOfFp8x2(word & 0xffffu), HalvesOfFp8x2(word >> 16)};
      gpu::MmaF16(scores[n], a, b, scores[n]);
    }
  }
}

template <int kDim, int kTiles>
__device__ __forceinline__ void AddValues(const TokenBytes<kDim>& bytes,
                                          const uint32_t (&weights)[kTiles][2][2],
                                          State<kDim, kTiles>* state) {
#pragma unroll
  for (int j = 0; j < kDim / 8; ++j) {
    const uint32_t select = static_cast<uint32_t>(j % 4) | static_cast<uint32_t>(4 + j % 4) << 4;
    const int word = j / 4;
    const uint32_t b[2] = {
        HalvesOfFp8x2(__byte_perm(bytes.value[0][word], bytes.value[1][word], select) & 0xffffu),
        HalvesOfFp8x2(__byte_perm(bytes.value[2][word], bytes.value[3][word], select) & 0xffffu)};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint32_t a[4] = {weights[tile][0][0], weights[tile][0][1], weights[tile][1][0],
                             weights[tile][1][1]};
      gpu::MmaF16(state->out[tile][j], a, b, state->out[tile][j]);
    }
  }
}

// All query rows of the chunk in the order of the fragments: [tile][step][lane]; missing rows are
// 0.
template <int kDim, int kTiles>
__device__ __forceinline__ void LoadQueries(const PagedAttentionParams& p,
                                            const Work& w,
                                            uint4* queries) {
  constexpr int kSteps = kDim / 16;
  for (int i = static_cast<int>(threadIdx.x); i < kTiles * kSteps * 32; i += kThreads) {
    const int lane = i % 32, step = i / 32 % kSteps, tile = i / 32 / kSteps;
    const int dim = lane % 4 * (kDim / 4) + step * 4;
    uint2 pairs[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile * 16 + lane / 4 + 8 * half;
      pairs[half] = make_uint2(0, 0);
      if (row < w.num_rows) {
        const int64_t token = w.query_start + (w.first_row + row) / w.heads_per_kv;
        const int head = w.kv_head * w.heads_per_kv + (w.first_row + row) % w.heads_per_kv;
        const __half* from =
            static_cast<const __half*>(p.q) + (token * p.num_heads + head) * kDim + dim;
        pairs[half] = __ldg(reinterpret_cast<const uint2*>(from));
      }
    }
    queries[i] = make_uint4(pairs[0].x, pairs[1].x, pairs[0].y, pairs[1].y);
  }
}

template <int kDim, int kTiles, bool kDynamic>
__device__ __forceinline__ void AttendSplit(const PagedAttentionParams& p,
                                            const Work& w,
                                            const uint4* queries,
                                            State<kDim, kTiles>* state) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const float score_factor =
      p.softmax_scale * kLog2E * (kDynamic ? 1.0f : __ldg(p.cache.scales + w.kv_head));
  const int least_visible = Visible(w, 0);
  // The next group is on its way while this one is computed, where there are registers for both.
  constexpr bool kAhead = !(kDynamic && kTiles > 1);
  TokenBytes<kDim> bytes, next;
  int first = w.begin + warp * kGroup;
  if (kAhead && first < w.end) LoadTokens<kDim, kDynamic>(p, w, first, &next);
  for (; first < w.end; first += kWarps * kGroup) {
    if constexpr (kAhead) {
      bytes = next;
      const int following = first + kWarps * kGroup;
      if (following < w.end) LoadTokens<kDim, kDynamic>(p, w, following, &next);
    } else {
      LoadTokens<kDim, kDynamic>(p, w, first, &bytes);
    }
    const bool masked = first + kGroup > least_visible;
    if (masked) {  // a value that some row must not see must not reach it as 0 * NaN
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (uint32_t& word : bytes.value[i]) word = NanCodesToZero(word);
      }
    }
    uint32_t weights[kTiles][2][2];
    float bias[4] = {};
    if constexpr (kDynamic) {
#pragma unroll
      for (int i = 0; i < 4; ++i) bias[i] = ValueBias(bytes.value_scale[i]);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float scores[2][4], decay[2];
      Scores<kDim>(queries + tile * (kDim / 16) * 32 + lane, bytes, scores);
      const int visible[2] = {Visible(w, tile * 16 + lane / 4),
                              Visible(w, tile * 16 + lane / 4 + 8)};
      OnlineSoftmax<2, kDynamic>(
          scores, first, visible, masked,
          [&](int n, int e) {
            return kDynamic ? score_factor * bytes.key_scale[2 * n + e] : score_factor;
          },
          [&](int n, int e) { return bias[2 * n + e]; }, &state->rows[tile], weights[tile], decay);
      ApplyDecay(decay, state->out[tile]);
    }
    AddValues(bytes, weights, state);
  }
}

// The partial result of a warp or of a split: output in the order of the fragments,
// [tile][j][lane], then the maximum and the sum of every row.
template <int kDim, int kTiles>
struct Partial {
  static constexpr int kRows = 16 * kTiles;
  static constexpr int kVectors = kTiles * (kDim / 8) * 32;  // float4 each
  static constexpr int kFloats = 4 * kVectors + 2 * kRows;
};

// Adds `count` partials in order, the i-th at parts + i * kFloats, into out [kVectors] (which may
// be the first of them) and maximum, sum [kRows]. All threads; `maximum` and `sum` are valid after
// a barrier.
template <int kDim, int kTiles>
__device__ __forceinline__ void Combine(
    const float* parts, int count, float4* out, float* maximum, float* sum) {
  using P = Partial<kDim, kTiles>;
  const auto rows = [&](int part) { return parts + part * P::kFloats + 4 * P::kVectors; };
  for (int row = static_cast<int>(threadIdx.x); row < P::kRows; row += kThreads) {
    float largest = -INFINITY, total = 0.0f;
    for (int i = 0; i < count; ++i) largest = fmaxf(largest, __ldcg(rows(i) + row));
    for (int i = 0; i < count; ++i) {
      const float factor = gpu::FastExp2(__ldcg(rows(i) + row) - FiniteMaximum(largest));
      total = fmaf(__ldcg(rows(i) + P::kRows + row), factor, total);
    }
    maximum[row] = largest;
    sum[row] = total;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < P::kVectors; i += kThreads) {
    const int row = i / 32 / (kDim / 8) * 16 + i % 32 / 4;
    float4 total = make_float4(0, 0, 0, 0);
    for (int part = 0; part < count; ++part) {
      const float low = __ldcg(rows(part) + row), high = __ldcg(rows(part) + row + 8);
      if (low == -INFINITY && high == -INFINITY) continue;  // nothing there, nothing written
      const float4 value = __ldcg(reinterpret_cast<const float4*>(parts + part * P::kFloats) + i);
      const float low_factor = gpu::FastExp2(low - FiniteMaximum(maximum[row]));
      const float high_factor = gpu::FastExp2(high - FiniteMaximum(maximum[row + 8]));
      total.x = fmaf(value.x, low_factor, total.x);
      total.y = fmaf(value.y, low_factor, total.y);
      total.z = fmaf(value.z, high_factor, total.z);
      total.w = fmaf(value.w, high_factor, total.w);
    }
    out[i] = total;
  }
  __syncthreads();
}

// A warp's state as a partial.
template <int kDim, int kTiles>
__device__ __forceinline__ void StorePartial(const State<kDim, kTiles>& state, float* part) {
  using P = Partial<kDim, kTiles>;
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      const float(&out)[4] = state.out[tile][j];
      reinterpret_cast<float4*>(part)[(tile * (kDim / 8) + j) * 32 + lane] =
          make_float4(out[0], out[1], out[2], out[3]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = SegmentSum<4>(state.rows[tile].sum[half]);
      if (lane % 4 == 0) {
        const int row = tile * 16 + g + 8 * half;
        part[4 * P::kVectors + row] = state.rows[tile].maximum[half];
        part[4 * P::kVectors + P::kRows + row] = sum;
      }
    }
  }
}

// out [kVectors] in the order of the fragments -> rows of the output.
template <int kDim, int kTiles>
__device__ __forceinline__ void StoreRows(const PagedAttentionParams& p,
                                          const Work& w,
                                          const float* out,
                                          const float* sum,
                                          float value_scale) {
  constexpr int kChunks = kDim / 8;
  for (int i = static_cast<int>(threadIdx.x); i < 16 * kTiles * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool store = row < w.num_rows;
    const float factor = value_scale / sum[row];
    float x[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      // dim = column * D / 8 + j; row g or g + 8 of the tile.
      const int dim = 8 * chunk + k, column = dim / kChunks, j = dim % kChunks;
      const int lane = row % 8 * 4 + column / 2;
      const int element = column % 2 + row % 16 / 8 * 2;
      x[k] = out[((row / 16 * kChunks + j) * 32 + lane) * 4 + element] * factor;
    }
    const int64_t token = w.query_start + (w.first_row + row) / w.heads_per_kv;
    const int head = w.kv_head * w.heads_per_kv + (w.first_row + row) % w.heads_per_kv;
    StoreLinear8(p.out, token, p.num_heads * kDim, head * kChunks + chunk, store, x);
  }
}

template <int kDim, int kTiles, bool kDynamic>
__global__ void __launch_bounds__(kThreads, kTiles > 1 || kDynamic ? 2 : 3)
    DecodeAttentionKernel(const __grid_constant__ DecodeAttentionParams params, int row_chunks) {
  using P = Partial<kDim, kTiles>;
  BATON_DYNAMIC_SHARED(float, parts);  // [kWarps][kFloats]; the queries before that
  BATON_SHARED(float, row_maximum, [P::kRows]);
  BATON_SHARED(float, row_sum, [P::kRows]);
  BATON_SHARED(int, is_last, [1]);
  const PagedAttentionParams& p = params.attention;
  const Work w = WorkOfBlock<kTiles>(params, row_chunks);

  State<kDim, kTiles> state;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) state.out[tile][j][r] = 0.0f;
    }
  }
  if (w.num_rows > 0) {
    uint4* queries = reinterpret_cast<uint4*>(parts);
    LoadQueries<kDim, kTiles>(p, w, queries);
    __syncthreads();
    AttendSplit<kDim, kTiles, kDynamic>(p, w, queries, &state);
    __syncthreads();  // the queries' place is taken by the partials
    StorePartial(state, parts + static_cast<int>(threadIdx.x) / 32 * P::kFloats);
    __syncthreads();
    Combine<kDim, kTiles>(parts, kWarps, reinterpret_cast<float4*>(parts), row_maximum, row_sum);
    bool finishes = true;
    if (params.num_splits > 1) {
      const int64_t place = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
      float* partials = params.workspace + place * params.num_splits * P::kFloats;
      float* mine = partials + static_cast<int64_t>(blockIdx.x) * P::kFloats;
      if (w.begin < w.end) {
        for (int i = static_cast<int>(threadIdx.x); i < P::kVectors; i += kThreads)
          reinterpret_cast<float4*>(mine)[i] = reinterpret_cast<const float4*>(parts)[i];
      }
      for (int row = static_cast<int>(threadIdx.x); row < P::kRows; row += kThreads) {
        mine[4 * P::kVectors + row] = row_maximum[row];
        mine[4 * P::kVectors + P::kRows + row] = row_sum[row];
      }
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        is_last[0] = atomicAdd(params.counters + place, 1) == params.num_splits - 1;
        if (is_last[0]) params.counters[place] = 0;  // for the next launch
      }
      __syncthreads();
      finishes = is_last[0] != 0;
      if (finishes) {
        __threadfence();
        Combine<kDim, kTiles>(partials, params.num_splits, reinterpret_cast<float4*>(parts),
                              row_maximum, row_sum);
      }
    }
    if (finishes) {
      const float value_scale =
          kDynamic ? 1.0f : __ldg(p.cache.scales + p.cache.num_kv_heads + w.kv_head);
      StoreRows<kDim, kTiles>(p, w, parts, row_sum, value_scale);
    }
  }
}

template <int kDim, int kTiles, bool kDynamic>
cudaError_t LaunchFor(const DecodeAttentionParams& params, int row_chunks, cudaStream_t stream) {
  const auto kernel = DecodeAttentionKernel<kDim, kTiles, kDynamic>;
  constexpr size_t kSharedBytes = sizeof(float) * kWarps * Partial<kDim, kTiles>::kFloats;
  if constexpr (kSharedBytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(kSharedBytes));
    if (error != cudaSuccess) return error;
  }
  const dim3 grid(static_cast<unsigned>(params.num_splits),
                  static_cast<unsigned>(params.attention.cache.num_kv_heads * row_chunks),
                  static_cast<unsigned>(params.attention.num_sequences));
  return gpu::Launch(kernel, grid, dim3(kThreads), kSharedBytes, stream, params, row_chunks);
}

template <int kDim>
cudaError_t LaunchForDim(const DecodeAttentionParams& params, int max_rows, cudaStream_t stream) {
  const bool dynamic = params.attention.cache.format == CacheFormat::kFp8Dynamic;
  if (max_rows <= 16) {
    return dynamic ? LaunchFor<kDim, 1, true>(params, 1, stream)
                   : LaunchFor<kDim, 1, false>(params, 1, stream);
  }
  const int row_chunks = (max_rows + kDecodeRows - 1) / kDecodeRows;
  return dynamic ? LaunchFor<kDim, 2, true>(params, row_chunks, stream)
                 : LaunchFor<kDim, 2, false>(params, row_chunks, stream);
}

}  // namespace

int DecodeRowChunks(int max_query_len, int heads_per_kv_head) {
  return (max_query_len * heads_per_kv_head + kDecodeRows - 1) / kDecodeRows;
}

size_t DecodeAttentionWorkspace(
    int num_sequences, int num_kv_heads, int row_chunks, int num_splits, int head_dim) {
  const size_t partials =
      static_cast<size_t>(num_sequences) * num_kv_heads * row_chunks * num_splits;
  return partials * kDecodeRows * (head_dim + 2) * sizeof(float);
}

cudaError_t DecodeAttention(const DecodeAttentionParams& params,
                            int max_query_len,
                            cudaStream_t stream) {
  const PagedAttentionParams& p = params.attention;
  const bool fp8 =
      p.cache.format == CacheFormat::kFp8 || p.cache.format == CacheFormat::kFp8Dynamic;
  const bool shapes = p.num_heads > 0 && p.cache.num_kv_heads > 0 &&
                      p.num_heads % p.cache.num_kv_heads == 0 && p.num_sequences >= 0 &&
                      max_query_len >= 0 && max_query_len <= kDecodeQueryMax;
  const bool splits =
      params.num_splits == 1 ||
      (params.num_splits > 1 && params.workspace != nullptr && params.counters != nullptr);
  const bool out = LinearRowsFit(p.out, p.num_heads * p.cache.head_dim) &&
                   (p.out.element != Element::kFp8 || p.cache.head_dim == kScaleGroup);
  if (!fp8 || !shapes || !splits || !out || p.q_element != Element::kF16)
    return cudaErrorInvalidValue;
  if (p.num_sequences == 0 || max_query_len == 0) return cudaSuccess;
  const int max_rows = max_query_len * (p.num_heads / p.cache.num_kv_heads);
  if (p.cache.head_dim == 64) return LaunchForDim<64>(params, max_rows, stream);
  if (p.cache.head_dim == 128) return LaunchForDim<128>(params, max_rows, stream);
  return cudaErrorInvalidValue;
}

}  // namespace baton::ops::cuda
