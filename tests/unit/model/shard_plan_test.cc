#include "engine/model/shard_plan.h"

#include "engine/ops/validate.h"
#include "gtest/gtest.h"

namespace baton::model {
namespace {

ModelConfig Config(int num_heads, int num_kv_heads, int head_dim, int ffn) {
  ModelConfig config;
  config.num_heads = num_heads;
  config.num_kv_heads = num_kv_heads;
  config.head_dim = head_dim;
  config.ffn = ffn;
  return config;
}

constexpr ops::WeightDtype kDtypes[] = {ops::WeightDtype::kF32, ops::WeightDtype::kBf16,
                                        ops::WeightDtype::kInt8, ops::WeightDtype::kQ4};

void ExpectCut(const ShardRange& low, const ShardRange& high, int64_t count) {
  EXPECT_EQ(low.begin, 0);
  EXPECT_LT(low.begin, low.end);
  EXPECT_EQ(low.end, high.begin);
  EXPECT_LT(high.begin, high.end);
  EXPECT_EQ(high.end, count);
}

// Whatever the shape: two ranks have everything once, query heads stay with their KV head, and
// both cuts along K are those of the canonical order; or the shape is refused.
TEST(ShardPlanTest, RanksHaveEverythingOnceAndCutWhereSumsAreCut) {
  int made = 0, refused = 0;
  for (const ops::WeightDtype dtype : kDtypes) {
    for (int kv_heads = 1; kv_heads <= 16; ++kv_heads) {
      for (const int group : {1, 2, 4, 5, 7}) {
        for (const int head_dim : {16, 32, 48, 64, 96, 128}) {
          for (const int ffn : {32, 64, 96, 100, 1536, 8704, 12800}) {
            const ModelConfig config = Config(kv_heads * group, kv_heads, head_dim, ffn);
            const auto low = ShardPlan::Make(config, dtype, 2, 0);
            const auto high = ShardPlan::Make(config, dtype, 2, 1);
            ASSERT_EQ(low.ok(), high.ok());
            const int width = config.num_heads * head_dim;
            const bool possible = kv_heads % 2 == 0 && ops::SplitK(width, dtype) == width / 2 &&
                                  ops::SplitK(ffn, dtype) < ffn;
            ASSERT_EQ(low.ok(), possible) << low.status();
            ++(possible ? made : refused);
            if (!possible) continue;
            ExpectCut(low->kv_heads, high->kv_heads, kv_heads);
            ExpectCut(low->heads, high->heads, config.num_heads);
            ExpectCut(low->ffn, high->ffn, ffn);
            EXPECT_EQ(low->heads.size(), low->kv_heads.size() * group);
            EXPECT_EQ(low->kv_heads.size(), high->kv_heads.size());
            EXPECT_EQ(low->ColsOf(TensorRole::kO, width).end, ops::SplitK(width, dtype));
            EXPECT_EQ(low->ColsOf(TensorRole::kDown, ffn).end, ops::SplitK(ffn, dtype));
          }
        }
      }
    }
  }
  EXPECT_GT(made, 1000);
  EXPECT_GT(refused, 1000);
}

TEST(ShardPlanTest, OneRankHasEverything) {
  const ModelConfig config = Config(5, 1, 64, 112);
  const auto plan = ShardPlan::Make(config, ops::WeightDtype::kBf16, 1, 0);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const ModelConfig ours = plan->ConfigOf(config);
  EXPECT_EQ(ours.num_heads, 5);
  EXPECT_EQ(ours.num_kv_heads, 1);
  EXPECT_EQ(ours.ffn, 112);
  EXPECT_EQ(plan->RowsOf(TensorRole::kQ, 320).end, 320);
  EXPECT_EQ(plan->ColsOf(TensorRole::kO, 320).end, 320);
}

// The rows of each tensor of rank 1 of Qwen3-8B.
TEST(ShardPlanTest, CutsRowsOfQkvGateUpAndColumnsOfODown) {
  const auto plan = ShardPlan::Make(Config(32, 8, 128, 12288), ops::WeightDtype::kBf16, 2, 1);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->RowsOf(TensorRole::kQ, 4096).begin, 2048);
  EXPECT_EQ(plan->RowsOf(TensorRole::kQBias, 4096).begin, 2048);
  EXPECT_EQ(plan->RowsOf(TensorRole::kK, 1024).begin, 512);
  EXPECT_EQ(plan->RowsOf(TensorRole::kVBias, 1024).begin, 512);
  EXPECT_EQ(plan->RowsOf(TensorRole::kGate, 12288).begin, 6144);
  EXPECT_EQ(plan->RowsOf(TensorRole::kUp, 12288).end, 12288);
  EXPECT_EQ(plan->RowsOf(TensorRole::kO, 4096).size(), 4096);
  EXPECT_EQ(plan->ColsOf(TensorRole::kO, 4096).begin, 2048);
  EXPECT_EQ(plan->ColsOf(TensorRole::kDown, 12288).begin, 6144);
  EXPECT_EQ(plan->ColsOf(TensorRole::kQ, 4096).size(), 4096);
  EXPECT_EQ(plan->RowsOf(TensorRole::kEmbed, 151936).size(), 151936);
}

struct ShardRefusal {
  ModelConfig config;
  ops::WeightDtype dtype;
  int tp;
  const char* message;
};

TEST(ShardPlanTest, RefusesByName) {
  const ShardRefusal refusals[] = {
      {Config(6, 3, 64, 256), ops::WeightDtype::kBf16, 2, "tp=2: num_kv_heads=3 is not divisible"},
      {Config(4, 2, 64, 256), ops::WeightDtype::kBf16, 3, "tp=3: want 1 or 2"},
      {Config(4, 2, 64, 256), ops::WeightDtype::kBf16, 0, "tp=0: want 1 or 2"},
      {Config(2, 2, 32, 256), ops::WeightDtype::kInt8, 2,
       "tp=2: num_heads=2 head_dim=32: half of the heads are 32 columns, and int8 sums are cut at "
       "64"},
      {Config(4, 2, 64, 32), ops::WeightDtype::kBf16, 2,
       "tp=2: intermediate_size=32 is too small to be cut"},
  };
  for (const ShardRefusal& refusal : refusals) {
    const absl::Status status =
        ShardPlan::Make(refusal.config, refusal.dtype, refusal.tp, 0).status();
    EXPECT_EQ(status, absl::InvalidArgumentError(refusal.message));
  }
}

}  // namespace
}  // namespace baton::model
