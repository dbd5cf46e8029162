#include "engine/ops/cuda/attention_plan.h"

#include <algorithm>

#include "engine/kv/kv_layout.h"

namespace baton::ops::cuda {
namespace {

constexpr int kBlocksPerSm = 2;
// Cache blocks that a split should have at least: below that the merging costs more than it saves.
constexpr int kLeastBlocksPerSplit = 4;
constexpr int kMaxSplits = 64;

}  // namespace

int DecodeSplits(int launches, int max_blocks, int num_sms) {
  const int for_sms = (kBlocksPerSm * num_sms + launches - 1) / launches;
  const int for_context = max_blocks / kLeastBlocksPerSplit;
  const int for_workspace = kMaxPartials / launches;
  return std::max(1, std::min({for_sms, for_context, for_workspace, kMaxSplits}));
}

void AttentionPlan::Fill(const PagedAttentionArgs& args, int num_sms) {
  const int num_sequences = static_cast<int>(args.sequences.size());
  const int heads_per_kv = args.num_heads / args.num_kv_heads;
  query_starts.clear();
  context_lens.clear();
  decode.clear();
  others.clear();
  tiles.clear();
  decode_query_max = others_query_max = max_blocks = 0;
  int decode_blocks = 0;
  for (int b = 0; b < num_sequences; ++b) {
    const SequenceView& sequence = args.sequences[b];
    const int blocks = kv::BlocksFor(sequence.context_len);
    query_starts.push_back(sequence.query_start);
    context_lens.push_back(sequence.context_len);
    max_blocks = std::max(max_blocks, blocks);
    if (sequence.query_len == 0) continue;
    if (sequence.query_len <= kDecodeQueryMax) {
      decode.push_back(b);
      decode_query_max = std::max(decode_query_max, sequence.query_len);
      decode_blocks = std::max(decode_blocks, blocks);
      continue;
    }
    others.push_back(b);
    others_query_max = std::max(others_query_max, sequence.query_len);
    for (int row = 0; row < sequence.query_len * heads_per_kv; row += kPrefillRows)
      tiles.push_back({b, row});
  }
  query_starts.push_back(args.num_tokens);
  block_tables.assign(static_cast<size_t>(num_sequences) * max_blocks, 0);
  for (int b = 0; b < num_sequences; ++b) {
    const SequenceView& sequence = args.sequences[b];
    std::copy_n(sequence.block_table.begin(), kv::BlocksFor(sequence.context_len),
                block_tables.begin() + static_cast<ptrdiff_t>(b) * max_blocks);
  }
  if (decode.empty()) return;
  const int launches = static_cast<int>(decode.size()) * args.num_kv_heads *
                       DecodeRowChunks(decode_query_max, heads_per_kv);
  decode_splits = DecodeSplits(launches, decode_blocks, num_sms);
}

}  // namespace baton::ops::cuda
