#include "decode_worker/draft_planner.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace baton::decode {
namespace {

// Weights are read once whatever the step: up to 16 tokens cost little, then as much each.
StepCost MemoryBound() { return StepCost({{1, 1.0}, {16, 1.15}, {17, 1.2}, {64, 4.0}}, 0, 0); }
StepCost ComputeBound() { return StepCost({{1, 1.0}, {64, 64.0}}, 0, 0); }

StepLoad Decoding(int sequences, int others = 0) {
  StepLoad load;
  for (int i = 0; i < sequences; ++i) load.Add(1, 100);
  load.tokens += others;
  return load;
}

std::vector<int> Plan(const StepCost& cost,
                      const std::vector<DraftCandidate>& candidates,
                      int budget = 64,
                      int others = 0,
                      const CycleFactors& factors = {}) {
  const int sequences = static_cast<int>(candidates.size());
  DraftPlanner planner(sequences, budget);
  std::vector<int> counts(candidates.size());
  planner.Plan(cost, factors, Decoding(sequences, others), budget, candidates,
               absl::MakeSpan(counts));
  return counts;
}

class FixedCostDrafter : public Drafter {
 public:
  explicit FixedCostDrafter(double seconds) : seconds_(seconds) {}
  DraftOffer Offer(const Drafting&) override { return {}; }
  void Draft(absl::Span<Drafting* const>) override {}
  void OnVerified(const Drafting&, int) override {}
  void Forget(uint64_t) override {}
  double RoundSeconds(const StepLoad&) const override { return seconds_; }

 private:
  double seconds_;
};

TEST(DraftPlannerTest, DraftsManyWhenTheyAreAcceptedAndStepsAreBoundByMemory) {
  EXPECT_EQ(Plan(MemoryBound(), {{15, 0.95f, 100}}), (std::vector<int>{15}));
}

TEST(DraftPlannerTest, PoorChancesGetFewDrafts) {
  const int count = Plan(MemoryBound(), {{15, 0.3f, 100}})[0];
  EXPECT_GE(count, 1);
  EXPECT_LE(count, 4);
  EXPECT_EQ(Plan(MemoryBound(), {{15, 0.005f, 100}}), (std::vector<int>{0}));
}

TEST(DraftPlannerTest, NoDraftsWhenBoundByCompute) {
  EXPECT_EQ(Plan(ComputeBound(), {{15, 0.95f, 100}, {15, 0.9f, 100}}), (std::vector<int>{0, 0}));
  // The same sequence, but a chunk of a prompt fills the step.
  EXPECT_EQ(Plan(MemoryBound(), {{15, 0.3f, 100}}, 64, 500), (std::vector<int>{0}));
}

TEST(DraftPlannerTest, BetterChancesGetMore) {
  const std::vector<int> counts = Plan(MemoryBound(), {{15, 0.9f, 100}, {15, 0.4f, 100}});
  EXPECT_GT(counts[0], counts[1]);
  EXPECT_GT(counts[1], 0);
  EXPECT_LE(counts[0] + counts[1], 14);  // the 17th token of a step is dear
}

TEST(DraftPlannerTest, StopsBeforeAJumpOfCostAndPassesOneThatPays) {
  // From 4 to 5 tokens the step costs half as much again, and then nothing more up to 16.
  const StepCost jump({{1, 1.0}, {4, 1.0}, {5, 1.5}, {16, 1.5}}, 0, 0);
  EXPECT_EQ(Plan(jump, {{15, 0.6f, 100}}), (std::vector<int>{3}));
  EXPECT_EQ(Plan(jump, {{15, 0.97f, 100}}), (std::vector<int>{15}));
}

TEST(DraftPlannerTest, KeepsWithinLimitsAndBudget) {
  EXPECT_EQ(Plan(MemoryBound(), {{3, 0.95f, 100}}), (std::vector<int>{3}));
  EXPECT_EQ(Plan(MemoryBound(), {{0, 0.95f, 100}}), (std::vector<int>{0}));
  const std::vector<int> counts = Plan(StepCost(), {{15, 0.9f, 1}, {15, 0.9f, 1}}, 10);
  EXPECT_EQ(counts[0] + counts[1], 10);
  EXPECT_EQ(Plan(StepCost(), {{15, 0.9f, 1}}, 0), (std::vector<int>{0}));
}

TEST(DraftPlannerTest, DraftingHasItsPrice) {
  const FixedCostDrafter cheap(0.02), dear(0.6);
  EXPECT_GE(Plan(MemoryBound(), {{15, 0.8f, 100, &cheap}})[0], 4);
  EXPECT_LE(Plan(MemoryBound(), {{15, 0.8f, 100, &dear}})[0], 1);
  EXPECT_EQ(Plan(MemoryBound(), {{15, 0.5f, 100, &dear}})[0], 0);
  // A round of eight sequences costs what one of one does, so together it pays.
  EXPECT_GE(Plan(MemoryBound(), std::vector<DraftCandidate>(8, {15, 0.8f, 100, &dear}))[0], 1);
}

// What nobody prices: the loop's own work for drafts.
TEST(DraftPlannerTest, CyclesWithDraftsThatTakeLongerThanTheirPartsCountAsThey) {
  const FixedCostDrafter drafter(0.1);
  const DraftCandidate priced{15, 0.8f, 100, &drafter}, free{15, 0.8f, 100};
  EXPECT_GE(Plan(MemoryBound(), {priced}, 64, 0, {1.1, 1.1})[0], 4);
  EXPECT_EQ(Plan(MemoryBound(), {priced}, 64, 0, {1.0, 4.0})[0], 0);
  EXPECT_GE(Plan(MemoryBound(), {free}, 64, 0, {1.0, 4.0})[0], 4);
}

TEST(DraftPlannerTest, SaysWhatItExpects) {
  const FixedCostDrafter drafter(0.1);
  const DraftCandidate priced{1, 0.8f, 100, &drafter}, none;
  DraftPlanner planner(1, 64);
  int count = 0;
  const auto plan = [&](const DraftCandidate& candidate, double drafted_factor) {
    return planner.Plan(MemoryBound(), {2.0, drafted_factor}, Decoding(1), 64,
                        absl::MakeConstSpan(&candidate, 1), absl::MakeSpan(&count, 1));
  };
  const DraftPlan drafted = plan(priced, 2.0);
  EXPECT_EQ(count, 1);
  EXPECT_TRUE(drafted.drafted);
  EXPECT_NEAR(drafted.seconds, 1.11, 1e-9);
  EXPECT_NEAR(drafted.tokens_per_second, 1.8 / (2 * 1.11), 1e-6);
  for (const DraftPlan& plain : {plan(none, 2.0), plan(priced, 4.0)}) {
    EXPECT_EQ(count, 0);
    EXPECT_FALSE(plain.drafted);
    EXPECT_DOUBLE_EQ(plain.seconds, 1.0);
    EXPECT_DOUBLE_EQ(plain.tokens_per_second, 0.5);
  }
}

TEST(DraftPlannerTest, LongContextsMakeDraftsDearer) {
  const StepCost cost({{1, 1.0}, {16, 1.1}}, 1e-4, 1e-4);
  EXPECT_GT(Plan(cost, {{15, 0.6f, 10}})[0], Plan(cost, {{15, 0.6f, 20000}})[0]);
}

// Against all splits of two sequences: nothing is faster.
TEST(DraftPlannerTest, FindsTheBestOfAllSplits) {
  std::mt19937 random(3);
  const auto uniform = [&] { return static_cast<double>(random() % 1000) / 1000; };
  for (int round = 0; round < 300; ++round) {
    std::vector<StepCost::Point> points = {{1, 1.0}};
    for (const int tokens : {2, 4, 8, 16, 32})
      points.push_back({tokens, points.back().seconds + 0.4 * uniform()});
    const StepCost cost(points, 0, 0);
    const std::vector<DraftCandidate> candidates = {
        {static_cast<int>(random() % 8), static_cast<float>(uniform()), 100},
        {static_cast<int>(random() % 8), static_cast<float>(uniform()), 100}};
    const auto speed = [&](int a, int b) {
      StepLoad load = Decoding(2);
      load.tokens += a + b;
      double tokens = 2;
      for (int i = 1; i <= a; ++i) tokens += std::pow(candidates[0].acceptance, i);
      for (int i = 1; i <= b; ++i) tokens += std::pow(candidates[1].acceptance, i);
      return tokens / cost.Seconds(load);
    };
    const std::vector<int> counts = Plan(cost, candidates);
    double best = 0;
    for (int a = 0; a <= candidates[0].most; ++a) {
      for (int b = 0; b <= candidates[1].most; ++b) best = std::max(best, speed(a, b));
    }
    // Within what has to be gained before drafting starts.
    EXPECT_GE(speed(counts[0], counts[1]) * 1.021, best) << "round " << round;
  }
}

}  // namespace
}  // namespace baton::decode
