// The fused kernel against double precision and against ref: random shapes, heads and tokens that
// end in the middle of a warp, rows without a slot, every cache format; and nothing but the
// addressed rows is written.

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "engine/base/fp8.h"
#include "engine/ops/cuda/kernels.h"
#include "engine/ops/quantize.h"
#include "engine/ops/ref/ref_attention.h"
#include "gtest/gtest.h"
#include "tests/simt/device_array.h"
#include "tests/simt/random_values.h"
#include "tests/simt/schedules.h"

namespace baton::simt {
namespace {

using ops::cuda::CacheFormat;
using ops::cuda::Element;

constexpr int kBlocks = 5, kPositions = 40;
constexpr float kEps = 1e-6f;
// Relative error of a value before rotation: a sum of D squares in chains of 16 and a tree of at
// most 5 levels, halved by the root, then six roundings.
constexpr double kError = ((16 + 5) / 2.0 + 6) * 0x1p-24;

struct Case {
  int tokens, heads, kv_heads, dim;
  bool norm = true;
  Element in = Element::kBf16, q = Element::kF16;
  CacheFormat format = CacheFormat::kFp8;
  uint64_t seed = 1;
};

kv::KvFormat Format(CacheFormat format) {
  switch (format) {
    case CacheFormat::kFp8:
      return kv::KvFormat::kFp8;
    case CacheFormat::kFp8Dynamic:
      return kv::KvFormat::kFp8Dynamic;
    case CacheFormat::kBf16:
      return kv::KvFormat::kBf16;
    case CacheFormat::kF32:
      return kv::KvFormat::kF32;
  }
  return kv::KvFormat::kFp8;
}

// Inputs on the host, what the kernel made of them, and the expected values in double.
class AppendRun {
 public:
  explicit AppendRun(const Case& c) : case_(c), random_(c.seed) {
    const int width = (c.heads + 2 * c.kv_heads) * c.dim;
    qkv_ = random_.Values(static_cast<size_t>(c.tokens) * width, 3.0f);
    // A value head without anything in it, one with the largest values, one with a NaN.
    for (int i = 0; i < c.dim && c.tokens > 2; ++i) qkv_[width - c.dim + i] = 0.0f;
    if (c.tokens > 2) qkv_[2 * width - 1] = base::RoundToBf16(3.0e38f);
    if (c.tokens > 2) qkv_[3 * width - 1] = NAN;
    q_weight_ = random_.Values(c.dim, 0.5f, 1.0f);
    k_weight_ = random_.Values(c.dim, 0.5f, 1.0f);
    for (int i = 0; i < kPositions * c.dim; ++i) rope_.push_back(std::cos(i * 0.37f));
    for (int i = 0; i < 2 * c.kv_heads; ++i)
      scales_.push_back(std::ldexp(1.0f, random_.Between(-8, 1)));
    const std::vector<int> places = random_.Distinct(c.tokens, kBlocks * kv::kBlockTokens);
    for (int t = 0; t < c.tokens; ++t) {
      slots_.push_back(random_.Between(0, 5) == 0 ? -1 : places[t]);
      positions_.push_back(random_.Between(0, kPositions - 1));
    }
    layout_ = {.num_layers = 1,
               .num_kv_heads = c.kv_heads,
               .head_dim = c.dim,
               .num_blocks = kBlocks,
               .format = Format(c.format)};
  }

  void Launch() {
    const Case& c = case_;
    DeviceArray<float> qkv_f32(qkv_), q_weight(q_weight_), k_weight(k_weight_), rope(rope_),
        scales(scales_);
    DeviceArray<uint16_t> qkv_bf16(ToBf16(qkv_));
    DeviceArray<int32_t> positions(positions_);
    DeviceArray<int64_t> slots(slots_);
    DeviceArray<uint8_t> q(static_cast<size_t>(c.tokens) * c.heads * c.dim *
                           (c.q == Element::kF16 ? 2 : 4));
    DeviceArray<uint8_t> cache(layout_.pool_bytes());
    cache.Fill();  // most of it is left alone
    ops::cuda::QkNormRopeAppendParams params;
    params.qkv = c.in == Element::kF32 ? static_cast<void*>(qkv_f32.data()) : qkv_bf16.data();
    params.qkv_element = c.in;
    params.q_out = q.data();
    params.q_element = c.q;
    params.num_tokens = c.tokens;
    params.num_heads = c.heads;
    params.q_weight = c.norm ? q_weight.data() : nullptr;
    params.k_weight = c.norm ? k_weight.data() : nullptr;
    params.eps = kEps;
    params.positions = positions.data();
    params.slots = slots.data();
    params.rope = rope.data();
    params.cache = {.base = cache.data(),
                    .block_bytes = static_cast<int64_t>(layout_.block_bytes()),
                    .format = c.format,
                    .num_kv_heads = c.kv_heads,
                    .head_dim = c.dim,
                    .scales = scales.data()};
    ASSERT_EQ(ops::cuda::QkNormRopeAppend(params, nullptr), cudaSuccess) << LastReport();
    const std::vector<uint8_t> bytes = q.Get();
    for (size_t i = 0; i < bytes.size();) {
      if (c.q == Element::kF16) {
        uint16_t bits;
        std::memcpy(&bits, &bytes[i], 2);
        q_.push_back(FloatFromF16(bits));
        i += 2;
      } else {
        float value;
        std::memcpy(&value, &bytes[i], 4);
        q_.push_back(value);
        i += 4;
      }
    }
    pool_ = cache.Get();
  }

  void Check() {
    const Case& c = case_;
    std::vector<bool> written(layout_.pool_bytes(), false);
    for (int t = 0; t < c.tokens; ++t) {
      for (int head = 0; head < c.heads; ++head) CheckQuery(t, head);
      for (int side = 0; side < 2 && slots_[t] >= 0; ++side) {
        for (int head = 0; head < c.kv_heads; ++head) CheckRow(t, side, head, &written);
      }
    }
    for (size_t i = 0; i < pool_.size(); ++i) {
      ASSERT_TRUE(written[i] || pool_[i] == 0xff) << "byte " << i << " has no token";
    }
  }

  // The same inputs through ref: values that no arithmetic touches must be the same bits.
  void CheckAgainstRef() {
    const Case& c = case_;
    ops::RefActivation activation;
    activation.width = (c.heads + 2 * c.kv_heads) * c.dim;
    activation.values = qkv_;
    std::vector<uint8_t> pool(layout_.pool_bytes(), 0xff);
    ops::QkNormRopeAppendArgs args;
    args.qkv = &activation;
    args.num_tokens = c.tokens;
    args.num_heads = c.heads;
    args.num_kv_heads = c.kv_heads;
    args.head_dim = c.dim;
    if (c.norm) args.q_weight = q_weight_;
    if (c.norm) args.k_weight = k_weight_;
    args.eps = kEps;
    args.positions = positions_;
    args.slots = slots_;
    args.rope = rope_;
    args.cache = {.layout = &layout_, .layer_base = pool.data(), .scales = scales_};
    ops::RefQkNormRopeAppend(args);
    size_t different = 0;
    for (int t = 0; t < c.tokens; ++t) {
      if (slots_[t] < 0) continue;
      for (int head = 0; head < c.kv_heads; ++head) {
        const size_t value_row = RowAt(t, 1, head), key_row = RowAt(t, 0, head);
        for (size_t i = 0; i < layout_.row_bytes(); ++i) {
          if (IsNanToken(t)) continue;
          ASSERT_EQ(pool_[value_row + i], pool[value_row + i]) << "token " << t << " byte " << i;
          different += pool_[key_row + i] != pool[key_row + i];
        }
      }
    }
    // Keys may round the other way where the two sums of squares differ in the last place.
    if (c.format == CacheFormat::kFp8) {
      EXPECT_LE(different, 2 + static_cast<size_t>(c.tokens) * c.kv_heads * c.dim / 1000);
    }
  }

 private:
  size_t RowAt(int t, int side, int head) const {
    return layout_.BlockOffset(0, static_cast<kv::BlockId>(slots_[t] / kv::kBlockTokens)) +
           layout_.RowOffset(side, head, static_cast<int>(slots_[t] % kv::kBlockTokens));
  }

  bool IsNanToken(int t) const { return case_.tokens > 2 && t == 2; }

  // Head `index` of token `t`, normed and rotated unless it is a value head, and the error that f32
  // may make of each element.
  std::vector<double> Expected(int t, int index, std::vector<double>* error) const {
    const Case& c = case_;
    const int width = (c.heads + 2 * c.kv_heads) * c.dim, half = c.dim / 2;
    const float* in = qkv_.data() + static_cast<size_t>(t) * width + index * c.dim;
    std::vector<double> x(in, in + c.dim);
    error->assign(c.dim, 0);
    if (index >= c.heads + c.kv_heads) return x;
    const std::vector<float>& weight = index < c.heads ? q_weight_ : k_weight_;
    double sum = 0;
    for (const double value : x) sum += value * value;
    const double scale = 1 / std::sqrt(sum / c.dim + double{kEps});
    if (c.norm)
      for (int i = 0; i < c.dim; ++i) x[i] *= scale * weight[i];
    const float* rope = rope_.data() + positions_[t] * c.dim;
    std::vector<double> rotated(c.dim);
    for (int i = 0; i < half; ++i) {
      const double low = x[i], high = x[half + i], cosine = rope[i], sine = rope[half + i];
      rotated[i] = low * cosine - high * sine;
      rotated[half + i] = high * cosine + low * sine;
      (*error)[i] = (std::fabs(low * cosine) + std::fabs(high * sine)) * kError;
      (*error)[half + i] = (std::fabs(high * cosine) + std::fabs(low * sine)) * kError;
    }
    return rotated;
  }

  void CheckQuery(int t, int head) const {
    const Case& c = case_;
    std::vector<double> error;
    const std::vector<double> want = Expected(t, head, &error);
    for (int i = 0; i < c.dim; ++i) {
      const double got = q_[(static_cast<size_t>(t) * c.heads + head) * c.dim + i];
      const double rounding = c.q == Element::kF16 ? std::fabs(want[i]) * 0x1p-11 + 0x1p-25 : 0;
      ASSERT_NEAR(got, want[i], error[i] + rounding) << "token " << t << " head " << head;
    }
  }

  void CheckRow(int t, int side, int head, std::vector<bool>* written) {
    const Case& c = case_;
    std::vector<double> error;
    const std::vector<double> want = Expected(t, c.heads + side * c.kv_heads + head, &error);
    const size_t row = RowAt(t, side, head);
    std::fill_n(written->begin() + row, layout_.row_bytes(), true);
    double scale = 1;
    bool zeros = false;
    if (c.format == CacheFormat::kFp8) scale = scales_[side * c.kv_heads + head];
    if (c.format == CacheFormat::kFp8Dynamic) {
      const int64_t block = slots_[t] / kv::kBlockTokens;
      const size_t at = layout_.BlockOffset(0, static_cast<kv::BlockId>(block)) +
                        layout_.ScaleOffset(side, head, static_cast<int>(slots_[t] % 64));
      std::fill_n(written->begin() + at, 4, true);
      float stored;
      std::memcpy(&stored, &pool_[at], 4);
      double largest = 0, largest_error = 0;
      bool has_nan = false;
      for (int i = 0; i < c.dim; ++i) {
        has_nan |= std::isnan(want[i]);
        if (std::fabs(want[i]) > largest) largest = std::fabs(want[i]);
        largest_error = std::max(largest_error, error[i]);
      }
      if (has_nan) {
        ASSERT_TRUE(std::isnan(stored));
      } else {
        ASSERT_NEAR(stored, largest / 448, (largest_error + largest * 0x1p-23) / 448);
      }
      scale = stored;
      zeros = has_nan || stored == 0;
    }
    for (int i = 0; i < c.dim; ++i) {
      const uint8_t* bytes = &pool_[row + i * layout_.element_bytes()];
      if (c.format == CacheFormat::kF32) {
        float got;
        std::memcpy(&got, bytes, 4);
        ASSERT_TRUE(std::isnan(want[i]) || std::fabs(got - want[i]) <= error[i]) << got;
      } else if (c.format == CacheFormat::kBf16) {
        uint16_t bits;
        std::memcpy(&bits, bytes, 2);
        const double got = base::FloatFromBf16(bits);
        const double slack = error[i] + std::fabs(want[i]) * 0x1p-8;
        ASSERT_TRUE(std::isnan(want[i]) || std::fabs(got - want[i]) <= slack) << got;
      } else if (zeros) {
        ASSERT_EQ(*bytes, 0);
      } else if (std::isnan(want[i])) {
        ASSERT_EQ(*bytes & 0x7f, 0x7f);
      } else {
        // The code is the nearest of a value within the error. (Dynamic scales round once more.)
        const double slack =
            error[i] / scale + (c.format == CacheFormat::kFp8Dynamic ? 448 * 0x1p-22 : 0);
        const double got = base::FloatFromFp8(*bytes), value = want[i] / scale;
        ASSERT_GE(got, base::FloatFromFp8(base::Fp8FromFloat(static_cast<float>(value - slack))));
        ASSERT_LE(got, base::FloatFromFp8(base::Fp8FromFloat(static_cast<float>(value + slack))));
      }
    }
  }

  Case case_;
  Random random_;
  std::vector<float> qkv_, q_weight_, k_weight_, rope_, scales_, q_;
  std::vector<int32_t> positions_;
  std::vector<int64_t> slots_;
  kv::KvLayout layout_;
  std::vector<uint8_t> pool_;
};

class QkNormRopeAppendKernel : public ScheduleTest {};
BATON_INSTANTIATE_SCHEDULES(QkNormRopeAppendKernel);

void RunCase(const Case& c) {
  SCOPED_TRACE(testing::Message() << "T=" << c.tokens << " Hq=" << c.heads << " Hkv=" << c.kv_heads
                                  << " D=" << c.dim << " norm=" << c.norm
                                  << " in=" << static_cast<int>(c.in) << " format="
                                  << static_cast<int>(c.format) << " seed=" << c.seed);
  AppendRun run(c);
  run.Launch();
  if (testing::Test::HasFatalFailure()) return;
  run.Check();
  run.CheckAgainstRef();
}

TEST_P(QkNormRopeAppendKernel, TheShapesOfQwen3) {
  RunCase({.tokens = 3, .heads = 32, .kv_heads = 8, .dim = 128});
  RunCase({.tokens = 4, .heads = 16, .kv_heads = 8, .dim = 128, .in = Element::kF32});
  RunCase(
      {.tokens = 3, .heads = 20, .kv_heads = 4, .dim = 128, .format = CacheFormat::kFp8Dynamic});
}

TEST_P(QkNormRopeAppendKernel, RandomShapes) {
  Random random(20240611);
  for (int i = 0; i < 24; ++i) {
    Case c;
    c.kv_heads = random.Between(1, 3);
    c.heads = c.kv_heads * random.Pick({1, 2, 3, 5});
    c.dim = random.Pick({32, 64, 128, 256});
    c.tokens = random.Between(1, 19);
    c.norm = random.Between(0, 3) != 0;
    c.in = random.Between(0, 1) == 0 ? Element::kBf16 : Element::kF32;
    c.q = random.Between(0, 1) == 0 ? Element::kF16 : Element::kF32;
    c.format = static_cast<CacheFormat>(random.Between(0, 3));
    c.seed = 100 + i;
    RunCase(c);
    if (testing::Test::HasFailure()) return;
  }
}

TEST_P(QkNormRopeAppendKernel, MoreTokensThanBlocksInTheGrid) {
  RunCase({.tokens = 300, .heads = 2, .kv_heads = 1, .dim = 256, .format = CacheFormat::kBf16});
}

TEST(QkNormRopeAppendLauncher, NothingToDoAndNothingKnown) {
  ops::cuda::QkNormRopeAppendParams params;
  params.num_heads = 2;
  params.cache.num_kv_heads = 1;
  params.cache.head_dim = 128;
  GetStats() = Stats();
  EXPECT_EQ(ops::cuda::QkNormRopeAppend(params, nullptr), cudaSuccess);
  EXPECT_EQ(GetStats().launches, 0u);
  params.num_tokens = 1;
  params.cache.head_dim = 96;
  EXPECT_EQ(ops::cuda::QkNormRopeAppend(params, nullptr), cudaErrorInvalidValue);
  params.cache.head_dim = 128;
  params.q_element = Element::kBf16;
  EXPECT_EQ(ops::cuda::QkNormRopeAppend(params, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace baton::simt
