// The attention kernels against double precision: formats, ratios of heads, queries, contexts that
// end anywhere, splits that are empty, poison behind every context.

#include <vector>

#include "gtest/gtest.h"
#include "tests/simt/attention_case.h"
#include "tests/simt/schedules.h"

namespace baton::simt {
namespace {

using ops::cuda::CacheFormat;
using ops::cuda::Element;

std::string Describe(const AttentionShape& s) {
  std::string text =
      "Hq=" + std::to_string(s.heads) + " Hkv=" + std::to_string(s.kv_heads) +
      " D=" + std::to_string(s.dim) + " format=" + std::to_string(static_cast<int>(s.format)) +
      " out=" + std::to_string(static_cast<int>(s.out)) + " seed=" + std::to_string(s.seed);
  for (size_t b = 0; b < s.query_lens.size(); ++b)
    text += " " + std::to_string(s.query_lens[b]) + "/" + std::to_string(s.context_lens[b]);
  return text;
}

class AttentionKernels : public ScheduleTest {};
BATON_INSTANTIATE_SCHEDULES(AttentionKernels);

TEST_P(AttentionKernels, Simple) {
  Random random(3);
  for (int i = 0; i < 8; ++i) {
    AttentionShape shape;
    shape.kv_heads = random.Between(1, 2);
    shape.heads = shape.kv_heads * random.Pick({1, 3, 5});
    shape.dim = random.Pick({32, 64, 96, 128, 256});
    shape.format = static_cast<CacheFormat>(i % 4);
    shape.q = random.Between(0, 1) == 0 ? Element::kF16 : Element::kF32;
    shape.out = random.Between(0, 1) == 0 ? Element::kBf16 : Element::kF32;
    shape.query_lens = {1, random.Between(2, 9)};
    shape.context_lens = {random.Between(1, 140), random.Between(9, 80)};
    shape.seed = 50 + i;
    SCOPED_TRACE(Describe(shape));
    AttentionCase attention(shape);
    ASSERT_EQ(ops::cuda::SimpleAttention(attention.params(), attention.max_query_len(), nullptr),
              cudaSuccess);
    attention.Check();
    if (testing::Test::HasFailure()) return;
  }
}

// Runs the kernel twice: the counters must be ready for the next launch.
void RunDecode(const AttentionShape& shape, int num_splits, std::vector<int32_t> chosen = {}) {
  SCOPED_TRACE(Describe(shape) + " splits=" + std::to_string(num_splits));
  AttentionCase attention(shape);
  if (!chosen.empty()) attention.Choose(chosen);
  ops::cuda::DecodeAttentionParams params;
  params.attention = attention.params();
  params.num_splits = num_splits;
  const int chunks =
      ops::cuda::DecodeRowChunks(attention.max_query_len(), shape.heads / shape.kv_heads);
  const int places = params.attention.num_sequences * shape.kv_heads * chunks;
  DeviceArray<float> workspace(ops::cuda::DecodeAttentionWorkspace(params.attention.num_sequences,
                                                                   shape.kv_heads, chunks,
                                                                   num_splits, shape.dim) /
                               sizeof(float));
  DeviceArray<int32_t> counters(std::vector<int32_t>(places, 0));
  params.workspace = workspace.data();
  params.counters = counters.data();
  for (int run = 0; run < 2; ++run) {
    ASSERT_EQ(ops::cuda::DecodeAttention(params, attention.max_query_len(), nullptr), cudaSuccess)
        << LastReport();
    attention.Check();
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_EQ(counters.Get(), std::vector<int32_t>(places, 0));
}

TEST_P(AttentionKernels, DecodeOneQuery) {
  RunDecode({.heads = 8, .kv_heads = 2, .query_lens = {1, 1, 1}, .context_lens = {1, 64, 150}}, 1);
  RunDecode({.heads = 8, .kv_heads = 2, .query_lens = {1, 1, 1}, .context_lens = {1, 65, 190}}, 3);
  RunDecode({.heads = 5,
             .kv_heads = 1,
             .query_lens = {1, 1},
             .context_lens = {130, 17},
             .out = Element::kFp8},
            2);
}

TEST_P(AttentionKernels, VerifySeveralQueries) {
  // 8 queries of 5 heads are 40 rows: two chunks, the second short.
  RunDecode({.heads = 5, .kv_heads = 1, .query_lens = {8, 1}, .context_lens = {100, 30}}, 2);
  RunDecode({.heads = 8, .kv_heads = 2, .query_lens = {4, 3}, .context_lens = {4, 67}}, 1);
  RunDecode({.heads = 16, .kv_heads = 1, .dim = 64, .query_lens = {5}, .context_lens = {70}}, 2);
}

TEST_P(AttentionKernels, DecodeRandom) {
  Random random(11);
  for (int i = 0; i < 12; ++i) {
    AttentionShape shape;
    shape.kv_heads = random.Between(1, 2);
    shape.heads = shape.kv_heads * random.Pick({1, 2, 4, 5, 7, 8});
    shape.dim = random.Pick({64, 128});
    shape.format = random.Between(0, 1) == 0 ? CacheFormat::kFp8 : CacheFormat::kFp8Dynamic;
    shape.out = shape.dim == 128 ? static_cast<Element>(random.Pick({0, 1, 3})) : Element::kBf16;
    for (int b = random.Between(1, 3); b > 0; --b) {
      shape.query_lens.push_back(random.Between(1, 8));
      shape.context_lens.push_back(shape.query_lens.back() + random.Between(0, 140));
    }
    shape.seed = 300 + i;
    RunDecode(shape, random.Between(1, 5));
    if (testing::Test::HasFailure()) return;
  }
}

TEST_P(AttentionKernels, DecodeTakesOnlyTheChosenSequences) {
  RunDecode({.query_lens = {1, 2, 1, 1}, .context_lens = {20, 90, 30, 7}}, 2, {3, 1});
}

TEST_P(AttentionKernels, ANanBehindAQueryDoesNotReachIt) {
  AttentionCase attention({.query_lens = {3}, .context_lens = {40}});
  attention.SpoilValue(0, 39, 5);
  ops::cuda::DecodeAttentionParams params;
  params.attention = attention.params();
  ASSERT_EQ(ops::cuda::DecodeAttention(params, 3, nullptr), cudaSuccess);
  for (int query = 0; query < 2; ++query) {
    for (const float value : attention.OutputRow(0, query, 1)) EXPECT_TRUE(std::isfinite(value));
  }
}

TEST_P(AttentionKernels, Prefill) {
  Random random(17);
  for (int i = 0; i < 8; ++i) {
    AttentionShape shape;
    shape.kv_heads = random.Between(1, 2);
    shape.heads = shape.kv_heads * random.Pick({1, 2, 5});
    shape.dim = random.Pick({64, 128});
    shape.format = i % 3 == 0 ? CacheFormat::kFp8Dynamic : CacheFormat::kFp8;
    shape.out = shape.dim == 128 ? static_cast<Element>(random.Pick({0, 1, 3})) : Element::kBf16;
    for (int b = random.Between(1, 2); b > 0; --b) {
      shape.query_lens.push_back(random.Between(1, 130));
      shape.context_lens.push_back(shape.query_lens.back() + random.Pick({0, 0, 13, 64, 100}));
    }
    shape.seed = 700 + i;
    SCOPED_TRACE(Describe(shape));
    AttentionCase attention(shape);
    std::vector<ops::cuda::PrefillTile> tiles;
    for (size_t b = 0; b < shape.query_lens.size(); ++b) {
      const int rows = shape.query_lens[b] * (shape.heads / shape.kv_heads);
      for (int first = 0; first < rows; first += ops::cuda::kPrefillRows)
        tiles.push_back({static_cast<int32_t>(b), first});
    }
    DeviceArray<ops::cuda::PrefillTile> device_tiles(tiles);
    GetStats() = Stats();
    ASSERT_EQ(ops::cuda::PrefillAttention(attention.params(), device_tiles.data(),
                                          static_cast<int>(tiles.size()), nullptr),
              cudaSuccess);
    attention.Check();
    EXPECT_EQ(GetStats().ldmatrix_conflicts, 0u);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(AttentionLaunchers, RefuseWhatTheKernelsCannotBear) {
  AttentionCase attention({.query_lens = {1}, .context_lens = {3}});
  ops::cuda::DecodeAttentionParams params;
  params.attention = attention.params();
  EXPECT_EQ(ops::cuda::DecodeAttention(params, 9, nullptr), cudaErrorInvalidValue);
  params.num_splits = 2;  // without a workspace
  EXPECT_EQ(ops::cuda::DecodeAttention(params, 1, nullptr), cudaErrorInvalidValue);
  params.num_splits = 1;
  params.attention.cache.format = CacheFormat::kBf16;
  EXPECT_EQ(ops::cuda::DecodeAttention(params, 1, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(ops::cuda::PrefillAttention(params.attention, nullptr, 1, nullptr),
            cudaErrorInvalidValue);
  params.attention.cache.format = CacheFormat::kFp8;
  params.attention.num_heads = 3;
  EXPECT_EQ(ops::cuda::DecodeAttention(params, 1, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(ops::cuda::SimpleAttention(params.attention, 1, nullptr), cudaErrorInvalidValue);
  params.attention.num_heads = 4;
  params.attention.num_sequences = 0;
  GetStats() = Stats();
  EXPECT_EQ(ops::cuda::DecodeAttention(params, 1, nullptr), cudaSuccess);
  EXPECT_EQ(ops::cuda::PrefillAttention(params.attention, nullptr, 0, nullptr), cudaSuccess);
  EXPECT_EQ(GetStats().launches, 0u);
}

}  // namespace
}  // namespace baton::simt
