#include "decode_worker/step_cost.h"

#include "gtest/gtest.h"

#include "tests/support/fake_runner.h"

namespace baton::decode {
namespace {

StepLoad Load(int tokens, int context = 0) {
  StepLoad load;
  load.Add(tokens, context);
  return load;
}

TEST(StepCostTest, InterpolatesBetweenPointsAndGrowsBehindThem) {
  const StepCost cost({{1, 1.0}, {5, 2.0}, {10, 4.0}}, 0, 0);
  EXPECT_DOUBLE_EQ(cost.Seconds(Load(1)), 1.0);
  EXPECT_DOUBLE_EQ(cost.Seconds(Load(3)), 1.5);
  EXPECT_DOUBLE_EQ(cost.Seconds(Load(5)), 2.0);
  EXPECT_DOUBLE_EQ(cost.Seconds(Load(20)), 8.0);
}

TEST(StepCostTest, ContextsCostByTokenAndByPair) {
  const StepCost cost({{1, 1.0}}, 0.01, 0.001);
  EXPECT_DOUBLE_EQ(cost.Seconds(Load(1, 100)), 1.0 + 1.0 + 0.1);
  EXPECT_DOUBLE_EQ(cost.Seconds(Load(4, 100)), 1.0 + 1.0 + 0.4);
}

TEST(StepCostTest, LearnsThatOneSizeIsDearerThanMeasured) {
  StepCost cost({{1, 1.0}, {8, 1.1}}, 0, 0);
  for (int i = 0; i < 200; ++i) {
    cost.Observe(Load(1), 1.0);
    cost.Observe(Load(8), 2.2);
  }
  EXPECT_NEAR(cost.Seconds(Load(8)) / cost.Seconds(Load(1)), 2.2, 0.15);
}

TEST(StepCostTest, AMachineThatIsSlowAsAWholeChangesNoProportion) {
  StepCost cost({{1, 1.0}, {8, 1.1}}, 0, 0);
  for (int i = 0; i < 200; ++i) cost.Observe(Load(1), 3.0);
  EXPECT_NEAR(cost.Seconds(Load(8)) / cost.Seconds(Load(1)), 1.1, 0.02);
}

// Two models are weighed against each other: what was measured at start may be wrong for one.
TEST(StepCostTest, SecondsAreThoseOfNow) {
  StepCost cost({{1, 1.0}, {8, 1.1}}, 0, 0);
  for (int i = 0; i < 200; ++i) cost.Observe(Load(1), 3.0);
  EXPECT_NEAR(cost.Seconds(Load(1)), 3.0, 0.05);
  EXPECT_NEAR(cost.slowness(), 3.0, 0.05);
}

// A draft model that was too slow is tried again some day, and not at once.
TEST(StepCostTest, AModelThatDoesNotRunDriftsToTheSlownessOfTheOther) {
  StepCost cost({{1, 1.0}}, 0, 0);
  for (int i = 0; i < 200; ++i) cost.Observe(Load(1), 3.0);
  for (int i = 0; i < 50; ++i) cost.DriftTo(1.0);
  EXPECT_GT(cost.Seconds(Load(1)), 2.5);
  for (int i = 0; i < 3000; ++i) cost.DriftTo(1.0);
  EXPECT_NEAR(cost.Seconds(Load(1)), 1.0, 0.05);
}

TEST(StepCostTest, WhatIsNotSeenAnyMoreIsForgotten) {
  StepCost cost({{1, 1.0}, {8, 1.1}}, 0, 0);
  for (int i = 0; i < 100; ++i) {
    cost.Observe(Load(1), 1.0);
    cost.Observe(Load(8), 3.3);
  }
  EXPECT_GT(cost.Seconds(Load(8)) / cost.Seconds(Load(1)), 2.5);
  for (int i = 0; i < 3000; ++i) cost.Observe(Load(1), 1.0);
  EXPECT_NEAR(cost.Seconds(Load(8)) / cost.Seconds(Load(1)), 1.1, 0.05);
}

TEST(StepCostTest, OneHiccupAndNoTimeAtAllChangeLittle) {
  StepCost cost({{1, 1.0}, {8, 1.1}}, 0, 0);
  cost.Observe(Load(8), 1000.0);
  cost.Observe(Load(8), 0.0);  // a clock that stands still
  EXPECT_NEAR(cost.Seconds(Load(8)) / cost.Seconds(Load(1)), 1.1, 0.01);
}

TEST(StepCostTest, MeasuresAscendingPointsWithinThePool) {
  testing::FakeRunner runner(/*num_blocks=*/1);
  const absl::StatusOr<StepCost> cost = MeasureStepCost(runner, 16, absl::Seconds(5));
  ASSERT_TRUE(cost.ok()) << cost.status();
  for (int tokens = 1; tokens < 40; ++tokens)
    EXPECT_LE(cost->Seconds(Load(tokens)), cost->Seconds(Load(tokens + 1)));
  EXPECT_GT(cost->Seconds(Load(1)), 0);
}

TEST(StepCostTest, AFailedStepIsAnError) {
  testing::FakeRunner runner(4);
  runner.step_status = absl::InternalError("broken");
  EXPECT_EQ(MeasureStepCost(runner, 16, absl::Seconds(5)).status().code(),
            absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace baton::decode
