#pragma once

// What a hand-over moves: from blocks to units, from units to byte ranges, and the account of what
// has arrived.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/kv/kv_layout.h"

namespace baton::kvtransfer {

// A rectangle of (block of the prompt, layer, KV head of the model): half-open on every side.
struct UnitRect {
  uint32_t block_begin = 0;
  uint32_t block_end = 0;
  uint32_t layer_begin = 0;
  uint32_t layer_end = 0;
  uint32_t head_begin = 0;
  uint32_t head_end = 0;

  friend bool operator==(const UnitRect& a, const UnitRect& b) = default;
};

struct ByteRange {
  size_t offset = 0;
  size_t size = 0;

  friend bool operator==(const ByteRange& a, const ByteRange& b) = default;
};

// The prompt that a hand-over carries.
struct HandoffShape {
  int prompt_tokens = 0;
  int first_missing_block = 0;

  int num_blocks() const { return kv::BlocksFor(prompt_tokens); }
  // Rows of a block that hold tokens: 64 but for the last one.
  int ValidRows(int block) const {
    const int left = prompt_tokens - block * kv::kBlockTokens;
    return left < kv::kBlockTokens ? left : kv::kBlockTokens;
  }
};

// Whether `rect` is not empty and lies within the missing blocks, layers and heads.
// Errors: INVALID_ARGUMENT with the rectangle.
absl::Status CheckRect(const UnitRect& rect, const HandoffShape& shape, const kv::KvLayout& layout);

// The bytes of a rectangle in one pool, in the order in which they travel: layer, block, then
// payload by (K|V, head), then dynamic scales by (K|V, head); of each the valid rows. Neighbours
// are merged, so a full block is one range. `block_table` is the pool's id of each block from
// rect.block_begin on. However many ranks have the heads of a pool, two pools give equal totals in
// the same order, so a transfer is a walk along both lists.
std::vector<ByteRange> RangesOf(const UnitRect& rect,
                                const HandoffShape& shape,
                                const kv::KvLayout& layout,
                                absl::Span<const kv::BlockId> block_table);

size_t BytesOf(const UnitRect& rect, const HandoffShape& shape, const kv::KvLayout& layout);

// Cuts a rectangle by heads, so that each part lies with one rank on either side: one part for each
// (rank of `from`, rank of `to`) that share heads of it.
std::vector<UnitRect> SplitByRanks(const UnitRect& rect,
                                   const kv::KvLayout& from,
                                   const kv::KvLayout& to);

// Cuts a rectangle into rectangles of at most `max_bytes` (but at least one block of one layer):
// first by layers, then by blocks. Small units bound the time until a revoked sender is quiet.
std::vector<UnitRect> SplitRect(const UnitRect& rect,
                                const HandoffShape& shape,
                                const kv::KvLayout& layout,
                                size_t max_bytes);

// Copies along two lists of ranges with equal totals.
void CopyRanges(const uint8_t* from_base,
                absl::Span<const ByteRange> from,
                uint8_t* to_base,
                absl::Span<const ByteRange> to);

// XXH3-64 of the bytes of `ranges`, in order.
uint64_t ChecksumOf(const uint8_t* base, absl::Span<const ByteRange> ranges);

// Which (missing block, layer, head) have arrived. Each may arrive once.
class Coverage {
 public:
  // At most 64 heads.
  Coverage(const HandoffShape& shape, int num_layers, int num_heads);

  // `rect` has passed CheckRect. Errors: DATA_LOSS when any part of it is here already; nothing is
  // added then.
  absl::Status Add(const UnitRect& rect);
  bool complete() const { return missing_ == 0; }
  // (block, layer, head) triples still missing.
  uint64_t missing() const { return missing_; }

 private:
  uint64_t& Cell(uint32_t block, uint32_t layer) {
    return cells_[static_cast<size_t>(block - first_block_) * num_layers_ + layer];
  }

  uint32_t first_block_;
  uint32_t num_layers_;
  uint64_t missing_;
  std::vector<uint64_t> cells_;  // by block and layer: one bit a head
};

}  // namespace baton::kvtransfer
