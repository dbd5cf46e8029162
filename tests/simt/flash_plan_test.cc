// Who computes what of FlashInfer's prefill, and the scale of its queries.

#include "engine/ops/cuda/flash_plan.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "tests/simt/random_values.h"

namespace baton::simt {
namespace {

using ops::cuda::AttentionPlan;
using ops::cuda::FlashPlan;
using ops::cuda::FlashQueries;
using ops::cuda::FlashQueryScale;
using ops::cuda::FlashWork;
using ops::cuda::kFlashKeys;

// Sequences of more than eight queries are prefill's.
AttentionPlan PlanOf(const std::vector<int>& query_lens, const std::vector<int>& context_lens) {
  AttentionPlan plan;
  plan.query_starts = {0};
  for (size_t b = 0; b < query_lens.size(); ++b) {
    plan.query_starts.push_back(plan.query_starts.back() + query_lens[b]);
    plan.context_lens.push_back(context_lens[b]);
    plan.max_blocks = std::max(plan.max_blocks, kv::BlocksFor(context_lens[b]));
    if (query_lens[b] > ops::cuda::kDecodeQueryMax) plan.others.push_back(static_cast<int>(b));
  }
  return plan;
}

struct Loads {
  int64_t least, most, longest_piece;
};

// Checks every piece, that each there must be is there once, and says how the work is dealt out.
Loads Check(const AttentionPlan& step, const FlashPlan& plan, int heads, int dim, int num_sms) {
  const FlashWork work = plan.At(plan.words().data());
  EXPECT_EQ(work.starts + num_sms + 1, plan.words().data() + plan.words().size());
  std::map<std::tuple<int, int, int>, int> seen;  // sequence, head, tile
  Loads loads = {INT64_MAX, 0, 0};
  EXPECT_EQ(work.starts[0], 0);
  for (int sm = 0; sm < num_sms; ++sm) {
    int64_t load = 0;
    for (int piece = work.starts[sm]; piece < work.starts[sm + 1]; ++piece) {
      const int b = work.sequences[piece], tile = work.tiles[piece];
      ++seen[{b, work.heads[piece], tile}];
      EXPECT_EQ(work.query_starts[piece], step.query_starts[b]);
      EXPECT_EQ(work.query_lens[piece], step.query_starts[b + 1] - step.query_starts[b]);
      EXPECT_EQ(work.context_lens[piece], step.context_lens[b]);
      EXPECT_EQ(work.table_starts[piece], b * step.max_blocks);
      const int end = std::min((tile + 1) * FlashQueries(dim), work.query_lens[piece]);
      const int visible = work.context_lens[piece] - work.query_lens[piece] + end;
      const int64_t cost = 1 + (visible + kFlashKeys - 1) / kFlashKeys;
      load += cost;
      loads.longest_piece = std::max(loads.longest_piece, cost);
    }
    loads.least = std::min(loads.least, load);
    loads.most = std::max(loads.most, load);
  }
  size_t pieces = 0;
  for (const int b : step.others) {
    const int length = step.query_starts[b + 1] - step.query_starts[b];
    const int tiles = (length + FlashQueries(dim) - 1) / FlashQueries(dim);
    pieces += static_cast<size_t>(tiles) * heads;
    for (int head = 0; head < heads; ++head) {
      for (int tile = 0; tile < tiles; ++tile)
        EXPECT_EQ((seen[{b, head, tile}]), 1) << b << " " << head << " " << tile;
    }
  }
  EXPECT_EQ(static_cast<size_t>(work.starts[num_sms]), pieces);
  return loads;
}

TEST(FlashPlan, DealsEveryPieceOutOnceAndEvenly) {
  Random random(1);
  FlashPlan plan;
  for (int i = 0; i < 50; ++i) {
    const int kv_heads = random.Pick({1, 2, 8}), heads = kv_heads * random.Pick({1, 4, 5});
    const int dim = random.Pick({64, 128}), num_sms = random.Pick({1, 4, 132});
    std::vector<int> queries, contexts;
    for (int b = random.Between(1, 5); b > 0; --b) {
      queries.push_back(random.Pick({0, 1, 8, 9, 128, 129, 500, 2048}));
      contexts.push_back(queries.back() + random.Pick({0, 1, 64, 1000, 9000}));
    }
    const AttentionPlan step = PlanOf(queries, contexts);
    plan.Fill(step, heads, kv_heads, dim, num_sms);
    const Loads loads = Check(step, plan, heads, dim, num_sms);
    EXPECT_LE(loads.most - loads.least, loads.longest_piece);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(FlashPlan, AStepWithoutPrefillHasNoWork) {
  FlashPlan plan;
  plan.Fill(PlanOf({1, 8}, {70, 8}), 4, 2, 128, 3);
  EXPECT_EQ(plan.words().size(), 4u);
  EXPECT_EQ(plan.At(plan.words().data()).starts[3], 0);
}

// The layers of a step have one plan; the next step has its own.
TEST(FlashPlan, IsMadeAnewWhenTheStepIsAnother) {
  FlashPlan plan;
  const auto planned = [&](const AttentionPlan& step, int sms) {
    plan.Fill(step, 4, 2, 128, sms);
    Check(step, plan, 4, 128, sms);
    return std::vector<int32_t>(plan.words().begin(), plan.words().end());
  };
  const std::vector<int32_t> first = planned(PlanOf({300}, {300}), 4);
  EXPECT_EQ(planned(PlanOf({300}, {300}), 4), first);
  EXPECT_NE(planned(PlanOf({300}, {364}), 4), first);
  EXPECT_NE(planned(PlanOf({299}, {300}), 4), first);
  EXPECT_NE(planned(PlanOf({300}, {300}), 5), first);
  EXPECT_NE(planned(PlanOf({20, 280}, {20, 280}), 4), first);
  EXPECT_EQ(planned(PlanOf({300}, {300}), 4), first);
}

// The longest head there is lies in one direction; it must still have a code.
TEST(FlashQueryScale, IsTheLeastPowerOfTwoThatHoldsEveryQuery) {
  for (const int dim : {64, 128}) {
    for (const float largest : {0.07f, 1.0f, 3.1f, 39.597979f, 40.0f}) {
      for (const float factor : {1.0f, 1.25f}) {
        std::vector<float> weights(dim, 0.01f);
        weights[dim / 3] = -largest;
        const float scale = FlashQueryScale(weights, factor);
        const double bound = std::sqrt(static_cast<double>(dim)) * largest * factor;
        int exponent = 0;
        EXPECT_EQ(std::frexp(scale, &exponent), 0.5f);
        EXPECT_GE(448 * double{scale}, bound);
        EXPECT_LT(448 * double{scale} / 2, bound);
      }
    }
  }
  EXPECT_EQ(FlashQueryScale(std::vector<float>(64, 56.0f), 1.0f), 1.0f) << "exactly 448";
}

TEST(FlashQueryScale, IsNoneWhereTheWeightsPromiseNothing) {
  EXPECT_EQ(FlashQueryScale({}, 1.0f), 0);
  EXPECT_EQ(FlashQueryScale(std::vector<float>(64, 0.0f), 1.0f), 0);
  EXPECT_EQ(FlashQueryScale(std::vector<float>(64, NAN), 1.0f), 0);
  EXPECT_EQ(FlashQueryScale(std::vector<float>(64, INFINITY), 1.0f), 0);
  EXPECT_EQ(FlashQueryScale(std::vector<float>(64, 1.0f), NAN), 0);
}

}  // namespace
}  // namespace baton::simt
