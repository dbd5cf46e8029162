// FP8 weights: products of e4m3 with the scales of both sides against double precision, a
// checkpoint's own codes, and whole models on the emulated device.

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "engine/base/fp8.h"
#include "engine/ops/cuda/fp8_matrix.h"
#include "engine/ops/cuda/linear.h"
#include "engine/ops/quantize.h"
#include "engine/runtime/model_runner.h"
#include "gtest/gtest.h"
#include "tests/simt/device_array.h"
#include "tests/simt/fake_cudart.h"
#include "tests/simt/random_values.h"
#include "tests/support/tiny_checkpoint.h"

namespace baton::simt {
namespace {

using ops::MatrixSource;
using ops::cuda::Element;
using testing_support::TempDir;
using testing_support::TinyCheckpoint;

// x [T][K] in e4m3 as the row kernels write it, and what the codes stand for.
struct QuantizedRows {
  QuantizedRows(const std::vector<float>& x, int tokens, int cols)
      : pitch(ops::cuda::RoundUp(tokens, ops::cuda::kFp8Multiple)),
        codes(static_cast<size_t>(pitch) * cols),
        scales(static_cast<size_t>(cols / 128) * pitch) {
    DeviceArray<float> in(x);
    EXPECT_EQ(ops::cuda::QuantizeRows({.rows = in.data(),
                                       .element = Element::kF32,
                                       .out = {.data = codes.data(),
                                               .element = Element::kFp8,
                                               .scales = scales.data(),
                                               .pitch = pitch},
                                       .num_tokens = tokens,
                                       .width = cols},
                                      nullptr),
              cudaSuccess);
    const std::vector<uint8_t> host_codes = codes.Get();
    const std::vector<float> host_scales = scales.Get();
    for (int t = 0; t < tokens; ++t) {
      for (int k = 0; k < cols; ++k) {
        values.push_back(double{base::FloatFromFp8(host_codes[static_cast<size_t>(t) * cols + k])} *
                         host_scales[static_cast<size_t>(k / 128) * pitch + t]);
      }
    }
  }
  int pitch;
  DeviceArray<uint8_t> codes;
  DeviceArray<float> scales;
  std::vector<double> values;
};

MatrixSource SourceOf(const std::vector<float>& values, int rows, int cols) {
  MatrixSource source;
  source.rows = rows;
  source.cols = cols;
  source.in_fp8 = true;
  source.read_row = [&values, cols](int row, float* out) {
    std::copy_n(values.begin() + static_cast<ptrdiff_t>(row) * cols, cols, out);
  };
  return source;
}

// Values that e4m3 holds exactly with any scale of their block: one bit.
std::vector<float> PowersOfTwo(Random* random, int count) {
  std::vector<float> values;
  for (int i = 0; i < count; ++i)
    values.push_back(std::ldexp(random->Between(0, 1) == 0 ? 1.0f : -1.0f, random->Between(-3, 3)));
  return values;
}

TEST(Fp8Linear, IsTheProductOfWhatTheCodesStandFor) {
  Random random(1);
  const auto linear = ops::cuda::Linear::Create({});
  ASSERT_TRUE(linear.ok()) << linear.status();
  for (const auto& [tokens, rows, cols] :
       {std::array{1, 16, 128}, {5, 144, 256}, {17, 272, 640}, {32, 128, 512}}) {
    SCOPED_TRACE(testing::Message() << "T=" << tokens << " N=" << rows << " K=" << cols);
    const std::vector<float> weights = PowersOfTwo(&random, rows * cols);
    const QuantizedRows x(random.Values(static_cast<size_t>(tokens) * cols, 2.0f), tokens, cols);
    const auto w = ops::cuda::PackFp8(SourceOf(weights, rows, cols), nullptr);
    ASSERT_TRUE(w.ok()) << w.status();
    const std::vector<float> before = random.Values(static_cast<size_t>(x.pitch) * rows);
    DeviceArray<float> out(before);
    ASSERT_TRUE((*linear)
                    ->Run({.tokens = x.pitch,
                           .rows = rows,
                           .cols = cols,
                           .in = Element::kFp8,
                           .out = Element::kF32,
                           .accumulate = true},
                          {x.codes.data(), x.scales.data()}, (*w)->operand(), nullptr, out.data(),
                          nullptr)
                    .ok());
    const std::vector<float> got = out.Get();
    for (int t = 0; t < tokens; ++t) {
      for (int n = 0; n < rows; ++n) {
        double want = before[static_cast<size_t>(t) * rows + n], size = std::fabs(want);
        for (int k = 0; k < cols; ++k) {
          const double product = x.values[static_cast<size_t>(t) * cols + k] *
                                 weights[static_cast<size_t>(n) * cols + k];
          want += product;
          size += std::fabs(product);
        }
        // Sums in f32, in any order: one rounding for each of K terms, the scales and the addend.
        ASSERT_NEAR(got[static_cast<size_t>(t) * rows + n], want, size * (cols + 4) * 0x1p-24)
            << t << " " << n;
      }
    }
  }
}

// Codes and scales of a checkpoint are taken as they are, whatever the scales.
TEST(Fp8Matrix, KeepsStoredCodes) {
  constexpr int kRows = 256, kCols = 384;
  MatrixSource source;
  source.rows = kRows;
  source.cols = kCols - 128;  // a rank's share
  source.whole_cols = kCols;
  source.first_col = 128;
  source.in_fp8 = true;
  source.read_row = [](int, float*) { FAIL() << "the codes are enough"; };
  source.read_row_fp8 = [](int row, uint8_t* codes, float* scales) {
    for (int k = 0; k < kCols; ++k) codes[k] = static_cast<uint8_t>(row + k) & 0x3f;
    for (int b = 0; b < kCols / 128; ++b) scales[b] = 0.3f * (row / 128 + 1) + b;
  };
  const auto matrix = ops::cuda::PackFp8(source, nullptr);
  ASSERT_TRUE(matrix.ok()) << matrix.status();
  std::vector<uint8_t> codes(static_cast<size_t>(kRows) * (kCols - 128));
  std::vector<float> scales(2 * 4);
  ASSERT_EQ(cudaMemcpy(codes.data(), (*matrix)->data(), codes.size(), cudaMemcpyDeviceToHost),
            cudaSuccess);
  ASSERT_EQ(cudaMemcpy(scales.data(), (*matrix)->operand().scales, scales.size() * sizeof(float),
                       cudaMemcpyDeviceToHost),
            cudaSuccess);
  EXPECT_EQ(codes[0], 128 & 0x3f);
  EXPECT_EQ(codes[200 * 256 + 77], (200 + 128 + 77) & 0x3f);
  EXPECT_FLOAT_EQ(scales[0], 0.3f + 1);
  EXPECT_FLOAT_EQ(scales[1], 0.3f + 2);
  EXPECT_FLOAT_EQ(scales[4], 0.6f + 1) << "rows of scales are rounded up to four";
}

TEST(Fp8Matrix, RefusesWhatProductsCannotTake) {
  const std::vector<float> values(24 * 128);
  EXPECT_EQ(ops::cuda::PackFp8(SourceOf(values, 24, 128), nullptr).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// Attention that writes e4m3 itself (a head of 128), and one whose rows are rounded afterwards;
// with layers of which some are not in e4m3 (a hidden size of 192).
TinyCheckpoint Model(int hidden, int head_dim, bool stored) {
  TinyCheckpoint model;
  model.hidden = hidden;
  model.num_heads = 256 / head_dim;
  model.num_kv_heads = model.num_heads / 2;
  model.head_dim = head_dim;
  model.ffn = 256;
  model.vocab = 64;
  model.fp8 = stored;
  return model;
}

std::vector<float> LogitsOf(const TempDir& dir,
                            const std::string& backend,
                            const std::string& dtype) {
  runtime::ModelRunnerOptions options;
  options.model_path = dir.path();
  options.backend = backend;
  options.weight_dtype = dtype;
  options.kv_dtype = "fp8_dynamic";
  options.max_step_tokens = 64;
  options.num_blocks = 4;
  options.backend_options.num_threads = 1;
  const auto runner = runtime::ModelRunner::Create(options);
  EXPECT_TRUE(runner.ok()) << runner.status();
  if (!runner.ok()) return {};
  std::vector<float> logits;
  const std::vector<kv::BlockId> blocks = {2};
  const auto step = [&](std::vector<uint32_t> tokens, int start) {
    std::vector<int> rows(tokens.size());
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int>(i);
    absl::Span<float> out;
    const absl::Status status =
        (*runner)->Step({{tokens, start, blocks, rows}}, nullptr, &out, nullptr);
    EXPECT_TRUE(status.ok()) << status;
    logits.insert(logits.end(), out.begin(), out.end());
  };
  step({5, 9, 2, 44, 17, 3, 60, 31, 8, 12, 25, 7}, 0);  // a prompt
  step({33}, 12);                                       // decode
  return logits;
}

double Distance(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0, size = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    error += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    size += double{b[i]} * b[i];
  }
  return std::sqrt(error / size);
}

TEST(Fp8Models, AreTheSameModelAsOnTheCpu) {
  GetRuntimeConfig().lazy = true;
  for (const auto& [hidden, head_dim] : {std::pair{128, 128}, {256, 64}, {192, 64}}) {
    SCOPED_TRACE(testing::Message() << "E=" << hidden << " D=" << head_dim);
    TempDir dir;
    Model(hidden, head_dim, false).WriteTo(dir);
    const std::vector<float> cpu = LogitsOf(dir, "cpu", "fp8"), cuda = LogitsOf(dir, "cuda", "fp8");
    ASSERT_EQ(cuda.size(), cpu.size());
    ASSERT_FALSE(cpu.empty());
    // What differs is that the inputs of linear layers are rounded to e4m3: 2^-4 / sqrt(3) of each
    // value at most, independently in what each of q, k, v, o, gate, up and down gives, in 2
    // layers.
    EXPECT_LT(Distance(cuda, cpu), 0x1p-4 / std::sqrt(3.0) * std::sqrt(7.0 * 2));
    EXPECT_GT(Distance(cuda, cpu), 1e-4) << "then nothing was in e4m3";
  }
  GetRuntimeConfig() = RuntimeConfig();
}

TEST(Fp8Models, StoredCodesAreThoseOfRounding) {
  TempDir rounded, stored;
  Model(256, 64, false).WriteTo(rounded);
  Model(256, 64, true).WriteTo(stored);
  EXPECT_EQ(LogitsOf(stored, "cuda", "auto"), LogitsOf(rounded, "cuda", "fp8"));
}

}  // namespace
}  // namespace baton::simt
