// The canonical q4 dot against loops written from its definition, and against exact arithmetic.

#include "engine/ops/ref/ref_tensors.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "engine/ops/flush_denormals.h"
#include "engine/ops/quantize.h"

namespace baton::ops {
namespace {

constexpr int kCols = 128, kGroups = kCols / kQ4Group;

RefActivation Input(const std::vector<float>& x) {
  RefActivation input;
  input.dtype = WeightDtype::kQ4;
  input.max_tokens = 1;
  input.width = static_cast<int>(x.size());
  input.values = x;
  input.codes.resize(x.size());
  input.scales.resize(input.num_groups());
  input.sums.resize(input.num_groups());
  input.FinishLinearInput(0);
  return input;
}

RefMatrix Row(const std::vector<int8_t>& codes,
              const std::vector<float>& scales,
              const std::vector<float>& minimums) {
  RefMatrix row;
  row.dtype = WeightDtype::kQ4;
  row.num_rows = 1;
  row.num_cols = static_cast<int>(codes.size());
  row.codes = codes;
  row.scales = scales;
  row.minimums = minimums;
  return row;
}

struct Case {
  std::vector<float> x = std::vector<float>(kCols);
  std::vector<int8_t> codes = std::vector<int8_t>(kCols);
  std::vector<float> scales = std::vector<float>(kGroups), minimums = std::vector<float>(kGroups);
};

Case RandomCase(int seed) {
  std::mt19937 random(seed);
  const auto next = [&] {
    return static_cast<float>(static_cast<int>(random() % 20001) - 10000) / 10000;
  };
  Case c;
  for (float& value : c.x) value = 3 * next();
  for (int8_t& code : c.codes) code = static_cast<int8_t>(random() % 16);
  for (float& scale : c.scales) scale = 0.01f * next();
  for (float& minimum : c.minimums) minimum = 0.1f * next();
  return c;
}

float ByDefinition(const Case& c) {
  float acc = 0;
  for (int group = 0; group < kGroups; ++group) {
    float largest = 0;
    for (int i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(c.x[32 * group + i]));
    const bool zero = largest < 1e-30f;
    const float x_scale = zero ? 0.0f : largest / 127.0f;
    const float inverse = zero ? 0.0f : 127.0f / largest;
    int sum = 0, code_sum = 0;
    for (int i = 0; i < 32; ++i) {
      const int code = static_cast<int>(std::nearbyint(c.x[32 * group + i] * double{inverse}));
      sum += code * c.codes[32 * group + i];
      code_sum += code;
    }
    const float scale = c.scales[group] * x_scale;
    acc = std::fma(static_cast<float>(sum), scale, acc);
    const float x_sum = x_scale * static_cast<float>(code_sum);
    acc = std::fma(c.minimums[group], x_sum, acc);
  }
  return acc;
}

TEST(Q4Dot, IsWhatItsDefinitionSays) {
  const ScopedFlushDenormals flush;
  for (int seed = 0; seed < 200; ++seed) {
    Case c = RandomCase(seed);
    if (seed % 4 == 1) std::fill_n(c.x.begin() + 32, 32, 0.0f);
    if (seed % 4 == 2) {
      for (int i = 0; i < 32; ++i) c.x[i] = std::ldexp(c.x[i], i % 2 == 0 ? -130 : -20);
    }
    if (seed % 4 == 3) {  // the largest sums that there are
      for (float& value : c.x) value = seed % 8 == 3 ? 2.5f : -2.5f;
      std::fill(c.codes.begin(), c.codes.end(), int8_t{15});
    }
    EXPECT_EQ(Dot(Input(c.x), 0, Row(c.codes, c.scales, c.minimums), 0, 0, kCols), ByDefinition(c))
        << seed;
  }
}

// Half a step of each activation's code times its weight, and a rounding of each operation.
TEST(Q4Dot, IsTheProductOfTheWeightsWithinHalfAStepOfEachActivation) {
  const ScopedFlushDenormals flush;
  for (int seed = 0; seed < 200; ++seed) {
    const Case c = RandomCase(seed);
    const RefActivation x = Input(c.x);
    const RefMatrix row = Row(c.codes, c.scales, c.minimums);
    double exact = 0, steps = 0, magnitudes = 0;
    for (int k = 0; k < kCols; ++k) {
      const int group = k / 32;
      const double w = double{c.scales[group]} * c.codes[k] + double{c.minimums[group]};
      exact += w * c.x[k];
      steps += std::fabs(w) * x.scales[group] / 2;
      magnitudes +=
          (std::fabs(double{c.scales[group]}) * c.codes[k] + std::fabs(double{c.minimums[group]})) *
          std::fabs(c.x[k]);
    }
    // Two fused operations a group in a chain, and two products before each.
    const double rounding = (2 * kGroups + 4) * 0x1p-24 * magnitudes;
    EXPECT_LE(std::fabs(Dot(x, 0, row, 0, 0, kCols) - exact), steps * (1 + 1e-6) + rounding)
        << seed;
  }
}

TEST(Q4Dot, HalvesAreWholeGroups) {
  const ScopedFlushDenormals flush;
  const Case c = RandomCase(1);
  Case low = c, high = c;
  std::fill_n(low.x.begin() + 64, 64, 0.0f);
  std::fill_n(high.x.begin(), 64, 0.0f);
  const RefActivation x = Input(c.x);
  const RefMatrix row = Row(c.codes, c.scales, c.minimums);
  EXPECT_EQ(Dot(x, 0, row, 0, 0, 64), ByDefinition(low));
  EXPECT_EQ(Dot(x, 0, row, 0, 64, kCols), ByDefinition(high));
}

TEST(Q4Dot, WhatIsNotFiniteMakesItNan) {
  const ScopedFlushDenormals flush;
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float bad : {infinity, -infinity, std::nanf("")}) {
    Case c = RandomCase(2);
    c.x[40] = bad;
    EXPECT_TRUE(std::isnan(Dot(Input(c.x), 0, Row(c.codes, c.scales, c.minimums), 0, 0, kCols)));
    // A group of zeros times an infinite scale.
    c = RandomCase(2);
    std::fill_n(c.x.begin() + 32, 32, 0.0f);
    c.scales[1] = bad;
    EXPECT_TRUE(std::isnan(Dot(Input(c.x), 0, Row(c.codes, c.scales, c.minimums), 0, 0, kCols)));
  }
}

TEST(Q4Matrix, RowsAreReadAsScaleTimesCodePlusMinimum) {
  const ScopedFlushDenormals flush;
  const Case c = RandomCase(3);
  const RefMatrix row = Row(c.codes, c.scales, c.minimums);
  for (int k = 0; k < kCols; ++k)
    EXPECT_EQ(row.At(0, k),
              std::fma(c.scales[k / 32], static_cast<float>(c.codes[k]), c.minimums[k / 32]));
}

}  // namespace
}  // namespace baton::ops
