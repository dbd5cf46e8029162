// Made-up weights: the device fills in what the host reads row by row.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "engine/base/fp8.h"
#include "engine/base/hash_weights.h"
#include "engine/ops/cuda/kernels.h"
#include "engine/runtime/model_runner.h"
#include "gtest/gtest.h"
#include "tests/simt/device_array.h"
#include "tests/simt/random_values.h"
#include "tests/support/tiny_checkpoint.h"

namespace baton::simt {
namespace {

using base::HashWeight;
using ops::cuda::Element;
using ops::cuda::HashFill;
using ops::cuda::HashFillParams;

constexpr int kRows = 5, kCols = 2056;

HashFillParams Params(void* out, Element element) {
  return {.out = out,
          .element = element,
          .rows = kRows,
          .cols = kCols,
          .seed = 77,
          .first_row = 1000,
          .first_col = 16,
          .std = 0.5f,
          .inverse_scale = 64.0f};
}

float Want(int row, int col) { return HashWeight(77, 1000 + row, 16 + col, 0.5f); }

TEST(HashFill, IsTheHostsNumbersInEachElement) {
  DeviceArray<float> f32(kRows * kCols);
  DeviceArray<uint16_t> bf16(kRows * kCols);
  DeviceArray<uint8_t> fp8(kRows * kCols);
  ASSERT_EQ(HashFill(Params(f32.data(), Element::kF32), nullptr), cudaSuccess);
  ASSERT_EQ(HashFill(Params(bf16.data(), Element::kBf16), nullptr), cudaSuccess);
  ASSERT_EQ(HashFill(Params(fp8.data(), Element::kFp8), nullptr), cudaSuccess);
  const std::vector<float> a = f32.Get();
  const std::vector<uint16_t> b = bf16.Get();
  const std::vector<uint8_t> c = fp8.Get();
  for (int row = 0; row < kRows; ++row) {
    for (int col = 0; col < kCols; ++col) {
      const int at = row * kCols + col;
      ASSERT_EQ(a[at], Want(row, col)) << row << " " << col;
      ASSERT_EQ(b[at], base::Bf16FromFloat(Want(row, col)));
      ASSERT_EQ(c[at], base::Fp8FromFloat(Want(row, col) * 64.0f));
    }
  }
}

TEST(HashFill, RefusesWhatItCannotWrite) {
  DeviceArray<float> out(8);
  HashFillParams params = Params(out.data(), Element::kF32);
  params.cols = 4;
  EXPECT_EQ(HashFill(params, nullptr), cudaErrorInvalidValue);
  params.cols = 8;
  params.element = Element::kF16;
  EXPECT_EQ(HashFill(params, nullptr), cudaErrorInvalidValue);
  params.rows = 0;
  params.element = Element::kBf16;
  EXPECT_EQ(HashFill(params, nullptr), cudaSuccess);
}

TEST(HashWeights, AreAboutNormal) {
  double sum = 0, squares = 0, largest = 0;
  constexpr int kCount = 100000;
  for (int i = 0; i < kCount; ++i) {
    const double value = HashWeight(3, i / 300, i % 300, 1.0f);
    sum += value;
    squares += value * value;
    largest = std::max(largest, std::fabs(value));
  }
  // Five standard errors of a mean and of a variance.
  EXPECT_NEAR(sum / kCount, 0, 5 / std::sqrt(kCount));
  EXPECT_NEAR(squares / kCount, 1, 5 * std::sqrt(2.0 / kCount));
  EXPECT_LE(largest, base::kHashWeightMax);
  EXPECT_GT(largest, 3);
}

std::vector<float> LogitsOf(const std::string& folder,
                            const std::string& backend,
                            const char* dtype) {
  runtime::ModelRunnerOptions options;
  options.model_path = folder;
  options.dummy_weights = true;
  options.backend = backend;
  options.weight_dtype = dtype;
  options.num_blocks = 2;
  options.max_step_tokens = 16;
  options.backend_options.num_threads = 1;
  const auto runner = runtime::ModelRunner::Create(options);
  EXPECT_TRUE(runner.ok()) << runner.status();
  if (!runner.ok()) return {};
  const std::vector<uint32_t> tokens = {4, 1, 3};
  const std::vector<kv::BlockId> blocks = {1};
  const std::vector<int> rows = {2};
  absl::Span<float> logits;
  EXPECT_TRUE((*runner)->Step({{tokens, 0, blocks, rows}}, nullptr, &logits, nullptr).ok());
  return std::vector<float>(logits.begin(), logits.end());
}

// A folder with a config is enough, and it is one model wherever it is computed.
TEST(MadeUpModels, AreOneModelOnEveryBackend) {
  testing_support::TempDir dir;
  testing_support::TinyCheckpoint shape;
  shape.hidden = 128;
  shape.num_heads = 2;
  shape.num_kv_heads = 1;
  shape.head_dim = 128;
  shape.ffn = 128;
  dir.Write("config.json", shape.ConfigJson());
  const std::vector<float> cpu = LogitsOf(dir.path(), "cpu", "f32");
  ASSERT_FALSE(cpu.empty());
  double size = 0;
  for (const float value : cpu) size = std::max(size, std::fabs(double{value}));
  EXPECT_GT(size, 0.01);
  for (const char* dtype : {"f32", "bf16", "fp8"}) {
    const std::vector<float> cuda = LogitsOf(dir.path(), "cuda", dtype);
    ASSERT_EQ(cuda.size(), cpu.size());
    double error = 0, total = 0;
    for (size_t i = 0; i < cpu.size(); ++i) {
      error += std::pow(double{cuda[i]} - cpu[i], 2);
      total += std::pow(double{cpu[i]}, 2);
    }
    // Roundings of weights and of inputs, independent, in 4 products of each of 2 layers: bf16
    // 2^-9, e4m3 2^-4 of each value at most, a uniform share of it; keys and values are e4m3
    // always.
    const double step = dtype == std::string("fp8") ? 0x1p-4 : 0x1p-9;
    const double bound = std::sqrt(2 * 4.0 * 2 * step * step / 3 + 2 * 2 * 0x1p-8 / 3);
    EXPECT_LT(std::sqrt(error / total), bound) << dtype;
  }
}

}  // namespace
}  // namespace baton::simt
