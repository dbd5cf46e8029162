#include "engine/ops/quantize.h"

#include <cmath>
#include <random>
#include <vector>

#include "engine/base/dequant.h"
#include "engine/base/fp8.h"
#include "gtest/gtest.h"

namespace baton::ops {
namespace {

TEST(QuantizeInt8, ErrorIsAtMostHalfAStep) {
  std::mt19937 random(3);
  std::vector<float> row(100);
  std::vector<int8_t> codes(100);
  for (float& value : row)
    value = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 77.0f;
  const float scale = QuantizeRowInt8(row.data(), 100, codes.data());
  for (int i = 0; i < 100; ++i) EXPECT_LE(std::fabs(codes[i] * scale - row[i]), scale * 0.5001f);
}

TEST(QuantizeInt8, LargestValueIsCode127) {
  const std::vector<float> row = {0.5f, -2.0f, 1.0f};
  std::vector<int8_t> codes(3);
  const float scale = QuantizeRowInt8(row.data(), 3, codes.data());
  EXPECT_EQ(codes[1], -127);
  EXPECT_FLOAT_EQ(scale, 2.0f / 127.0f);
}

TEST(QuantizeInt8, RowOfZerosHasScaleZero) {
  const std::vector<float> row(5, 0.0f);
  std::vector<int8_t> codes(5, 1);
  EXPECT_EQ(QuantizeRowInt8(row.data(), 5, codes.data()), 0.0f);
  EXPECT_EQ(codes, std::vector<int8_t>(5, 0));
}

TEST(QuantizeInt8, InfinityAndNanMakeTheRowNan) {
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    const std::vector<float> row = {1.0f, bad};
    std::vector<int8_t> codes(2, 1);
    EXPECT_TRUE(std::isnan(QuantizeRowInt8(row.data(), 2, codes.data())));
    EXPECT_EQ(codes, std::vector<int8_t>(2, 0));
  }
}

TEST(QuantizeGroupsInt8, GroupsAreRowsOfTheirOwnAndTheLastMayBeShort) {
  std::vector<float> row(32 + 32 + 6);
  for (size_t i = 0; i < row.size(); ++i) row[i] = std::sin(0.7f * i) * (i < 32 ? 1.0f : 1e3f);
  std::fill_n(row.begin() + 32, 32, 0.0f);
  std::vector<int8_t> codes(row.size(), 99), want(row.size());
  std::vector<float> scales(3), sums(3);
  QuantizeGroupsInt8(row.data(), static_cast<int>(row.size()), codes.data(), scales.data(),
                     sums.data());
  for (int group = 0; group < 3; ++group) {
    const int count = group < 2 ? 32 : 6;
    EXPECT_EQ(scales[group],
              QuantizeRowInt8(row.data() + 32 * group, count, want.data() + 32 * group));
    int sum = 0;
    for (int i = 0; i < count; ++i) sum += want[32 * group + i];
    EXPECT_EQ(sums[group], scales[group] * static_cast<float>(sum));
  }
  EXPECT_EQ(codes, want);
  EXPECT_EQ(scales[1], 0.0f);
}

TEST(QuantizeGroupsInt8, InfinityAndNanStayInTheirGroup) {
  std::vector<float> row(64, 1.0f);
  row[3] = -INFINITY;
  std::vector<int8_t> codes(64);
  std::vector<float> scales(2), sums(2);
  QuantizeGroupsInt8(row.data(), 64, codes.data(), scales.data(), sums.data());
  EXPECT_TRUE(std::isnan(scales[0]) && std::isnan(sums[0]));
  EXPECT_FLOAT_EQ(sums[1], 32.0f);
}

TEST(QuantizeFp8, ScaleIsTheLeastPowerOfTwoThatHoldsAll) {
  for (const float largest : {448.0f, 448.1f, 447.0f, 1.0f, 1.75f, 1.76f, 3e-5f, 1e30f, 0.024f}) {
    const float scale = Fp8BlockScale(MagnitudeBits(largest));
    int exponent;
    EXPECT_EQ(std::frexp(scale, &exponent), 0.5f) << largest;
    EXPECT_LE(largest / scale, 448.0f) << largest;
    EXPECT_GT(largest / (scale / 2), 448.0f) << largest;
  }
  EXPECT_EQ(Fp8BlockScale(0), 1.0f);
  EXPECT_GT(Fp8BlockScale(1), 0.0f) << "a denormal";
}

TEST(QuantizeFp8, ValuesAreWithinHalfAStepAndBf16Exactly) {
  std::mt19937 random(4);
  std::vector<float> values(500);
  for (float& value : values)
    value = static_cast<float>(static_cast<int>(random() % 20001) - 10000) / 77000.0f;
  const float scale = Fp8BlockScale(LargestMagnitudeBits(values.data(), 500));
  std::vector<uint8_t> codes(500);
  QuantizeFp8(values.data(), 500, scale, codes.data());
  for (int i = 0; i < 500; ++i) {
    const float value = base::FloatFromFp8(codes[i]) * scale;
    EXPECT_EQ(value, base::RoundToBf16(value));
    // Half of a last place: 2^-4 of the value, or 2^-10 of the scale below the least normal code.
    EXPECT_LE(std::fabs(value - values[i]),
              std::max(std::fabs(values[i]) * 0x1p-4f, scale * 0x1p-10f));
  }
}

TEST(QuantizeFp8, ABlockWithInfinityOrNanIsNan) {
  for (const float bad : {INFINITY, NAN}) {
    const std::vector<float> values = {1.0f, bad};
    const float scale = Fp8BlockScale(LargestMagnitudeBits(values.data(), 2));
    std::vector<uint8_t> codes(2, 1);
    QuantizeFp8(values.data(), 2, scale, codes.data());
    EXPECT_TRUE(std::isnan(scale));
    EXPECT_EQ(codes, std::vector<uint8_t>(2, 0));
  }
}

TEST(QuantizeQ4, ValuesAreWithinHalfAStepAndEndsAreKept) {
  std::vector<float> row(64);
  for (int i = 0; i < 64; ++i) row[i] = std::sin(0.37f * i) + (i < 32 ? 0.0f : 3.0f);
  std::vector<uint8_t> codes(64);
  std::vector<float> scales(2), minimums(2);
  QuantizeRowQ4(row.data(), 64, codes.data(), scales.data(), minimums.data());
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(scales[i], base::F16ToF32(base::F32ToF16(scales[i])));
    EXPECT_EQ(minimums[i], base::F16ToF32(base::F32ToF16(minimums[i])));
  }
  for (int i = 0; i < 64; ++i) {
    EXPECT_LE(codes[i], 15);
    const float value = Q4Value(codes[i], scales[i / 32], minimums[i / 32]);
    // Half a step; at the ends also what rounding the scale and the minimum to f16 leaves.
    const float ends = 15 * scales[i / 32] * 0x1p-11f + std::fabs(minimums[i / 32]) * 0x1p-11f;
    EXPECT_LE(std::fabs(value - row[i]), 0.5001f * scales[i / 32] + ends);
  }
}

TEST(QuantizeQ4, AGroupThatIsNotFiniteIsNan) {
  for (const float bad : {INFINITY, -INFINITY, NAN, 3e38f}) {
    std::vector<float> row(64, 1.0f);
    row[7] = bad;
    row[8] = -3e38f;
    std::vector<uint8_t> codes(64, 9);
    std::vector<float> scales(2), minimums(2);
    QuantizeRowQ4(row.data(), 64, codes.data(), scales.data(), minimums.data());
    EXPECT_TRUE(std::isnan(Q4Value(codes[0], scales[0], minimums[0]))) << bad;
    EXPECT_EQ(codes[0], 0);
    EXPECT_EQ(Q4Value(codes[40], scales[1], minimums[1]), 1.0f);
  }
}

TEST(QuantizeQ4, WhatIsBeyondF16KeepsItsScale) {
  std::vector<float> row(32, 0.0f);
  row[0] = 1e7f;
  row[1] = -1e7f;
  std::vector<uint8_t> codes(32);
  float scale, minimum;
  QuantizeRowQ4(row.data(), 32, codes.data(), &scale, &minimum);
  EXPECT_EQ(minimum, -1e7f);
  EXPECT_EQ(scale, 2e7f / 15);
  EXPECT_EQ(codes[0], 15);
}

TEST(QuantizeQ4, FlatGroupIsItsMinimum) {
  const std::vector<float> row(32, 0.75f);
  std::vector<uint8_t> codes(32, 9);
  float scale, minimum;
  QuantizeRowQ4(row.data(), 32, codes.data(), &scale, &minimum);
  EXPECT_EQ(Q4Value(codes[5], scale, minimum), 0.75f);
}

}  // namespace
}  // namespace baton::ops
