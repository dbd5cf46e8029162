#include "kvtransfer/transfer_plan.h"

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

// A whole pool cut into two ranks' pools and put together again is the same bytes.
TEST(RangesOfTest, ReshardingIsACopyAlongBothLists) {
  for (KvFormat format : {KvFormat::kFp8, KvFormat::kFp8Dynamic, KvFormat::kF32}) {
    const KvLayout whole = Layout(format, 4);
    const KvLayout half = Layout(format, 2);
    std::vector<uint8_t> source(whole.pool_bytes()), back(whole.pool_bytes(), 0);
    std::mt19937 random(5);
    for (uint8_t& byte : source) byte = static_cast<uint8_t>(random());
    const HandoffShape shape{2 * 64, 0};
    for (uint32_t rank = 0; rank < 2; ++rank) {
      std::vector<uint8_t> shard(half.pool_bytes());
      const UnitRect slice{0, 2, 0, 4, 2 * rank, 2 * rank + 2};
      const auto in_whole = RangesOf(slice, shape, whole, {6, 1});
      const auto in_half = RangesOf(slice, shape, half, {0, 7}, static_cast<int>(2 * rank));
      ASSERT_EQ(Total(in_whole), Total(in_half));
      CopyRanges(source.data(), in_whole, shard.data(), in_half);
      CopyRanges(shard.data(), in_half, back.data(), in_whole);
    }
    for (int layer = 0; layer < 4; ++layer) {
      for (kv::BlockId block : {6, 1}) {
        const size_t offset = whole.BlockOffset(layer, block);
        EXPECT_EQ(std::memcmp(source.data() + offset, back.data() + offset, whole.block_bytes()),
                  0);
      }
    }
  }
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
