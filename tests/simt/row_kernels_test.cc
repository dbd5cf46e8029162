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
#include "tests/simt/device_rows.h"
#include "tests/simt/random_values.h"
#include "tests/simt/schedules.h"

namespace baton::simt {
namespace {

using ops::cuda::Element;

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

TEST_P(RowKernels, TakeDrawnPutsTokensOfDrawsInTheirPlaces) {
  constexpr int kDraws = 5;
  std::vector<ops::SampleResult> draws(kDraws);
  for (int i = 0; i < kDraws; ++i)
    draws[i] = {.status = ops::SampleStatus::kOk, .id = 1000 + i, .num_top = 0};
  draws[2].status = ops::SampleStatus::kNotFinite;
  draws[3].status = ops::SampleStatus::kAllMasked;
  DeviceArray<ops::SampleResult> results(draws);
  Random random(3);
  for (const int num_tokens : {1, 127, 128, 300}) {
    std::vector<int32_t> ids, drawn, want;
    for (int t = 0; t < num_tokens; ++t) {
      ids.push_back(random.Between(0, 99));
      drawn.push_back(random.Between(-1, kDraws - 1));
      const bool is_token = drawn[t] == 0 || drawn[t] == 1 || drawn[t] == 4;
      want.push_back(drawn[t] < 0 ? ids[t] : is_token ? 1000 + drawn[t] : ops::kNoTokenDrawn);
    }
    DeviceArray<int32_t> in(ids), from(drawn), out(ids.size());
    for (int32_t* to : {out.data(), in.data()}) {
      ASSERT_EQ(ops::cuda::TakeDrawn({.ids = in.data(),
                                      .drawn = from.data(),
                                      .results = results.data(),
                                      .out = to,
                                      .num_tokens = num_tokens},
                                     nullptr),
                cudaSuccess);
    }
    EXPECT_EQ(out.Get(), want);
    EXPECT_EQ(in.Get(), want);
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
  DeviceRows out(c.out, c.tokens, c.width);
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

// To the bit: scales are powers of two, and f16 numbers are f32 numbers.
TEST_P(RowKernels, QuantizeQueries) {
  Random random(11);
  for (const auto& [tokens, width, scale] :
       {std::tuple{1, 64, 1.0f}, {7, 640, 0x1p-6f}, {300, 2048, 0x1p-3f}, {3, 136, 0x1p4f}}) {
    std::vector<uint16_t> halves(static_cast<size_t>(tokens) * width);
    for (uint16_t& half : halves)
      half = static_cast<uint16_t>(random.Between(0, 0xffff));  // subnormal, infinite, NaN too
    DeviceArray<uint16_t> in(halves);
    DeviceArray<uint8_t> out(halves.size());
    ASSERT_EQ(ops::cuda::QuantizeQueries({.q = in.data(),
                                          .out = out.data(),
                                          .num_tokens = tokens,
                                          .width = width,
                                          .scale = scale},
                                         nullptr),
              cudaSuccess);
    const std::vector<uint8_t> got = out.Get();
    for (size_t i = 0; i < halves.size(); ++i) {
      const float value = FloatFromF16(halves[i]) / scale;
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(base::FloatFromFp8(got[i])));
      } else {
        ASSERT_EQ(got[i], base::Fp8FromFloat(value)) << value;
      }
    }
  }
  DeviceArray<uint8_t> two(64);
  const auto refused = [&](int width, float scale) {
    return ops::cuda::QuantizeQueries({.q = two.data(),
                                       .out = two.data(),
                                       .num_tokens = 1,
                                       .width = width,
                                       .scale = scale},
                                      nullptr) == cudaErrorInvalidValue;
  };
  EXPECT_TRUE(refused(12, 1.0f) && refused(16, 0.0f) && refused(16, 3.0f) && refused(0, 1.0f));
  EXPECT_EQ(ops::cuda::QuantizeQueries({}, nullptr), cudaErrorInvalidValue);
}

TEST_P(RowKernels, QuantizeRows) {
  Random random(10);
  for (const Element element : {Element::kF32, Element::kBf16}) {
    for (const Element out_element : {Element::kFp8, Element::kBf16, Element::kF32}) {
      const int width = 128 * random.Between(1, 20), tokens = random.Between(1, 6);
      const std::vector<float> in = random.Values(static_cast<size_t>(tokens) * width, 3.0f);
      DeviceArray<float> in_f32(in);
      DeviceArray<uint16_t> in_bf16(ToBf16(in));
      DeviceRows out(out_element, tokens, width);
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
    DeviceRows out(out_element, tokens, width);
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
  EXPECT_EQ(ops::cuda::TakeDrawn({.num_tokens = 1}, nullptr), cudaErrorInvalidValue);
  GetStats() = Stats();
  norm.num_tokens = 0;
  norm.width = 128;
  EXPECT_EQ(ops::cuda::RmsNorm(norm, nullptr), cudaSuccess);
  EXPECT_EQ(GetStats().launches, 0u);
}

}  // namespace
}  // namespace baton::simt
