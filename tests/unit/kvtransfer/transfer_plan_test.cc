#include "kvtransfer/transfer_plan.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace baton::kvtransfer {
namespace {

using kv::KvFormat;
using kv::KvLayout;

KvLayout Layout(KvFormat format, int heads = 2, int num_blocks = 8) {
  return {.num_layers = 4,
          .num_kv_heads = heads,
          .head_dim = 16,
          .num_blocks = num_blocks,
          .format = format};
}

size_t Total(const std::vector<ByteRange>& ranges) {
  size_t total = 0;
  for (const ByteRange& range : ranges) total += range.size;
  return total;
}

TEST(RangesOfTest, FullBlockIsOneRangeInEveryFormat) {
  for (KvFormat format : {KvFormat::kFp8, KvFormat::kFp8Dynamic, KvFormat::kBf16, KvFormat::kF32}) {
    const KvLayout layout = Layout(format);
    const auto ranges = RangesOf({0, 1, 2, 3, 0, 2}, {64, 0}, layout, {5});
    ASSERT_EQ(ranges.size(), 1u);
    EXPECT_EQ(ranges[0], (ByteRange{layout.BlockOffset(2, 5), layout.block_bytes()}));
  }
}

TEST(RangesOfTest, NeighbouringBlocksAreOneRange) {
  const KvLayout layout = Layout(KvFormat::kFp8);
  EXPECT_EQ(RangesOf({0, 3, 0, 1, 0, 2}, {192, 0}, layout, {2, 3, 4}).size(), 1u);
  EXPECT_EQ(RangesOf({0, 3, 0, 1, 0, 2}, {192, 0}, layout, {2, 4, 3}).size(), 3u);
}

TEST(RangesOfTest, LastBlockShipsItsValidRowsAndScalesOnly) {
  const KvLayout layout = Layout(KvFormat::kFp8Dynamic);
  const auto ranges = RangesOf({1, 2, 0, 1, 0, 2}, {64 + 5, 0}, layout, {3});
  std::vector<ByteRange> want;
  const size_t base = layout.BlockOffset(0, 3);
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < 2; ++head)
      want.push_back({base + layout.RowOffset(side, head, 0), 5 * 16});
  }
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < 2; ++head)
      want.push_back({base + layout.ScaleOffset(side, head, 0), 5 * 4});
  }
  EXPECT_EQ(ranges, want);
}

TEST(RangesOfTest, HeadSliceIsTwoRangesOfAFullBlock) {
  const KvLayout layout = Layout(KvFormat::kFp8, 4);
  const auto ranges = RangesOf({0, 1, 0, 1, 2, 4}, {64, 0}, layout, {0});
  ASSERT_EQ(ranges.size(), 2u);
  EXPECT_EQ(ranges[0], (ByteRange{layout.RowOffset(0, 2, 0), 2 * layout.head_bytes()}));
  EXPECT_EQ(ranges[1], (ByteRange{layout.RowOffset(1, 2, 0), 2 * layout.head_bytes()}));
}

// The byte of a pool at (layer, block, K|V, head of the model, row, index), and of a scale.
size_t At(const KvLayout& layout, int layer, kv::BlockId block, int side, int head, int row) {
  return layout.BlockOffset(layer, block, head / layout.rank_heads()) +
         layout.RowOffset(side, head % layout.rank_heads(), row);
}
size_t ScaleAt(const KvLayout& layout, int layer, kv::BlockId block, int side, int head, int row) {
  return layout.BlockOffset(layer, block, head / layout.rank_heads()) +
         layout.ScaleOffset(side, head % layout.rank_heads(), row);
}

TEST(RangesOfTest, ARankHasItsHeadsInAPoolOfItsOwn) {
  KvLayout layout = Layout(KvFormat::kFp8Dynamic, 4);
  layout.tp = 2;
  const KvLayout rank = layout.OfRank();
  EXPECT_EQ(rank.num_kv_heads, 2);
  EXPECT_EQ(2 * rank.pool_bytes(), layout.pool_bytes());
  // A full block is one range in each.
  const auto ranges = RangesOf({0, 1, 2, 3, 0, 4}, {64, 0}, layout, {5});
  std::vector<ByteRange> payload, scales;
  for (int side = 0; side < 2; ++side) {
    for (int r = 0; r < 2; ++r) {
      const size_t base = r * rank.pool_bytes() + rank.BlockOffset(2, 5);
      payload.push_back({base + rank.RowOffset(side, 0, 0), 2 * rank.head_bytes()});
      scales.push_back({base + rank.ScaleOffset(side, 0, 0), 2 * 64 * sizeof(float)});
    }
  }
  payload.insert(payload.end(), scales.begin(), scales.end());
  EXPECT_EQ(ranges, payload);
  const auto slice = RangesOf({0, 1, 2, 3, 2, 4}, {64, 0}, layout, {5});
  EXPECT_EQ(
      slice,
      (std::vector<ByteRange>{{rank.pool_bytes() + rank.BlockOffset(2, 5), rank.block_bytes()}}));
}

// From any number of ranks to any, over any number of heads, rows and formats: every value of the
// model comes to where the other side looks for it, and nothing else is touched.
TEST(RangesOfTest, ReshardingIsACopyAlongBothLists) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    const auto format = static_cast<KvFormat>(random() % 4);
    const int heads = 2 * (1 + static_cast<int>(random() % 6));
    KvLayout from = Layout(format, heads), to = Layout(format, heads, 11);
    from.tp = 1 + static_cast<int>(random() % 2);
    to.tp = 1 + static_cast<int>(random() % 2);
    const int tokens = 65 + static_cast<int>(random() % 64);
    const HandoffShape shape{tokens, 0};
    const std::vector<kv::BlockId> ours = {6, 1}, theirs = {9, 10};
    std::vector<uint8_t> source(from.pool_bytes()), target(to.pool_bytes(), 0xee);
    for (uint8_t& byte : source) byte = static_cast<uint8_t>(random() % 0xee);  // 0xee: untouched
    const UnitRect all{0, 2, 0, 4, 0, static_cast<uint32_t>(heads)};
    Coverage coverage(shape, 4, heads);
    for (const UnitRect& slice : SplitByRanks(all, from, to)) {
      ASSERT_TRUE(coverage.Add(slice).ok());
      for (const KvLayout& side : {from, to}) {  // of one rank here and one there
        const auto rank_heads = static_cast<uint32_t>(side.rank_heads());
        ASSERT_EQ(slice.head_begin / rank_heads, (slice.head_end - 1) / rank_heads);
      }
      const auto in_from = RangesOf(slice, shape, from, ours);
      const auto in_to = RangesOf(slice, shape, to, theirs);
      ASSERT_EQ(Total(in_from), Total(in_to));
      ASSERT_EQ(Total(in_from), BytesOf(slice, shape, from));
      CopyRanges(source.data(), in_from, target.data(), in_to);
    }
    ASSERT_TRUE(coverage.complete());
    size_t moved = 0;
    for (int i = 0; i < 4 * 2 * 2 * heads * 64; ++i) {
      const int row = i % 64, head = i / 64 % heads, side = i / 64 / heads % 2;
      const int block = i / 64 / heads / 2 % 2, layer = i / 64 / heads / 4;
      if (row >= shape.ValidRows(block)) continue;
      ASSERT_EQ(std::memcmp(source.data() + At(from, layer, ours[block], side, head, row),
                            target.data() + At(to, layer, theirs[block], side, head, row),
                            from.row_bytes()),
                0);
      moved += from.row_bytes();
      if (from.scale_bytes() == 0) continue;
      ASSERT_EQ(std::memcmp(source.data() + ScaleAt(from, layer, ours[block], side, head, row),
                            target.data() + ScaleAt(to, layer, theirs[block], side, head, row),
                            sizeof(float)),
                0);
      moved += sizeof(float);
    }
    const auto untouched =
        static_cast<size_t>(std::count(target.begin(), target.end(), uint8_t{0xee}));
    ASSERT_EQ(untouched + moved, target.size());
  }
}

TEST(SplitByRanksTest, OneRankOnBothSidesIsNotCut) {
  const KvLayout layout = Layout(KvFormat::kFp8, 4);
  const UnitRect rect{1, 3, 0, 4, 0, 4};
  EXPECT_EQ(SplitByRanks(rect, layout, layout), (std::vector<UnitRect>{rect}));
}

// Any cut of any hand-over covers it once, with the bytes that BytesOf says.
TEST(SplitRectTest, PartsCoverTheWholeOnceAndRespectTheLimit) {
  std::mt19937 random(9);
  for (int round = 0; round < 300; ++round) {
    const KvLayout layout = Layout(static_cast<KvFormat>(random() % 4));
    const int prompt_tokens = 1 + static_cast<int>(random() % 500);
    HandoffShape shape{prompt_tokens, 0};
    shape.first_missing_block =
        static_cast<int>(random() % static_cast<uint32_t>(shape.num_blocks()));
    const UnitRect all{static_cast<uint32_t>(shape.first_missing_block),
                       static_cast<uint32_t>(shape.num_blocks()),
                       0,
                       4,
                       0,
                       2};
    ASSERT_TRUE(CheckRect(all, shape, layout).ok());
    const std::vector<kv::BlockId> table(8, 0);
    const size_t limit = 1 + random() % (3 * layout.layer_bytes());
    Coverage coverage(shape, 4, 2);
    size_t bytes = 0;
    for (const UnitRect& part : SplitRect(all, shape, layout, limit)) {
      ASSERT_TRUE(CheckRect(part, shape, layout).ok());
      ASSERT_TRUE(coverage.Add(part).ok());
      const size_t part_bytes = BytesOf(part, shape, layout);
      ASSERT_EQ(part_bytes, Total(RangesOf(part, shape, layout, table)));
      const bool smallest =
          part.layer_end - part.layer_begin == 1 && part.block_end - part.block_begin == 1;
      ASSERT_TRUE(part_bytes <= limit || smallest) << part_bytes << " > " << limit;
      bytes += part_bytes;
    }
    ASSERT_TRUE(coverage.complete());
    ASSERT_EQ(bytes, BytesOf(all, shape, layout));
  }
}

TEST(CheckRectTest, EverythingOutsideIsRefused) {
  const KvLayout layout = Layout(KvFormat::kFp8);
  const HandoffShape shape{130, 1};
  EXPECT_TRUE(CheckRect({1, 3, 0, 4, 0, 2}, shape, layout).ok());
  const UnitRect wrong[] = {
      {0, 3, 0, 4, 0, 2}, {1, 4, 0, 4, 0, 2}, {2, 2, 0, 4, 0, 2},
      {3, 1, 0, 4, 0, 2}, {1, 3, 0, 5, 0, 2}, {1, 3, 2, 2, 0, 2},
      {1, 3, 0, 4, 0, 3}, {1, 3, 0, 4, 1, 1}, {1, 0xffffffff, 0, 0xffffffff, 0, 0xffffffff}};
  for (const UnitRect& rect : wrong) {
    EXPECT_EQ(CheckRect(rect, shape, layout).code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(CoverageTest, OverlapIsDataLossAndAddsNothing) {
  Coverage coverage({128, 0}, 2, 4);
  EXPECT_TRUE(coverage.Add({0, 1, 0, 2, 0, 4}).ok());
  const uint64_t missing = coverage.missing();
  EXPECT_EQ(coverage.Add({0, 2, 1, 2, 3, 4}).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(coverage.missing(), missing);
  EXPECT_TRUE(coverage.Add({1, 2, 0, 2, 0, 1}).ok());
  EXPECT_FALSE(coverage.complete());
  EXPECT_TRUE(coverage.Add({1, 2, 0, 2, 1, 4}).ok());
  EXPECT_TRUE(coverage.complete());
}

TEST(CoverageTest, SixtyFourHeadsFitAndNothingMissingIsComplete) {
  Coverage coverage({64, 0}, 1, 64);
  EXPECT_TRUE(coverage.Add({0, 1, 0, 1, 0, 64}).ok());
  EXPECT_TRUE(coverage.complete());
  EXPECT_TRUE(Coverage({64, 1}, 1, 64).complete());
}

TEST(ChecksumTest, DependsOnOrderAndEveryByte) {
  std::vector<uint8_t> bytes(256);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i);
  const uint64_t sum = ChecksumOf(bytes.data(), {{0, 16}, {64, 16}});
  EXPECT_EQ(sum, ChecksumOf(bytes.data(), {{0, 8}, {8, 8}, {64, 16}}));
  EXPECT_NE(sum, ChecksumOf(bytes.data(), {{64, 16}, {0, 16}}));
  bytes[70] ^= 1;
  EXPECT_NE(sum, ChecksumOf(bytes.data(), {{0, 16}, {64, 16}}));
}

}  // namespace
}  // namespace baton::kvtransfer
