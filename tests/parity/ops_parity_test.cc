// ref and every level of the CPU backend that this machine can run give the same bits, whatever the
// shape, the batch, the chunks and the number of threads.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "engine/ops/cpu/isa.h"
#include "tests/parity/ops_pipeline.h"

namespace baton::tests {
namespace {

using kv::KvFormat;
using ops::WeightDtype;

constexpr WeightDtype kDtypes[] = {WeightDtype::kF32, WeightDtype::kBf16, WeightDtype::kInt8,
                                   WeightDtype::kQ4};
constexpr KvFormat kFormats[] = {KvFormat::kFp8, KvFormat::kFp8Dynamic, KvFormat::kBf16,
                                 KvFormat::kF32};

std::vector<std::string> Levels() {
  std::istringstream names(ops::cpu::AvailableLevels());
  std::vector<std::string> levels;
  for (std::string name; names >> name;) levels.push_back(name);
  return levels;
}

std::unique_ptr<ops::Backend> Make(const std::string& name,
                                   WeightDtype dtype,
                                   const std::string& isa = "auto",
                                   int num_threads = 2) {
  ops::BackendOptions options;
  options.isa = isa;
  options.num_threads = num_threads;
  absl::StatusOr<std::unique_ptr<ops::Backend>> backend = ops::CreateBackend(name, dtype, options);
  EXPECT_TRUE(backend.ok()) << backend.status();
  return backend.ok() ? *std::move(backend) : nullptr;
}

std::vector<int32_t> Tokens(int count, int vocab, uint64_t seed) {
  std::vector<int32_t> ids(count);
  for (int i = 0; i < count; ++i)
    ids[i] = static_cast<int32_t>(std::fabs(Noise(seed, 77, i)) * 0.999f * vocab);
  return ids;
}

LayerSequence Prompt(
    int length, int start, int vocab, uint64_t seed, std::vector<kv::BlockId> blocks) {
  return {.tokens = Tokens(length, vocab, seed), .start = start, .block_table = std::move(blocks)};
}

// Steps of prompts, a continued chunk, decode rows and one row that stores nothing.
absl::Status RunCase(ops::Backend* backend, const LayerShape& shape, int length, Record* record) {
  LayerPipeline layer(backend, shape);
  const auto step = [&](std::vector<LayerSequence> sequences) {
    return layer.Step(sequences, record);
  };
  absl::Status status =
      step({Prompt(length, 0, shape.vocab, 1, {3, 5, 1}), Prompt(7, 0, shape.vocab, 2, {0, 2, 9})});
  status.Update(step(
      {Prompt(60, length, shape.vocab, 3, {3, 5, 1}), Prompt(1, 7, shape.vocab, 4, {0, 2, 9})}));
  LayerSequence silent = Prompt(1, length + 60, shape.vocab, 5, {3, 5, 1});
  silent.store = false;
  // Nothing of this row's own key is in the cache: what lies there is NaN, and so is its attention.
  status.Update(step({Prompt(1, 8, shape.vocab, 6, {0, 2, 9}), silent}));
  std::vector<float> bytes(layer.pool().size());
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = layer.pool().data()[i];
  record->emplace_back("pool", std::move(bytes));
  return status;
}

void ExpectAllLevelsEqualRef(const LayerShape& shape, int length) {
  Record expected;
  const std::unique_ptr<ops::Backend> ref = Make("ref", shape.weights);
  ASSERT_TRUE(RunCase(ref.get(), shape, length, &expected).ok());
  for (const std::string& level : Levels()) {
    for (const int num_threads : {1, 3}) {
      if (num_threads == 1 && level == "portable") continue;  // the slow ones once
      const std::unique_ptr<ops::Backend> cpu = Make("cpu", shape.weights, level, num_threads);
      ASSERT_NE(cpu, nullptr);
      Record record;
      const absl::Status status = RunCase(cpu.get(), shape, length, &record);
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(FirstDifference(expected, record), "")
          << cpu->description() << " " << shape.Describe() << " T=" << length;
    }
  }
}

class OpsParity : public testing::TestWithParam<std::tuple<WeightDtype, KvFormat>> {};

TEST_P(OpsParity, EveryLevelGivesTheBitsOfRef) {
  std::cout << "levels here: " << ops::cpu::AvailableLevels() << "\n";
  LayerShape shape;
  std::tie(shape.weights, shape.format) = GetParam();
  ExpectAllLevelsEqualRef(shape, 64);
}

INSTANTIATE_TEST_SUITE_P(All,
                         OpsParity,
                         testing::Combine(testing::ValuesIn(kDtypes), testing::ValuesIn(kFormats)),
                         [](const auto& info) {
                           return std::string(ops::WeightDtypeName(std::get<0>(info.param))) +
                                  "_kv_" + std::string(kv::KvFormatName(std::get<1>(info.param)));
                         });

TEST(OpsParityShapes, RandomShapesGiveTheBitsOfRef) {
  std::mt19937 random(20240607);
  const auto pick = [&](std::initializer_list<int> values) {
    return *(values.begin() + random() % values.size());
  };
  for (int i = 0; i < 24; ++i) {
    LayerShape shape;
    shape.seed = random();
    shape.weights = kDtypes[i % 4];
    shape.format = kFormats[i / 4 % 4];
    const int group = pick({1, 2, 3, 5});
    shape.num_kv_heads = pick({1, 2, 3});
    shape.num_heads = group * shape.num_kv_heads;
    shape.head_dim = pick({16, 32, 48, 64, 128, 20});
    if (shape.weights == WeightDtype::kQ4) {  // K in groups of 32
      shape.head_dim = pick({32, 64, 128});
      shape.hidden = pick({32, 96, 160});
      shape.ffn = pick({32, 96, 224});
    } else {
      shape.hidden = pick({32, 40, 72, 100, 136});
      shape.ffn = pick({16, 33, 88, 150});
    }
    shape.vocab = pick({7, 33, 64, 71});
    shape.qk_norm = random() % 2 == 0;
    shape.bias = random() % 2 == 0;
    ExpectAllLevelsEqualRef(shape, 1 + static_cast<int>(random() % 70));
    if (testing::Test::HasFailure()) return;
  }
}

// Case 14.1 at the level of operations: a token's numbers do not depend on what else is in the
// step, or on the chunks.
TEST(OpsInvariance, ChunksAndBatchesDoNotChangeABit) {
  for (const WeightDtype dtype : kDtypes) {
    for (const std::string& level : Levels()) {
      LayerShape shape;
      shape.weights = dtype;
      shape.format = dtype == WeightDtype::kF32 ? KvFormat::kF32 : KvFormat::kFp8;
      const std::unique_ptr<ops::Backend> cpu = Make("cpu", dtype, level);
      const std::vector<int32_t> tokens = Tokens(140, shape.vocab, 9);
      Record whole;
      LayerPipeline one(cpu.get(), shape);
      ASSERT_TRUE(
          one.Step({{.tokens = tokens, .start = 0, .block_table = {4, 8, 6}}}, &whole).ok());
      const std::vector<float>& expected = whole.back().second;
      for (const int chunk : {1, 2, 5, 13, 31, 64, 65}) {
        if (level == "portable" && chunk < 13) continue;  // slow, and the same source as the others
        LayerPipeline pieces(cpu.get(), shape);
        std::vector<float> got;
        for (int start = 0; start < 140; start += chunk) {
          const int end = std::min(140, start + chunk);
          Record record;
          // A stranger in front shifts every row of the step.
          std::vector<LayerSequence> step = {
              Prompt(1 + start % 4, 0, shape.vocab, start, {1, 2, 3})};
          step.push_back({.tokens = {tokens.begin() + start, tokens.begin() + end},
                          .start = start,
                          .block_table = {4, 8, 6}});
          ASSERT_TRUE(pieces.Step(step, &record).ok());
          const std::vector<float>& logits = record.back().second;
          got.insert(got.end(), logits.begin() + (1 + start % 4) * shape.vocab, logits.end());
        }
        EXPECT_EQ(FirstDifference({{"logits", expected}}, {{"logits", got}}), "")
            << level << " chunk=" << chunk;
      }
    }
  }
}

// A later token whose value row is NaN or infinite does not reach earlier queries of the same
// chunk.
TEST(OpsAttention, MaskedValueRowsCountAsZeroEvenIfTheyHoldNan) {
  for (const KvFormat format : kFormats) {
    for (const std::string& level : Levels()) {
      LayerShape shape;
      shape.format = format;
      shape.hidden = 64;
      Record clean, spoilt, ref_spoilt;
      const auto run = [&](ops::Backend* backend, bool spoil, Record* record) {
        LayerPipeline layer(backend, shape);
        Record ignored;
        ASSERT_TRUE(layer.Step({Prompt(70, 0, shape.vocab, 1, {3, 5})}, &ignored).ok());
        // Rows 40.. of block 3 are rewritten: token 40 becomes NaN for V of head 0.
        if (spoil)
          std::memset(layer.pool().data() + layer.layout().BlockOffset(0, 3) +
                          layer.layout().RowOffset(1, 0, 40),
                      0xff, layer.layout().row_bytes());
        LayerSequence again = Prompt(70, 0, shape.vocab, 1, {3, 5});
        again.store = false;
        ASSERT_TRUE(layer.Step({again}, record).ok());
      };
      const std::unique_ptr<ops::Backend> cpu = Make("cpu", shape.weights, level),
                                          ref = Make("ref", shape.weights);
      run(cpu.get(), false, &clean);
      run(cpu.get(), true, &spoilt);
      run(ref.get(), true, &ref_spoilt);
      EXPECT_EQ(FirstDifference(ref_spoilt, spoilt), "") << level;
      const std::vector<float>&a = clean.back().second, &b = spoilt.back().second;
      EXPECT_EQ(std::memcmp(a.data(), b.data(), 40 * shape.vocab * sizeof(float)), 0) << level;
      EXPECT_TRUE(std::isnan(b[40 * shape.vocab])) << level;
    }
  }
}

// One linear layer in 4 bits: its weights, and the norm's weights that shape its input.
struct Q4Case {
  std::function<void(int row, uint8_t* codes, float* scales, float* minimums)> weights;
  std::vector<float> norm;
};

Record RunQ4(ops::Backend* backend, const Q4Case& c) {
  constexpr int kRows = 40, kTokens = 9;
  const int cols = static_cast<int>(c.norm.size());
  ops::MatrixSource source;
  source.rows = kRows;
  source.cols = cols;
  source.read_row = [=](int row, float* out) {
    for (int k = 0; k < cols; ++k) out[k] = row % 3 == 0 ? 1.0f : Noise(3, row, k);
  };
  const auto table = *backend->Pack(source, false);
  source.read_row_q4 = [&](int row, uint8_t* codes, float* scales, float* minimums) {
    c.weights(row, codes, scales, minimums);
    return true;
  };
  const auto weights = *backend->Pack(source, false);
  const auto residual = *backend->NewActivation(ops::ActivationKind::kResidual, kTokens, cols);
  const auto sum = *backend->NewActivation(ops::ActivationKind::kResidual, kTokens, kRows);
  const auto x = *backend->NewActivation(ops::ActivationKind::kLinearInput, kTokens, cols);
  const auto out = *backend->NewActivation(ops::ActivationKind::kProjected, kTokens, kRows);
  std::vector<int32_t> ids(kTokens);
  for (int t = 0; t < kTokens; ++t) ids[t] = t;
  Record record;
  for (int count = 1; count <= kTokens; ++count) {
    const auto some = absl::MakeConstSpan(ids).first(count);
    EXPECT_TRUE(backend->Embed(*table, some, residual.get()).ok());
    EXPECT_TRUE(backend->RmsNorm(*residual, count, c.norm, 1e-6f, x.get()).ok());
    record.emplace_back("x", *backend->Read(*x, count, cols));
    EXPECT_TRUE(backend->QkvProject(*x, count, *weights, {}, out.get()).ok());
    record.emplace_back("out", *backend->Read(*out, count, kRows));
    EXPECT_TRUE(backend->ProjectAdd(*x, count, *weights, sum.get()).ok());
    record.emplace_back("sum", *backend->Read(*sum, count, kRows));
    EXPECT_TRUE(backend->Embed(*weights, some, residual.get()).ok());
    record.emplace_back("rows", *backend->Read(*residual, count, cols));
  }
  return record;
}

void ExpectQ4EqualsRef(const Q4Case& c, const std::string& what) {
  const Record expected = RunQ4(Make("ref", WeightDtype::kQ4).get(), c);
  for (const std::string& level : Levels())
    EXPECT_EQ(FirstDifference(expected, RunQ4(Make("cpu", WeightDtype::kQ4, level).get(), c)), "")
        << level << " " << what;
}

// Scales and minimums that are f16 values, or not, or huge, infinite or NaN.
TEST(OpsQ4, ScalesOfAnySizeGiveTheBitsOfRef) {
  constexpr int kCols = 96;
  for (const bool half : {true, false}) {
    for (const float large : {1.0f, 6e-8f, 1e-40f, 65504.0f, 1e32f, 3e38f, INFINITY, NAN}) {
      Q4Case c;
      c.norm.assign(kCols, 1e-3f);
      c.weights = [=](int row, uint8_t* codes, float* scales, float* minimums) {
        for (int k = 0; k < kCols; ++k) codes[k] = static_cast<uint8_t>((row * 7 + k * 5) % 16);
        for (int group = 0; group < kCols / 32; ++group) {
          scales[group] = half ? static_cast<float>(row + group) / 1024 : Noise(1, row, group);
          minimums[group] = half ? static_cast<float>(row - 20) / 512 : Noise(2, row, group);
        }
        if (row == 17) scales[1] = large;
        if (row == 5) minimums[2] = -large;
      };
      ExpectQ4EqualsRef(c, absl::StrCat(large, half ? " in f16" : ""));
    }
  }
}

// Groups of zeros, of denormals, of nothing but the largest code, with an infinity or a NaN.
TEST(OpsQ4, InputsOfAnySizeGiveTheBitsOfRef) {
  constexpr int kCols = 96;
  for (const float odd : {0.0f, 1e-39f, 1e-31f, 3e-30f, 1e30f, 3e38f, INFINITY, NAN}) {
    for (const bool whole_group : {true, false}) {
      Q4Case c;
      c.norm.assign(kCols, 0.5f);
      for (int k = 32; k < (whole_group ? 64 : 33); ++k) c.norm[k] = k % 2 == 0 ? odd : -odd;
      c.weights = [=](int row, uint8_t* codes, float* scales, float* minimums) {
        std::fill_n(codes, kCols, static_cast<uint8_t>(row % 2 == 0 ? 15 : row % 16));
        std::fill_n(scales, kCols / 32, 0.25f);
        std::fill_n(minimums, kCols / 32, row % 4 < 2 ? 0.0f : -2.0f);
      };
      ExpectQ4EqualsRef(c, absl::StrCat(odd));
    }
  }
}

// The largest sum there is: 32 products of 15 and 127.
TEST(OpsQ4, LargestCodesDoNotOverflow) {
  for (const float sign : {1.0f, -1.0f}) {
    Q4Case c;
    c.norm.assign(64, sign);
    c.weights = [](int, uint8_t* codes, float* scales, float* minimums) {
      std::fill_n(codes, 64, uint8_t{15});
      std::fill_n(scales, 2, 1.0f);
      std::fill_n(minimums, 2, 0.0f);
    };
    for (const std::string& level : Levels()) {
      const Record record = RunQ4(Make("cpu", WeightDtype::kQ4, level).get(), c);
      // Token 0 is a row of equal values, whose norm is 1 but for eps.
      EXPECT_NEAR(record[1].second[0], sign * 64 * 15, 64 * 15 * 1e-5) << level;
    }
  }
}

}  // namespace
}  // namespace baton::tests
