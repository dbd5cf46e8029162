#include "engine/runtime/saturation_sample.h"

#include <algorithm>

namespace baton::runtime {
namespace {

constexpr uint8_t kLargestFp8 = 0x7e;  // the code of base::kFp8Max

}  // namespace

void SaturationSample::Look(const kv::KvLayout& layout,
                            const uint8_t* pool,
                            absl::Span<const StepSequence> sequences) {
  const int layer = layer_;
  layer_ = (layer + 1) % layout.num_layers;
  for (const StepSequence& part : sequences) {
    if (part.tokens.empty()) continue;
    const size_t position = part.start + part.tokens.size() - 1;
    const kv::BlockId block = part.block_table[position / kv::kBlockTokens];
    for (int side = 0; side < 2; ++side) {
      for (int head = 0; head < layout.num_kv_heads; ++head) {
        const int rank = head / layout.rank_heads();
        const uint8_t* row =
            pool + layout.BlockOffset(layer, block, rank) +
            layout.RowOffset(side, head % layout.rank_heads(), position % kv::kBlockTokens);
        counts_[side] += std::count_if(row, row + layout.head_dim,
                                       [](uint8_t code) { return (code & 0x7f) == kLargestFp8; });
      }
    }
  }
}

}  // namespace baton::runtime
