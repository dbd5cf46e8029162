// The kernels that work on whole rows (embed, RMS norm, SiLU times up) against double precision,
// and the e4m3 rows with their scales.

#include <cmath>
#include <cstring>
#include <vector>

#include "engine/base/fp8.h"
#include "engine/ops/cuda/kernels.h"
#include "engine/ops/quantize.h"
#include "gtest/gtest.h"
#include "tests/simt/device_array.h"
#include "tests/simt/random_values.h"
#include "tests/simt/schedules.h"

namespace baton::simt {
namespace {

using ops::cuda::Element;

// Device rows in one of the elements that linear layers read, and how far they may be off.
class Rows {
 public:
  Rows(Element element, int tokens, int width)
      : element_(element),
        tokens_(tokens),
        width_(width),
        pitch_((tokens + 3) / 4 * 4),
        data_(static_cast<size_t>(tokens) * width * Bytes(element)),
        scales_(static_cast<size_t>(width / 128 + 1) * pitch_) {}

  ops::cuda::LinearRows view() {
    return {.data = data_.data(),
            .element = element_,
            .scales = element_ == Element::kFp8 ? scales_.data() : nullptr,
            .pitch = pitch_};
  }

  // `want` [tokens][width]; `error`: relative, of the f32 arithmetic before the rounding. Rows with
  // a value that is not finite: all their codes must be 0 and the scale of that group NaN.
  void Check(const std::vector<double>& want, double error) {
    const std::vector<uint8_t> bytes = data_.Get();
    const std::vector<float> scales = scales_.Get();
    for (int t = 0; t < tokens_; ++t) {
      for (int i = 0; i < width_; ++i) {
        const size_t at = static_cast<size_t>(t) * width_ + i;
        const double value = want[at];
        if (element_ == Element::kFp8) {
          CheckCode(bytes[at], scales[i / 128 * pitch_ + t], &want[at - i % 128], i % 128, error);
        } else if (element_ == Element::kBf16) {
          uint16_t bits;
          std::memcpy(&bits, &bytes[2 * at], 2);
          CheckValue(base::FloatFromBf16(bits), value, error + 0x1p-8);
        } else {
          float got;
          std::memcpy(&got, &bytes[4 * at], 4);
          CheckValue(got, value, error);
        }
        if (testing::Test::HasFailure()) {
          ADD_FAILURE() << "token " << t << " column " << i;
          return;
        }
      }
    }
  }

 private:
  static size_t Bytes(Element element) {
    return element == Element::kF32 ? 4 : element == Element::kBf16 ? 2 : 1;
  }

  static void CheckValue(double got, double want, double error) {
    if (std::isfinite(want)) {
      EXPECT_NEAR(got, want, std::fabs(want) * error + 1e-37);
    } else {
      EXPECT_FALSE(std::isfinite(got));
    }
  }

  static void CheckCode(uint8_t code, float scale, const double* group, int i, double error) {
    double largest = 0;
    bool finite = true;
    for (int k = 0; k < 128; ++k) {
      finite = finite && std::isfinite(group[k]);
      largest = std::max(largest, std::fabs(group[k]));
    }
    if (!finite) {
      EXPECT_TRUE(std::isnan(scale));
      EXPECT_EQ(code, 0);
      return;
    }
    EXPECT_NEAR(scale, largest / 448, largest / 448 * (error + 0x1p-23) + 1e-33);
    if (scale == 0) {
      EXPECT_EQ(code, 0);
      return;
    }
    const double value = group[i] / scale, slack = std::fabs(value) * (error + 0x1p-22);
    const float got = base::FloatFromFp8(code);
    EXPECT_GE(got, base::FloatFromFp8(base::Fp8FromFloat(static_cast<float>(value - slack))));
    EXPECT_LE(got, base::FloatFromFp8(base::Fp8FromFloat(static_cast<float>(value + slack))));
  }

  Element element_;
  int tokens_, width_;
  int64_t pitch_;
  DeviceArray<uint8_t> data_;
  DeviceArray<float> scales_;
};

class RowKernels : public ScheduleTest {};
BATON_INSTANTIATE_SCHEDULES(RowKernels);

TEST_P(RowKernels, EmbedCopiesRows) {
  Random random(1);
  for (const auto& [vocab, width] : {std::pair{7, 8}, {40, 1032}, {3, 192}}) {
    const std::vector<float> table = random.Values(static_cast<size_t>(vocab) * width);
    DeviceArray<float> table_f32(table);
    DeviceArray<uint16_t> table_bf16(ToBf16(table));
    std::vector<int32_t> ids;
    for (int t = 0; t < 11; ++t) ids.push_back(random.Between(0, vocab - 1));
    DeviceArray<int32_t> device_ids(ids);
    for (const Element element : {Element::kF32, Element::kBf16}) {
      DeviceArray<float> residual(ids.size() * width);
      const void* data = element == Element::kF32 ? static_cast<void*>(table_f32.data())
                                                  : static_cast<void*>(table_bf16.data());
      ASSERT_EQ(ops::cuda::Embed({.table = data,
                                  .table_element = element,
                                  .ids = device_ids.data(),
                                  .residual = residual.data(),
                                  .num_tokens = static_cast<int>(ids.size()),
                                  .width = width},
                                 nullptr),
                cudaSuccess);
      const std::vector<float> got = residual.Get();
      for (size_t i = 0; i < got.size(); ++i)
        ASSERT_EQ(got[i], table[static_cast<size_t>(ids[i / width]) * width + i % width]);
    }
  }
}

struct NormCase {
  int tokens, width;
  Element out;
  enum { kPlain, kDeltaF32, kDeltaBf16, kRows } mode = kPlain;
};

void RunNorm(const NormCase& c, uint64_t seed) {
  SCOPED_TRACE(testing::Message() << "T=" << c.tokens << " E=" << c.width
                                  << " out=" << static_cast<int>(c.out) << " mode=" << c.mode);
  constexpr float kEps = 1e-6f;
  Random random(seed);
  const int rows_there = c.mode == NormCase::kRows ? c.tokens + 3 : c.tokens;
  std::vector<float> residual = random.Values(static_cast<size_t>(rows_there) * c.width, 4.0f);
  for (int i = 0; i < c.width; ++i) residual[i] = 0.0f;  // a row of nothing
  const std::vector<float> delta = random.Values(static_cast<size_t>(c.tokens) * c.width, 2.0f);
  const std::vector<float> weight = random.Values(c.width, 0.5f, 1.0f);
  std::vector<int32_t> rows(c.tokens);
  for (int t = 0; t < c.tokens; ++t)
    rows[t] = c.mode == NormCase::kRows ? random.Between(0, rows_there - 1) : t;

  DeviceArray<float> device_residual(residual), delta_f32(delta), device_weight(weight);
  DeviceArray<uint16_t> delta_bf16(ToBf16(delta));
  DeviceArray<int32_t> device_rows(rows);
  Rows out(c.out, c.tokens, c.width);
  ops::cuda::RmsNormParams params;
  params.residual = device_residual.data();
  if (c.mode == NormCase::kRows) params.rows = device_rows.data();
  if (c.mode == NormCase::kDeltaF32) params.delta = delta_f32.data();
  if (c.mode == NormCase::kDeltaBf16) params.delta = delta_bf16.data();
  params.delta_element = c.mode == NormCase::kDeltaF32 ? Element::kF32 : Element::kBf16;
  params.weight = device_weight.data();
  params.out = out.view();
  params.num_tokens = c.tokens;
  params.width = c.width;
  params.eps = kEps;
  ASSERT_EQ(ops::cuda::RmsNorm(params, nullptr), cudaSuccess) << LastReport();

  std::vector<double> want;
  for (int t = 0; t < c.tokens; ++t) {
    float* x = residual.data() + static_cast<size_t>(rows[t]) * c.width;
    double sum = 0;
    for (int i = 0; i < c.width; ++i) {
      if (params.delta != nullptr) x[i] += delta[static_cast<size_t>(t) * c.width + i];
      sum += double{x[i]} * x[i];
    }
    const double scale = 1 / std::sqrt(sum / c.width + double{kEps});
    for (int i = 0; i < c.width; ++i) want.push_back(x[i] * scale * weight[i]);
  }
  // Chains of 64 squares, then a tree of 5 levels and a chain of 8; halved by the root; 4
  // roundings.
  out.Check(want, ((64 + 5 + 8) / 2.0 + 4) * 0x1p-24);
  EXPECT_EQ(device_residual.Get(), residual) << "residual += delta, in f32, and nothing else";
}

TEST_P(RowKernels, RmsNorm) {
  RunNorm({.tokens = 5, .width = 4096, .out = Element::kFp8}, 1);
  RunNorm({.tokens = 3, .width = 2560, .out = Element::kBf16, .mode = NormCase::kDeltaBf16}, 2);
  RunNorm({.tokens = 2, .width = 16384, .out = Element::kFp8, .mode = NormCase::kDeltaF32}, 3);
  RunNorm({.tokens = 7, .width = 8, .out = Element::kF32, .mode = NormCase::kRows}, 4);
  Random random(5);
  for (int i = 0; i < 8; ++i) {
    NormCase c;
    c.out = static_cast<Element>(random.Pick({0, 1, 3}));
    c.width = c.out == Element::kFp8 ? 128 * random.Between(1, 20) : 8 * random.Between(1, 320);
    c.tokens = random.Between(1, 6);
    c.mode = static_cast<decltype(c.mode)>(random.Between(0, 3));
    RunNorm(c, 10 + i);
  }
}

TEST_P(RowKernels, QuantizeRows) {
  Random random(10);
  for (const Element element : {Element::kF32, Element::kBf16}) {
    for (const Element out_element : {Element::kFp8, Element::kBf16, Element::kF32}) {
      const int width = 128 * random.Between(1, 20), tokens = random.Between(1, 6);
      const std::vector<float> in = random.Values(static_cast<size_t>(tokens) * width, 3.0f);
      DeviceArray<float> in_f32(in);
      DeviceArray<uint16_t> in_bf16(ToBf16(in));
      Rows out(out_element, tokens, width);
      ASSERT_EQ(ops::cuda::QuantizeRows(
                    {.rows = element == Element::kF32 ? static_cast<void*>(in_f32.data())
                                                      : in_bf16.data(),
                     .element = element,
                     .out = out.view(),
                     .num_tokens = tokens,
                     .width = width},
                    nullptr),
                cudaSuccess);
      out.Check(std::vector<double>(in.begin(), in.end()), 0);
    }
  }
  EXPECT_EQ(ops::cuda::QuantizeRows({.num_tokens = 1, .width = 128}, nullptr),
            cudaErrorInvalidValue);
}

TEST_P(RowKernels, SiluMul) {
  Random random(9);
  for (int i = 0; i < 10; ++i) {
    const Element element = random.Between(0, 1) == 0 ? Element::kF32 : Element::kBf16;
    const Element out_element = static_cast<Element>(random.Pick({0, 1, 3}));
    const int width =
        out_element == Element::kFp8 ? 128 * random.Between(1, 30) : 8 * random.Between(1, 300);
    const int tokens = random.Between(1, 5);
    SCOPED_TRACE(testing::Message()
                 << "T=" << tokens << " F=" << width << " out=" << static_cast<int>(out_element));
    std::vector<float> in = random.Values(static_cast<size_t>(tokens) * 2 * width, 3.0f);
    in[0] = -200.0f;  // e^200 is no f32
    in[1] = 90.0f;
    if (tokens > 2) in[in.size() - 1] = INFINITY;
    DeviceArray<float> in_f32(in);
    DeviceArray<uint16_t> in_bf16(ToBf16(in));
    Rows out(out_element, tokens, width);
    ASSERT_EQ(
        ops::cuda::SiluMul({.gate_up = element == Element::kF32 ? static_cast<void*>(in_f32.data())
                                                                : in_bf16.data(),
                            .element = element,
                            .out = out.view(),
                            .num_tokens = tokens,
                            .width = width},
                           nullptr),
        cudaSuccess);
    std::vector<double> want;
    for (int t = 0; t < tokens; ++t) {
      for (int k = 0; k < width; ++k) {
        const double gate = in[(static_cast<size_t>(t) * 2) * width + k];
        const double up = in[(static_cast<size_t>(t) * 2 + 1) * width + k];
        want.push_back(gate / (1 + std::exp(-gate)) * up);
      }
    }
    // e^x: |x| <= 20 times the rounding of x * log2(e), then five roundings of 2 ulp.
    out.Check(want, (20 + 10) * 0x1p-23);
  }
}

TEST(RowLaunchers, RefuseWhatTheKernelsCannotBear) {
  DeviceArray<float> data(1024);
  ops::cuda::RmsNormParams norm;
  norm.residual = data.data();
  norm.weight = data.data();
  norm.num_tokens = 1;
  norm.out = {.data = data.data(), .element = Element::kBf16};
  for (const int width : {0, 4, 12, 16392}) {
    norm.width = width;
    EXPECT_EQ(ops::cuda::RmsNorm(norm, nullptr), cudaErrorInvalidValue) << width;
  }
  norm.width = 136;
  norm.out = {.data = data.data(), .element = Element::kFp8, .scales = data.data(), .pitch = 4};
  EXPECT_EQ(ops::cuda::RmsNorm(norm, nullptr), cudaErrorInvalidValue);
  ops::cuda::SiluMulParams silu;
  silu.num_tokens = 1;
  silu.width = 136;
  silu.out = norm.out;
  EXPECT_EQ(ops::cuda::SiluMul(silu, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(ops::cuda::Embed({.num_tokens = 1, .width = 4}, nullptr), cudaErrorInvalidValue);
  GetStats() = Stats();
  norm.num_tokens = 0;
  norm.width = 128;
  EXPECT_EQ(ops::cuda::RmsNorm(norm, nullptr), cudaSuccess);
  EXPECT_EQ(GetStats().launches, 0u);
}

}  // namespace
}  // namespace baton::simt
