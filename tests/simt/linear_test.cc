// How an algorithm is chosen for a product, and that the choice outlives the process.

#include "engine/ops/cuda/linear.h"

#include <algorithm>
#include <string>
#include <vector>

#include "engine/ops/cuda/gemm_cache.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/simt/device_array.h"
#include "tests/support/model_files.h"

namespace baton::simt {
namespace {

using ops::cuda::CublasLtAlgo;
using ops::cuda::Element;
using ops::cuda::GemmCache;
using ops::cuda::Linear;
using testing_support::ReadWhole;
using testing_support::TempDir;

absl::Status Multiply(Linear* linear, int tokens, float* first) {
  const std::vector<float> x(static_cast<size_t>(tokens) * 8, 2.0f), w(16 * 8, 3.0f);
  DeviceArray<float> device_x(x), device_w(w), out(static_cast<size_t>(tokens) * 16);
  const absl::Status status = linear->Run(
      {.tokens = tokens, .rows = 16, .cols = 8, .in = Element::kF32, .out = Element::kF32},
      {device_x.data()}, {device_w.data()}, nullptr, out.data(), nullptr);
  *first = out.Get()[0];
  return status;
}

TEST(LinearTest, TimesSuggestionsOnceAShapeAndKeepsTheChoice) {
  TempDir dir;
  const std::string path = dir.File("gemm");
  float value = 0;
  {
    const auto linear = Linear::Create({.device = "a device", .cache = path});
    ASSERT_TRUE(linear.ok());
    for (const int tokens : {1, 4, 1, 4}) {
      ASSERT_TRUE(Multiply(linear->get(), tokens, &value).ok());
      EXPECT_EQ(value, 48.0f);
    }
  }
  const std::string written = ReadWhole(path);
  EXPECT_EQ(std::count(written.begin(), written.end(), '\n'), 2);
  EXPECT_THAT(written, testing::StartsWith("a_device/130100/1x16x8/00 "));
  const auto again = Linear::Create({.device = "a device", .cache = path});
  ASSERT_TRUE(again.ok());
  ASSERT_TRUE(Multiply(again->get(), 4, &value).ok());
  EXPECT_EQ(ReadWhole(path), written) << "nothing was chosen anew";
  const auto other = Linear::Create({.device = "another", .cache = path});
  ASSERT_TRUE(Multiply(other->get(), 4, &value).ok());
  EXPECT_GT(ReadWhole(path).size(), written.size()) << "a choice counts for one device";
}

// What is in the file is anybody's: it is checked, and made anew where it does not fit.
TEST(LinearTest, AFileOfNonsenseDoesNoHarm) {
  TempDir dir;
  const std::string zeros(128, '0');
  const std::string path = dir.Write(
      "gemm", "\n \nx\nkey zz\nd/130100/4x16x8/00 " + zeros + "\nd/130100/4x16x8/00 12\n");
  const auto linear = Linear::Create({.device = "d", .cache = path});
  float value = 0;
  ASSERT_TRUE(Multiply(linear->get(), 4, &value).ok());
  EXPECT_EQ(value, 48.0f);
}

TEST(LinearTest, GoesOnWhereTheFileCannotBeWritten) {
  const auto linear = Linear::Create({.device = "d", .cache = "/nonexistent/gemm"});
  float value = 0;
  ASSERT_TRUE(Multiply(linear->get(), 4, &value).ok());
  EXPECT_EQ(value, 48.0f);
}

TEST(GemmCacheTest, TheFirstLineOfAKeyCounts) {
  TempDir dir;
  const std::string path = dir.File("gemm");
  CublasLtAlgo first = {}, second = {};
  first.data[0] = 1;
  second.data[0] = 2;
  GemmCache(path).Add("k", first);
  GemmCache(path).Add("k", second);
  ASSERT_TRUE(GemmCache(path).Find("k").has_value());
  EXPECT_EQ(GemmCache(path).Find("k")->data[0], 1u);
  EXPECT_FALSE(GemmCache(path).Find("l").has_value());
}

}  // namespace
}  // namespace baton::simt
