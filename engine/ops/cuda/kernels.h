#pragma once

// The launchers of the CUDA kernels. Shapes, letters and math are those of engine/ops/backend.h;
// here stands only what lies where in device memory. Every pointer is device memory unless it says
// otherwise; rows are contiguous; pointers are aligned to 16 bytes. A launcher checks what its
// kernel cannot bear (cudaErrorInvalidValue, before anything runs), puts the work into `stream` and
// returns; an empty step is a success that launches nothing.

#include <cuda_runtime.h>

#include <cstdint>

#include "engine/ops/sample.h"

namespace baton::ops::cuda {

// Element type of an activation in device memory.
enum class Element { kF32, kBf16, kF16, kFp8 };

// What a block of the KV pool holds: kv::KvFormat by another name, for kernels.
enum class CacheFormat { kFp8, kFp8Dynamic, kBf16, kF32 };

// One layer of the KV pool: blocks of [K|V][Hkv][64][D], then, in kFp8Dynamic, scales
// [K|V][Hkv][64].
struct CacheLayer {
  uint8_t* base = nullptr;
  int64_t block_bytes = 0;
  CacheFormat format = CacheFormat::kFp8;
  int num_kv_heads = 0, head_dim = 0;
  const float* scales = nullptr;  // kFp8: [2][Hkv], powers of two
};

struct QkNormRopeAppendParams {
  const void* qkv = nullptr;  // [T][(Hq + 2 Hkv) * D], f32 or bf16
  Element qkv_element = Element::kBf16;
  void* q_out = nullptr;  // [T][Hq * D], f32 or f16
  Element q_element = Element::kF16;
  int num_tokens = 0, num_heads = 0;
  const float* q_weight = nullptr;  // [D] or null
  const float* k_weight = nullptr;
  float eps = 0;
  const int32_t* positions = nullptr;  // [T]
  const int64_t* slots = nullptr;      // [T], -1 stores nothing
  const float* rope = nullptr;         // [positions][D]
  CacheLayer cache;
};
// head_dim 32, 64, 128 or 256.
cudaError_t QkNormRopeAppend(const QkNormRopeAppendParams& params, cudaStream_t stream);

// Rows that a linear layer reads: f32, bf16, or e4m3 with one scale for 128 neighbouring elements.
// Scales lie token by token within a group, as FP8 matrix products want them: scales[group * pitch
// + t].
struct LinearRows {
  void* data = nullptr;
  Element element = Element::kBf16;  // kF32, kBf16, kFp8
  float* scales = nullptr;           // kFp8: [width / 128][pitch]
  int64_t pitch = 0;
};

struct EmbedParams {
  const void* table = nullptr;  // [V][E], f32 or bf16
  Element table_element = Element::kBf16;
  const int32_t* ids = nullptr;  // [T], in [0, V)
  float* residual = nullptr;     // [T][E]
  int num_tokens = 0, width = 0;
};
// width % 8 == 0.
cudaError_t Embed(const EmbedParams& params, cudaStream_t stream);

struct RmsNormParams {
  float* residual = nullptr;      // [tokens][E]
  const int32_t* rows = nullptr;  // [T] rows of `residual` to take, or null: row t
  const void* delta = nullptr;    // [T][E] f32 or bf16, added to the residual first; or null
  Element delta_element = Element::kBf16;
  const float* weight = nullptr;  // [E]
  LinearRows out;                 // [T][E]
  int num_tokens = 0, width = 0;
  float eps = 0;
};
// residual += delta; out = residual * rsqrt(mean(residual^2) + eps) * weight. width % 8 == 0 (e4m3:
// 128), at most 16384; `rows` and `delta` together are refused.
cudaError_t RmsNorm(const RmsNormParams& params, cudaStream_t stream);

// Most blocks of an all-reduce: few enough that all of them run at once, as each waits for the
// other device's block of its number.
inline constexpr int kReduceBlocksMax = 64;
// Words of a rank's signals: rounds gone through by each block, and rounds that the other rank's
// block has told of. Zero at first.
inline constexpr int kReduceSignals = 2 * kReduceBlocksMax;

struct AllReduceNormParams {
  const float* parts[2] = {};   // [T][E] of rank 0 and of rank 1, each on its own device
  uint32_t* signals = nullptr;  // [kReduceSignals] of this rank, which the other one writes too
  uint32_t* peer_signals = nullptr;      // the other rank's
  const uint32_t* called_off = nullptr;  // host memory: not 0 when nobody is to wait any more
  float* residual = nullptr;             // [T][E] inout
  const float* weight = nullptr;         // [E], or null: no norm
  LinearRows out;                        // [T][E]
  int num_tokens = 0, width = 0;
  float eps = 0;
};
// residual += parts[0] + parts[1]; out = residual * rsqrt(mean(residual^2) + eps) * weight. Returns
// on both devices or on none: both launch it, in the same order and with the same sizes. Called
// off, residual and out hold anything. The sizes of RmsNorm.
cudaError_t AllReduceNorm(const AllReduceNormParams& params, cudaStream_t stream);

struct SiluMulParams {
  const void* gate_up = nullptr;  // [T][2 F], gate before up, f32 or bf16
  Element element = Element::kBf16;
  LinearRows out;                 // [T][F]
  int num_tokens = 0, width = 0;  // F
};
// out = silu(gate) * up. width % 8 == 0 (e4m3: 128).
cudaError_t SiluMul(const SiluMulParams& params, cudaStream_t stream);

// Made-up weights (engine/base/hash_weights.h): out[r][c] = HashWeight(seed, first_row + r,
// first_col + c, std); e4m3: times inverse_scale. cols % 8 == 0.
struct HashFillParams {
  void* out = nullptr;  // [rows][cols]
  Element element = Element::kBf16;
  int64_t rows = 0;
  int cols = 0;
  uint64_t seed = 0;
  int64_t first_row = 0, first_col = 0;
  float std = 0, inverse_scale = 1;
};
cudaError_t HashFill(const HashFillParams& params, cudaStream_t stream);

struct QuantizeRowsParams {
  const void* rows = nullptr;  // [T][width], f32 or bf16
  Element element = Element::kBf16;
  LinearRows out;
  int num_tokens = 0, width = 0;
};
// The rows as a linear layer reads them. width % 8 == 0 (e4m3: 128).
cudaError_t QuantizeRows(const QuantizeRowsParams& params, cudaStream_t stream);

struct QuantizeQueriesParams {
  const void* q = nullptr;  // [T][width], f16
  uint8_t* out = nullptr;   // [T][width], e4m3
  int num_tokens = 0, width = 0;
  float scale = 0;  // a power of two
};
// out = q / scale, to nearest even, saturating. width % 8 == 0.
cudaError_t QuantizeQueries(const QuantizeQueriesParams& params, cudaStream_t stream);

// A step's sequences and where attention writes. Query i of sequence b (i < query_len) is token
// query_starts[b] + i and sees the first context_lens[b] - query_len + i + 1 tokens of its blocks.
struct PagedAttentionParams {
  const void* q = nullptr;  // [T][Hq * D], f16 or f32, normed and rotated
  Element q_element = Element::kF16;
  LinearRows out;  // [T][Hq * D]; e4m3: D = 128
  int num_heads = 0;
  float softmax_scale = 0;
  CacheLayer cache;
  const int32_t* query_starts = nullptr;  // [B + 1]
  const int32_t* context_lens = nullptr;  // [B]
  const int32_t* block_tables = nullptr;  // [B][max_blocks]
  int max_blocks = 0;
  const int32_t* sequences = nullptr;  // the sequences to attend: indices into the arrays above
  int num_sequences = 0;
};

// The oracle: one warp per (token, head), token after token. Every format; head_dim a multiple of
// 32, at most 256; no e4m3 out. `max_query_len`: of the chosen sequences.
cudaError_t SimpleAttention(const PagedAttentionParams& params,
                            int max_query_len,
                            cudaStream_t stream);

// For sequences with few queries (decode, speculative verify): tensor cores, the context cut into
// splits. kFp8 and kFp8Dynamic, head_dim 64 or 128, q in f16, any ratio of heads.
struct DecodeAttentionParams {
  PagedAttentionParams attention;
  int num_splits = 1;
  // More than one split: partial results, DecodeAttentionWorkspace() bytes, and one counter for
  // each (sequence, KV head, row chunk), zero before the first launch and after every launch.
  float* workspace = nullptr;
  int32_t* counters = nullptr;
};
inline constexpr int kDecodeQueryMax = 8;
// Query rows (queries times heads of a KV head) that one block takes.
inline constexpr int kDecodeRows = 32;
int DecodeRowChunks(int max_query_len, int heads_per_kv_head);
size_t DecodeAttentionWorkspace(
    int num_sequences, int num_kv_heads, int row_chunks, int num_splits, int head_dim);
cudaError_t DecodeAttention(const DecodeAttentionParams& params,
                            int max_query_len,
                            cudaStream_t stream);

// For sequences with many queries (prefill, over a cached prefix or not): tensor cores, K and V of
// a block shared by kPrefillRows query rows; a row is one (query, head) pair of a KV head, row =
// query * (Hq / Hkv) + head. The same formats as DecodeAttention.
inline constexpr int kPrefillRows = 128;
struct PrefillTile {
  int32_t sequence;   // index into query_starts
  int32_t first_row;  // a multiple of kPrefillRows
};
// `tiles`: device memory; together they cover every row once. (`sequences` is not looked at.)
cudaError_t PrefillAttention(const PagedAttentionParams& params,
                             const PrefillTile* tiles,
                             int num_tiles,
                             cudaStream_t stream);

// Draws a token from each row (engine/ops/sample.h).
struct SampleParams {
  float* logits = nullptr;  // [R][V] inout: edits are applied in place
  const SampleRow* rows = nullptr;
  TokenEdit* edits = nullptr;
  SampleResult* results = nullptr;  // [R] out
  int num_rows = 0, vocab = 0;
  int num_tokens = 0;  // as in Draws
};
cudaError_t Sample(const SampleParams& params, cudaStream_t stream);

// Tokens of a step that a chain has drawn: out[t] = the token of results[drawn[t]] (kNoTokenDrawn
// if it has none) where drawn[t] >= 0, else ids[t]. `ids` and `out` may be the same.
struct TakeDrawnParams {
  const int32_t* ids = nullptr;           // [T]
  const int32_t* drawn = nullptr;         // [T]
  const SampleResult* results = nullptr;  // of the chain's draws
  int32_t* out = nullptr;                 // [T]
  int num_tokens = 0;
};
cudaError_t TakeDrawn(const TakeDrawnParams& params, cudaStream_t stream);

// Whole cache blocks of one layer between the pool and a staging area: staging[i] <->
// pool[blocks[i]].
struct BlockCopyParams {
  uint8_t* pool = nullptr;
  uint8_t* staging = nullptr;       // [num_blocks][block_bytes]
  const int32_t* blocks = nullptr;  // -1: left out
  int64_t block_bytes = 0;          // a multiple of 16
  int num_blocks = 0;
};
cudaError_t GatherBlocks(const BlockCopyParams& params, cudaStream_t stream);
cudaError_t ScatterBlocks(const BlockCopyParams& params, cudaStream_t stream);

}  // namespace baton::ops::cuda
