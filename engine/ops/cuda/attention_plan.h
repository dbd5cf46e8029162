#pragma once

// Which kernel attends which sequences of a step, and the arrays they read.

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "engine/ops/backend.h"
#include "engine/ops/cuda/kernels.h"

namespace baton::ops::cuda {

// Most (sequence, KV head, row chunk, split) quadruples of one launch: sizes the workspace.
inline constexpr int kMaxPartials = 1024;

// Into how many splits a context of `max_blocks` cache blocks is cut when `launches` (sequence, KV
// head, row chunk) triples are attended.
int DecodeSplits(int launches, int max_blocks, int num_sms);

// Reused from step to step; its vectors keep their memory. Engine thread only.
struct AttentionPlan {
  std::vector<int32_t> query_starts;  // [B + 1]
  std::vector<int32_t> context_lens;  // [B]
  std::vector<int32_t> block_tables;  // [B][max_blocks]
  int max_blocks = 0;
  std::vector<int32_t> decode;  // sequences with few queries
  int decode_query_max = 0;     // most queries of one of them
  int decode_splits = 1;
  std::vector<PrefillTile> tiles;  // of the others
  std::vector<int32_t> others;     // the others, for SimpleAttention
  int others_query_max = 0;

  // `num_sms`: of the device; the context is cut until two blocks a multiprocessor are busy.
  void Fill(const PagedAttentionArgs& args, int num_sms);
};

}  // namespace baton::ops::cuda
