#pragma once

// Prefill attention by FlashInfer's FP8 kernel for sm_90a, where a build has it (BATON_FLASHINFER).
// It has never run on a GPU here: it compiles, and what we hand it is tested on the CPU.
//
// Both products are of e4m3 by e4m3, where our own kernel multiplies f16 by f16. What that costs:
//   q   rounded to e4m3: 2^-4 of each element at most, where f16 has 2^-11. Keys have been rounded
//       so already.
//   P   exp(s - max) times 448, rounded to e4m3: 2^-4 of each weight, and 2^-10 / 448 of the
//       largest one, below which a weight is lost; f16 has 2^-11. Their sum is of the weights
//       before the rounding, so a row's weights do not add up to one exactly.
//   sums  a tensor core that multiplies e4m3 keeps about 14 bits of its sums, which nobody carries
//       on in f32 in between.
//   out  bf16; where a linear layer wants e4m3, a step's rows, decode's too, are rounded again.
// So its ids may differ from those of our own kernel, more often than ours differ from the CPU's;
// it has a version of the order of sums of its own (kFlashSumOrderVersion). A query's numbers do
// not depend on the chunk or the batch it comes in: its keys are taken 128 at a time, from its own
// position down to the first, and what a tile brings that it may not see is multiplied by zero.
// There is one difference in what it bears: a value (V) that is NaN spoils the queries before it
// too, as far as they are in one piece of work with a query that sees it.

#include <cuda_runtime.h>

#include <cstdint>

#include "engine/ops/cuda/kernels.h"

namespace baton::ops::cuda {

// Tokens of a cache tile, and queries of one head that are attended together. (Heads that share K
// and V are not.)
inline constexpr int kFlashKeys = 128;
inline constexpr int FlashQueries(int head_dim) { return head_dim == 64 ? 192 : 128; }

// What each multiprocessor does: multiprocessor i the pieces starts[i] .. starts[i + 1] - 1, one
// after the other. A piece is FlashQueries() queries of one head of one sequence. Device memory.
struct FlashWork {
  const int32_t* tiles = nullptr;         // which of the sequence's tiles of queries
  const int32_t* heads = nullptr;         // query head
  const int32_t* query_starts = nullptr;  // of the sequence: its first token in the step
  const int32_t* query_lens = nullptr;
  const int32_t* context_lens = nullptr;
  const int32_t* table_starts = nullptr;  // of the sequence: its first entry in block_tables
  const int32_t* sequences = nullptr;
  const int32_t* starts = nullptr;  // [num_sms + 1]
  int num_sms = 0;                  // of the device, all of them
};

struct FlashPrefillParams {
  const uint8_t* q = nullptr;  // [T][Hq * D] e4m3, times q_scale
  float q_scale = 0;
  void* out = nullptr;  // [T][Hq * D] bf16; rows of tokens in no piece are left as they are
  int num_tokens = 0;   // T
  int num_heads = 0;
  float softmax_scale = 0;
  CacheLayer cache;                       // kFp8, D 64 or 128
  const int32_t* block_tables = nullptr;  // entries of a sequence behind one another
  FlashWork work;
};

// cudaErrorInvalidValue for what the kernel cannot bear, before anything runs.
cudaError_t FlashPrefill(const FlashPrefillParams& params, cudaStream_t stream);

// The part of that which needs no device.
bool FlashPrefillTakes(const FlashPrefillParams& params);

}  // namespace baton::ops::cuda
