#include "kvtransfer/transfer_plan.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"

namespace baton::kvtransfer {
namespace {

void Append(size_t offset, size_t size, std::vector<ByteRange>* ranges) {
  if (!ranges->empty() && ranges->back().offset + ranges->back().size == offset) {
    ranges->back().size += size;
  } else {
    ranges->push_back({offset, size});
  }
}

// One block in one layer.
void AppendBlock(const UnitRect& rect,
                 int rows,
                 const kv::KvLayout& layout,
                 int layer,
                 kv::BlockId block,
                 std::vector<ByteRange>* ranges) {
  const uint32_t rank_heads = static_cast<uint32_t>(layout.rank_heads());
  const auto for_each_head = [&](const auto& append) {
    for (int side = 0; side < 2; ++side) {
      for (uint32_t head = rect.head_begin; head < rect.head_end; ++head) {
        const size_t base = layout.BlockOffset(layer, block, static_cast<int>(head / rank_heads));
        append(base, side, static_cast<int>(head % rank_heads));
      }
    }
  };
  for_each_head([&](size_t base, int side, int head) {
    Append(base + layout.RowOffset(side, head, 0), static_cast<size_t>(rows) * layout.row_bytes(),
           ranges);
  });
  if (layout.scale_bytes() == 0) return;
  for_each_head([&](size_t base, int side, int head) {
    Append(base + layout.ScaleOffset(side, head, 0), static_cast<size_t>(rows) * sizeof(float),
           ranges);
  });
}

// Bytes of one token in one layer and head, K and V.
size_t TokenHeadBytes(const kv::KvLayout& layout) {
  return 2 * (layout.row_bytes() + (layout.scale_bytes() == 0 ? 0 : sizeof(float)));
}

}  // namespace

absl::Status CheckRect(const UnitRect& rect,
                       const HandoffShape& shape,
                       const kv::KvLayout& layout) {
  const bool right = rect.block_begin < rect.block_end && rect.layer_begin < rect.layer_end &&
                     rect.head_begin < rect.head_end &&
                     rect.block_begin >= static_cast<uint32_t>(shape.first_missing_block) &&
                     rect.block_end <= static_cast<uint32_t>(shape.num_blocks()) &&
                     rect.layer_end <= static_cast<uint32_t>(layout.num_layers) &&
                     rect.head_end <= static_cast<uint32_t>(layout.num_kv_heads);
  if (right) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("unit outside of its hand-over: blocks=", rect.block_begin, "-", rect.block_end,
                   " of ", shape.first_missing_block, "-", shape.num_blocks(),
                   " layers=", rect.layer_begin, "-", rect.layer_end, " of ", layout.num_layers,
                   " heads=", rect.head_begin, "-", rect.head_end, " of ", layout.num_kv_heads));
}

std::vector<ByteRange> RangesOf(const UnitRect& rect,
                                const HandoffShape& shape,
                                const kv::KvLayout& layout,
                                absl::Span<const kv::BlockId> block_table) {
  std::vector<ByteRange> ranges;
  for (uint32_t layer = rect.layer_begin; layer < rect.layer_end; ++layer) {
    for (uint32_t block = rect.block_begin; block < rect.block_end; ++block) {
      const kv::BlockId id = block_table[block - rect.block_begin];
      AppendBlock(rect, shape.ValidRows(static_cast<int>(block)), layout, static_cast<int>(layer),
                  id, &ranges);
    }
  }
  return ranges;
}

size_t BytesOf(const UnitRect& rect, const HandoffShape& shape, const kv::KvLayout& layout) {
  const int first_token = static_cast<int>(rect.block_begin) * kv::kBlockTokens;
  const int last_token =
      std::min(static_cast<int>(rect.block_end) * kv::kBlockTokens, shape.prompt_tokens);
  const size_t tokens = static_cast<size_t>(std::max(0, last_token - first_token));
  return tokens * (rect.layer_end - rect.layer_begin) * (rect.head_end - rect.head_begin) *
         TokenHeadBytes(layout);
}

std::vector<UnitRect> SplitByRanks(const UnitRect& rect,
                                   const kv::KvLayout& from,
                                   const kv::KvLayout& to) {
  const auto step = static_cast<uint32_t>(std::min(from.rank_heads(), to.rank_heads()));
  std::vector<UnitRect> parts;
  for (uint32_t head = rect.head_begin / step * step; head < rect.head_end; head += step) {
    UnitRect part = rect;
    part.head_begin = std::max(rect.head_begin, head);
    part.head_end = std::min(rect.head_end, head + step);
    parts.push_back(part);
  }
  return parts;
}

std::vector<UnitRect> SplitRect(const UnitRect& rect,
                                const HandoffShape& shape,
                                const kv::KvLayout& layout,
                                size_t max_bytes) {
  UnitRect one_layer = rect;
  one_layer.layer_end = rect.layer_begin + 1;
  const size_t layer_bytes = std::max<size_t>(1, BytesOf(one_layer, shape, layout));
  const size_t block_bytes =
      kv::kBlockTokens * (rect.head_end - rect.head_begin) * TokenHeadBytes(layout);
  const uint32_t layers = static_cast<uint32_t>(std::max<size_t>(1, max_bytes / layer_bytes));
  const uint32_t blocks = layers > 1 || layer_bytes <= max_bytes
                              ? rect.block_end - rect.block_begin
                              : static_cast<uint32_t>(std::max<size_t>(1, max_bytes / block_bytes));
  std::vector<UnitRect> parts;
  for (uint32_t layer = rect.layer_begin; layer < rect.layer_end; layer += layers) {
    for (uint32_t block = rect.block_begin; block < rect.block_end; block += blocks) {
      UnitRect part = rect;
      part.layer_begin = layer;
      part.layer_end = std::min(layer + layers, rect.layer_end);
      part.block_begin = block;
      part.block_end = std::min(block + blocks, rect.block_end);
      parts.push_back(part);
    }
  }
  return parts;
}

void CopyRanges(const uint8_t* from_base,
                absl::Span<const ByteRange> from,
                uint8_t* to_base,
                absl::Span<const ByteRange> to) {
  size_t from_index = 0, to_index = 0, from_done = 0, to_done = 0;
  while (from_index < from.size() && to_index < to.size()) {
    const ByteRange& source = from[from_index];
    const ByteRange& target = to[to_index];
    const size_t size = std::min(source.size - from_done, target.size - to_done);
    std::memcpy(to_base + target.offset + to_done, from_base + source.offset + from_done, size);
    from_done += size;
    to_done += size;
    if (from_done == source.size) ++from_index, from_done = 0;
    if (to_done == target.size) ++to_index, to_done = 0;
  }
  BATON_CHECK(from_index == from.size() && to_index == to.size(), "ranges of different totals");
}

uint64_t ChecksumOf(const uint8_t* base, absl::Span<const ByteRange> ranges) {
  XXH3_state_t* state = XXH3_createState();
  XXH3_64bits_reset(state);
  for (const ByteRange& range : ranges) XXH3_64bits_update(state, base + range.offset, range.size);
  const uint64_t sum = XXH3_64bits_digest(state);
  XXH3_freeState(state);
  return sum;
}

Coverage::Coverage(const HandoffShape& shape, int num_layers, int num_heads)
    : first_block_(static_cast<uint32_t>(shape.first_missing_block)),
      num_layers_(static_cast<uint32_t>(num_layers)) {
  BATON_CHECK(num_heads > 0 && num_heads <= 64);
  const size_t cells =
      static_cast<size_t>(std::max(0, shape.num_blocks() - shape.first_missing_block)) *
      num_layers_;
  cells_.assign(cells, 0);
  missing_ = cells * static_cast<uint64_t>(num_heads);
}

absl::Status Coverage::Add(const UnitRect& rect) {
  const uint32_t heads = rect.head_end - rect.head_begin;
  const uint64_t mask = (heads == 64 ? ~uint64_t{0} : (uint64_t{1} << heads) - 1)
                        << rect.head_begin;
  for (uint32_t block = rect.block_begin; block < rect.block_end; ++block) {
    for (uint32_t layer = rect.layer_begin; layer < rect.layer_end; ++layer) {
      if ((Cell(block, layer) & mask) == 0) continue;
      return absl::DataLossError(
          absl::StrCat("unit arrived twice: block=", block, " layer=", layer));
    }
  }
  for (uint32_t block = rect.block_begin; block < rect.block_end; ++block) {
    for (uint32_t layer = rect.layer_begin; layer < rect.layer_end; ++layer)
      Cell(block, layer) |= mask;
  }
  missing_ -= static_cast<uint64_t>(rect.block_end - rect.block_begin) *
              (rect.layer_end - rect.layer_begin) * heads;
  return absl::OkStatus();
}

}  // namespace baton::kvtransfer
