#pragma once

// The operations a decoder is made of. Shapes, dtypes and math are written here and nowhere else;
// ref, cpu and cuda implement them. T tokens in a step, B sequences, L layers, Hq/Hkv query and KV
// heads, D head dim, E hidden, F ffn, V vocab, N blocks, P block tokens (64), R rows whose logits
// are wanted.
//
// The canonical order of sums (version kSumOrderVersion): every output element is summed in one
// order, whatever the batch, chunk, prefix hit, thread count or instruction set, so ref and cpu
// agree bit for bit.
//   bf16 dot   per 32 k: two f32 FMA chains from zero, over even k and over odd k; then acc +=
//   (even + odd), k ascending.
//              Denormals are flushed to zero on input and output (FTZ+DAZ). K is padded with zeros
//              to a multiple of 32. This is what TDPBF16PS does.
//   f32 dot    one FMA chain, k ascending, from zero.
//   int8 dot   exact int32, then one f32 epilogue: float(sum) * (activation scale * weight scale).
//   q4 dot     per group of 32 k, ascending, from zero: acc = fma(float(exact int32 sum of weight
//   code * activation code), weight scale * activation scale, acc); acc = fma(weight minimum,
//   activation scale * float(sum of the activation codes), acc).
//   o_proj and down_proj: the K range is cut into two halves (TP ranks), at K / 2 rounded up to 32
//   (int8: 64), each summed
//              as above from zero; result = residual + (low + high).
//   attention  64-token blocks ascending, one online softmax with a running maximum and sum per
//   (query, head); see
//              PagedAttention.
//   exp, rsqrt, silu, sin/cos: the scalar functions of engine/ops/canonical_math.h, which the
//   vector paths reproduce.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/base/buffer.h"
#include "engine/kv/kv_layout.h"
#include "engine/ops/draw_chain.h"
#include "engine/ops/sample.h"
#include "engine/parallel/tp_group.h"

namespace baton::ops {

// 2: kQ4 multiplies codes by codes. In version 1 it was the bf16 dot with bf16(fma(scale, code,
// min)). Everything else is as it was.
inline constexpr uint32_t kSumOrderVersion = 2;
// Versions from 1001 are those of the CUDA backend: tensor cores sum as they like, and differently
// with the shapes of a step, so what it computes equals the canonical order's up to rounding only.
// Keys and values of different versions are never mixed: not in a prefix cache, not in a hand-over.
inline constexpr uint32_t kDeviceSumOrderVersion = 1001;
// Of one whose prefill may be FlashInfer's, which rounds more (engine/ops/cuda/flash_prefill.h).
inline constexpr uint32_t kFlashSumOrderVersion = 1002;

// What linear layers compute in. Activations entering them follow: f32 for kF32, bf16 for kBf16,
// int8 with one scale per token for kInt8, int8 with one scale per 32 neighbours for kQ4 (both from
// f32, nothing is rounded to bf16 before).
enum class WeightDtype {
  kF32,
  kBf16,
  kInt8,  // per output row: scale = max|w| / 127, codes rounded to nearest even
  kQ4,    // groups of 32 along k: w = fma(scale, code, min), code 0..15
  // e4m3 with one f32 scale for 128 x 128 weights, those of the checkpoint or powers of two (so
  // that scale * code is a bf16 number). cuda multiplies e4m3 by e4m3, activations with a scale for
  // 128 neighbours; cpu and ref compute as in kBf16 with the same weights. Embedding and head are
  // bf16.
  kFp8,
};
absl::string_view WeightDtypeName(WeightDtype dtype);
// Errors: INVALID_ARGUMENT naming the accepted values ("auto" is resolved by the caller).
absl::StatusOr<WeightDtype> ParseWeightDtype(absl::string_view name);

// Where a matrix [rows, cols] comes from while it is packed. The functions are called from several
// threads.
struct MatrixSource {
  int rows = 0;
  int cols = 0;
  // Row `row` as f32 into out[source_cols()].
  std::function<void(int row, float* out)> read_row;
  // Optional: the row as it is stored in 4 bits, exactly: codes [source_cols()], scales and mins
  // [source_cols() / 32].
  std::function<bool(int row, uint8_t* codes, float* scales, float* mins)> read_row_q4;
  // With kFp8: this matrix is one of those in e4m3; read_row gives what its codes stand for.
  bool in_fp8 = false;
  // Optional: the row in e4m3: codes [source_cols()] and a scale for each 128 columns; scale * code
  // is what read_row gives. Rows 128 * i .. + 127 have the same scales.
  std::function<void(int row, uint8_t* codes, float* scales)> read_row_fp8;
  // Where the weights are made up (engine/base/hash_weights.h), the rows one below the other; a
  // device makes them itself. Empty: read_row has them. What read_row gives is the same but in
  // e4m3, where a device scales by the largest value there can be, not by that of each block.
  struct MadeRows {
    int rows = 0;
    uint64_t seed = 0;
    int64_t first_row = 0;
    float std = 0;
  };
  std::vector<MadeRows> made;
  // Where the matrix is columns [first_col, first_col + cols) of a wider one (a rank's share of K),
  // the columns of that one; 0: it is whole. Codes are those of whole rows: the ranks' parts of an
  // int8 row have one scale. kQ4: first_col is a multiple of 32.
  int whole_cols = 0;
  int first_col = 0;

  int source_cols() const { return whole_cols > 0 ? whole_cols : cols; }
};

// A packed matrix [rows, cols] in the backend's own layout. Immutable, shared by threads.
class Matrix {
 public:
  virtual ~Matrix() = default;
  virtual int rows() const = 0;
  virtual int cols() const = 0;
  virtual size_t bytes() const = 0;
};

// A buffer [max_tokens, width] between two operations, in the backend's own layout. Only operations
// look inside.
class Activation {
 public:
  virtual ~Activation() = default;
};
enum class ActivationKind {
  kResidual,     // f32
  kLinearInput,  // f32, bf16 or int8 with scales, as the weights' dtype asks; packed as the backend
                 // likes
  kProjected,    // f32: what QkvProject writes
};

// One layer of the KV pool.
struct KvCacheView {
  const kv::KvLayout* layout = nullptr;
  uint8_t* layer_base = nullptr;  // [N] blocks of layout->block_bytes()
  // kFp8 only: [2][Hkv] f32, K then V; a power of two each; stored value = x / scale.
  absl::Span<const float> scales;
};

// What one sequence brings to a step: its queries are the last `query_len` of `context_len` tokens.
struct SequenceView {
  int query_start = 0;  // index of its first token in the step
  int query_len = 0;
  int context_len = 0;                        // tokens in the cache after this step's append
  absl::Span<const kv::BlockId> block_table;  // covers context_len
};

struct QkNormRopeAppendArgs {
  Activation* qkv = nullptr;  // [T, (Hq + 2*Hkv) * D] inout; q is left normed and rotated in place
  int num_tokens = 0;
  int num_heads = 0, num_kv_heads = 0, head_dim = 0;
  absl::Span<const float> q_weight;  // [D], empty: no norm
  absl::Span<const float> k_weight;  // [D], empty: no norm
  float eps = 0;
  absl::Span<const int32_t> positions;  // [T]
  absl::Span<const int64_t> slots;      // [T] block * P + offset; -1 stores nothing
  absl::Span<const float>
      rope;  // [positions, D] f32: cos [D/2] | sin [D/2], attention factor included
  KvCacheView cache;
};

struct PagedAttentionArgs {
  const Activation* qkv = nullptr;  // q part: [T, Hq * D], normed and rotated
  int num_tokens = 0;
  int num_heads = 0, num_kv_heads = 0, head_dim = 0;
  float softmax_scale = 0;  // 1 / sqrt(D)
  absl::Span<const SequenceView>
      sequences;  // [B], one behind another: their queries are exactly tokens 0..T
  KvCacheView cache;
  Activation* out = nullptr;  // kLinearInput [T, Hq * D]
};

// What the host says of one pass through a model: T tokens of B sequences, R rows of logits.
struct PassInputs {
  // Whose pass: a model's operations for inputs of the same sizes are always the same.
  const void* model = nullptr;
  absl::Span<const int32_t> ids;             // [T]
  absl::Span<const int32_t> positions;       // [T]
  absl::Span<const int64_t> slots;           // [T]
  absl::Span<const SequenceView> sequences;  // [B]
  absl::Span<const int32_t> logit_rows;      // [R]
  // Nobody looks at keys and values before the pass is over.
  bool in_one_go = false;
  // Tokens are drawn from all rows and no logits are given out; null: as the caller draws himself.
  const Draws* draws = nullptr;
  // Where drawn[t] >= 0 token t is the one of that draw of `source`, and ids[t] says nothing. The
  // chain may be another backend's on the same device. Empty: `ids` has all tokens.
  absl::Span<const int32_t> drawn;  // [T] or empty
  const DrawChain* source = nullptr;
};

// Memory of the device that a backend computes on.
struct DeviceMemory {
  uint64_t total_bytes = 0;  // 0: it computes on the host
  uint64_t free_bytes = 0;
};

struct BackendOptions {
  int num_threads = 0;  // 0: one per core
  // cpu: auto, avx2, avx512, amx: the highest level that may be used; it must be there. auto takes
  // the best, or what the environment variable BATON_CPU_ISA names. portable, avx512_model and
  // amx_model (those kernels over instructions and tiles in software) are for tests.
  std::string isa = "auto";
  // cuda: file in which the fastest algorithms of matrix products are kept; empty: none.
  std::string gemm_cache;
  bool pin_threads = false;    // cpu: worker threads stay on one core each
  int device = 0;              // cuda: which one
  bool enforce_eager = false;  // cuda: operations are issued one by one, not as graphs
  // cuda: own, flashinfer, or auto: flashinfer where the program has it and the device is one that
  // it was made for. Also then own takes what it does not fit.
  std::string prefill_attention = "auto";
};

// Engine thread only. A step allocates nothing: every Activation and Matrix is made at start. The
// spans of weights, scales and RoPE tables that operations take stay where they are, unchanged, as
// long as the backend lives: a device keeps copies of them.
class Backend {
 public:
  virtual ~Backend() = default;
  // "ref", "cpu", "cuda".
  virtual absl::string_view name() const = 0;
  // For people: "cpu avx2 threads=2".
  virtual std::string description() const = 0;
  virtual WeightDtype weight_dtype() const = 0;
  virtual uint32_t sum_order_version() const { return kSumOrderVersion; }
  virtual absl::StatusOr<DeviceMemory> device_memory() { return DeviceMemory(); }
  // Bus address of its device, "0000:1b:00.0"; empty: the host.
  virtual std::string device_id() const { return ""; }

  // Packs a matrix. `interleave_half`: rows i and i + rows/2 belong together (gate and up), so that
  // SiluMul sees both. Errors: INVALID_ARGUMENT on shapes the dtype cannot hold (kQ4: cols % 32),
  // RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<std::unique_ptr<Matrix>> Pack(const MatrixSource& source,
                                                       bool interleave_half) = 0;
  virtual absl::StatusOr<std::unique_ptr<Activation>> NewActivation(ActivationKind kind,
                                                                    int max_tokens,
                                                                    int width) = 0;

  // From now on this is one rank of `group`, which outlives it; before the first NewActivation.
  // Every rank makes its calls on a thread of its own, from the backend's creation on. Every rank
  // has whole rows of the residual and a share of the heads and of F: QkvProject, QkNormRopeAppend,
  // PagedAttention and GateUpSilu compute the share alone (int8: with the scale of the whole row of
  // their output), ProjectAdd takes the rank's columns of W and adds the sum over ranks, Logits
  // writes the rank's share of the columns of one buffer that all ranks are given, and Synchronize
  // waits for all ranks. Where the ranks' shares of K are the two halves of the canonical order,
  // the bits are those of one rank. Errors: UNIMPLEMENTED.
  virtual absl::Status JoinGroup(parallel::TpGroup* group);

  // Whether other ranks can read this one's matrices; if not, each packs an embedding and a head.
  virtual bool matrices_are_shared() const { return true; }

  // Memory for a KV pool, which KvCacheView::layer_base points into: on the host, or on the device,
  // where the host cannot look. `shared`: another process can map it, by Buffer::fd or, on a
  // device, as kvtransfer/device_memory.h does. Errors: RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<base::Buffer> NewPool(size_t bytes, bool shared);
  // Copies within a pool, after everything issued so far.
  virtual absl::Status CopyInPool(uint8_t* to, const uint8_t* from, size_t bytes);
  // Whether pools lie on the host. Where they do not, these two move bytes between a pool and host
  // memory, after everything issued so far, and return when it is done.
  virtual bool pools_on_host() const { return true; }
  virtual absl::Status CopyFromPool(uint8_t* host, const uint8_t* pool, size_t bytes);
  virtual absl::Status CopyToPool(uint8_t* pool, const uint8_t* host, size_t bytes);

  // Makes room for passes with draws, at most `limits` of them, whose tokens the device draws by
  // itself: then a pass costs a few bytes a row where logits would be 4V. False: this backend gives
  // out logits only, as do those that compute on the host, where nothing has to be moved, and the
  // ranks of a group, each of which has a part of a row. Once, after JoinGroup. Errors:
  // RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<bool> ReserveDraws(const DrawLimits& limits) { return false; }

  // A chain for up to `max_draws` draws. Null: passes here neither make nor read chains, as those
  // that draw nothing. After ReserveDraws. Errors: RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<std::unique_ptr<DrawChain>> NewDrawChain(int max_draws) {
    return std::unique_ptr<DrawChain>();
  }

  // Runs a pass. `issue(whole)` calls its operations, with these inputs, the last of them Logits
  // into `logits` [R, V]. Here that is all there is to it. A device may know the operations of such
  // a pass by heart, and then it does not call `issue`, or it may call it twice to learn them.
  // `whole`: the operations are issued without Synchronize between them; only where
  // inputs.in_one_go allows it. With draws `logits` is null, and the tokens drawn from the rows are
  // in inputs.draws->results at the end, or with a chain when that is finished. Errors: those of
  // `issue`; INVALID_ARGUMENT for draws beyond what was reserved, or that are not one a row, and
  // for tokens that nobody has drawn, before anything is issued.
  virtual absl::Status RunPass(const PassInputs& inputs,
                               absl::FunctionRef<absl::Status(bool whole)> issue,
                               float* logits) {
    return issue(false);
  }

  // residual[t] = table[ids[t]].   ids [T] in [0, rows)   table [V, E]   residual [T, E] out
  virtual absl::Status Embed(const Matrix& table,
                             absl::Span<const int32_t> ids,
                             Activation* residual) = 0;

  // out = x * rsqrt(mean(x^2) + eps) * weight.   residual [T, E]   weight [E] f32   out
  // kLinearInput [T, E]
  virtual absl::Status RmsNorm(const Activation& residual,
                               int num_tokens,
                               absl::Span<const float> weight,
                               float eps,
                               Activation* out) = 0;

  // qkv = x * W^T + bias.   x kLinearInput [T, E]   W [(Hq + 2*Hkv) * D, E]   bias [rows] or empty
  // qkv kProjected out
  virtual absl::Status QkvProject(const Activation& x,
                                  int num_tokens,
                                  const Matrix& weight,
                                  absl::Span<const float> bias,
                                  Activation* qkv) = 0;

  // Per-head RMS norm of q and k, rotation of pairs (i, i + D/2) in f32, quantisation, append to
  // the paged cache, in one pass. k is rotated before it is quantised. fp8: nearest even,
  // saturating at +-448.
  virtual absl::Status QkNormRopeAppend(const QkNormRopeAppendArgs& args) = 0;

  // Causal attention over the paged, quantised cache. Query i of a sequence (i < query_len) sees
  // the first context_len - query_len + i + 1 tokens. Per (query, head), over blocks ascending:
  //   s_j = ((q . k_j) * scale_j) * softmax_scale, in the bf16 dot with q rounded to bf16 (f32 dot
  //   when the cache is kF32);
  //         fp8: the k bytes as bf16 values; scale_j: kFp8 the head's, kFp8Dynamic the token's,
  //         else 1
  //   m' = max(m, max_j s_j); p_j = exp(s_j - m'); l = fma(l, exp(m - m'), sum_j p_j) (order:
  //   canonical_math.h) o = fma(o, exp(m - m'), sum_j p_j v_j), in the bf16 dot over the 64 j with
  //   p_j rounded to bf16 (kFp8Dynamic: p_j *
  //       token's scale, then rounded); f32 dot when the cache is kF32
  //   result (o / l) (kFp8: times the head's V scale)
  // Tokens behind the query's own position have p_j = 0 and their V rows count as zero even if they
  // hold NaN.
  virtual absl::Status PagedAttention(const PagedAttentionArgs& args) = 0;

  // residual += x * W^T, as two halves of K, low half first.   x kLinearInput [T, K]   W [E, K]
  // residual [T, E] inout
  virtual absl::Status ProjectAdd(const Activation& x,
                                  int num_tokens,
                                  const Matrix& weight,
                                  Activation* residual) = 0;

  // out = silu(x * Wg^T) * (x * Wu^T).   x kLinearInput [T, E]   W [2F, E] packed with
  // interleave_half   out kLinearInput [T, F]
  virtual absl::Status GateUpSilu(const Activation& x,
                                  int num_tokens,
                                  const Matrix& weight,
                                  Activation* out) = 0;

  // logits[r] = norm(residual[rows[r]]) * head^T.   rows [R]   weight [E]   head [V, E]   logits
  // [R, V] f32 host out; null in a pass with draws: they stay on the device
  virtual absl::Status Logits(const Activation& residual,
                              absl::Span<const int32_t> rows,
                              absl::Span<const float> weight,
                              float eps,
                              const Matrix& head,
                              float* logits) = 0;

  // f(index, thread) once for each index in [0, count), on up to host_threads() threads, each with
  // a number below that, while no operation runs: other work of a step, with the threads that
  // would be idle. With the caller's rounding and treatment of denormals.
  virtual int host_threads() const { return 1; }
  virtual void ForEach(int count, absl::FunctionRef<void(int index, int thread)> f) {
    for (int i = 0; i < count; ++i) f(i, 0);
  }

  // Waits until everything issued so far is done and visible to the host and to other processes.
  virtual absl::Status Synchronize() = 0;

  // For tests: the activation as row-major f32 [num_tokens, width], dequantised.
  virtual absl::StatusOr<std::vector<float>> Read(const Activation& activation,
                                                  int num_tokens,
                                                  int width) = 0;
};

// What `--device auto` takes here, and why: "cuda" where the program has the CUDA backend and the
// first `num_devices` devices (one a rank), their driver and cuBLASLt can be used, else "cpu".
// Looked up once for each number. Thread-safe.
struct BackendChoice {
  std::string name;
  std::string reason;  // the device in words, or what is missing
};
const BackendChoice& AutoBackend(int num_devices = 1);

// `name`: "ref" or "cpu" ("cuda" where built in). A cpu backend has passed a small self-test
// against ref. Errors: INVALID_ARGUMENT naming the accepted values; UNAVAILABLE when the device or
// the isa asked for is missing; INTERNAL when the self-test fails.
absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(absl::string_view name,
                                                       WeightDtype dtype,
                                                       const BackendOptions& options);

}  // namespace baton::ops
