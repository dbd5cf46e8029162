#include "router/ttft_model.h"

#include <cmath>
#include <random>

#include "gtest/gtest.h"

namespace baton::router {
namespace {

double True(double cached, double n) {
  return 0.004 + 20e-6 * (n - cached) + 3e-9 * (n * n - cached * cached);
}

TEST(TtftModelTest, FindsTheCoefficientsOfWhatItIsShown) {
  TtftModel model;
  std::mt19937 random(1);
  for (int i = 0; i < 60; ++i) {
    const uint32_t n = 1 + random() % 30000;
    const uint32_t cached = i % 3 == 0 ? random() % n / 64 * 64 : 0;
    model.Observe(cached, n, True(cached, n));
  }
  EXPECT_TRUE(model.fitted());
  EXPECT_NEAR(model.coefficients().base_s, 0.004, 1e-4);
  EXPECT_NEAR(model.coefficients().per_token_s, 20e-6, 1e-7);
  EXPECT_NEAR(model.coefficients().per_token2_s, 3e-9, 1e-11);
  EXPECT_NEAR(model.coefficients().Seconds(1024, 20000), True(1024, 20000), 1e-3);
}

// Property: whatever the noise, no coefficient is negative and a longer prompt never takes less.
TEST(TtftModelTest, NeverPredictsLessForMore) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    TtftModel model;
    for (int i = 0; i < 30; ++i)
      model.Observe(0, 1 + random() % 4000, std::ldexp(random() % 1000 + 1, -14));
    const TtftCoefficients& c = model.coefficients();
    ASSERT_GE(c.base_s, 0);
    ASSERT_GE(c.per_token_s, 0);
    ASSERT_GE(c.per_token2_s, 0);
    ASSERT_LE(c.Seconds(0, 100), c.Seconds(0, 1000));
    ASSERT_LE(c.Seconds(64, 1000), c.Seconds(0, 1000));
  }
}

TEST(TtftModelTest, OneLengthOnlyIsTakenToBeLinear) {
  TtftModel model;
  for (int i = 0; i < 20; ++i) model.Observe(0, 1000, 0.05);
  EXPECT_NEAR(model.coefficients().Seconds(0, 1000), 0.05, 1e-6);
  EXPECT_NEAR(model.coefficients().Seconds(0, 2000), 0.10, 1e-3);
}

TEST(TtftModelTest, FollowsAWorkerThatBecomesSlower) {
  TtftModel model;
  for (int i = 0; i < 100; ++i) model.Observe(0, 500 + i % 7 * 100, 1e-5 * (500 + i % 7 * 100));
  EXPECT_LT(model.mean_abs_error_s(), 1e-5);
  for (int i = 0; i < 300; ++i) model.Observe(0, 500 + i % 7 * 100, 4e-5 * (500 + i % 7 * 100));
  EXPECT_NEAR(model.coefficients().Seconds(0, 800), 4e-5 * 800, 1e-5 * 800);
}

TEST(TtftModelTest, ItsErrorIsThatOfThePredictionBefore) {
  TtftModel model;
  for (uint64_t i = 0; i < TtftModel::kSamplesNeeded; ++i) model.Observe(0, 1000, 0.1);
  model.Observe(0, 1000, 0.3);
  EXPECT_NEAR(model.mean_abs_error_s(), 0.2, 1e-3);
}

TEST(TtftModelTest, NonsenseIsNoSample) {
  TtftModel model;
  model.Observe(0, 0, 1);
  model.Observe(0, 10, -1);
  model.Observe(0, 10, std::nan(""));
  model.Observe(0, 10, HUGE_VAL);
  EXPECT_EQ(model.num_samples(), 0u);
  model.Observe(20, 10, 0.1);  // more cached than there is
  EXPECT_EQ(model.num_samples(), 1u);
}

}  // namespace
}  // namespace baton::router
