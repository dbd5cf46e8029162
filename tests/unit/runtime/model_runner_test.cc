#include "engine/runtime/model_runner.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "engine/base/fp8.h"
#include "gtest/gtest.h"
#include "tests/support/engine_steps.h"
#include "tests/support/tiny_checkpoint.h"

namespace baton::runtime {
namespace {

using testing_support::RandomTokens;
using testing_support::SmallOptions;
using testing_support::StepDriver;
using testing_support::TempDir;
using testing_support::TestSequence;
using testing_support::TinyCheckpoint;

class ModelRunnerTest : public ::testing::Test {
 protected:
  std::unique_ptr<ModelRunner> Create(const TinyCheckpoint& model, const char* kv_dtype = "auto") {
    model.WriteTo(dir_);
    options_ = SmallOptions(dir_.path());
    options_.kv_dtype = kv_dtype;
    absl::StatusOr<std::unique_ptr<ModelRunner>> runner = ModelRunner::Create(options_);
    EXPECT_TRUE(runner.ok()) << runner.status();
    return runner.ok() ? *std::move(runner) : nullptr;
  }

  TempDir dir_;
  ModelRunnerOptions options_;
};

std::vector<uint8_t> PoolBytes(ModelRunner& runner) {
  return {runner.kv_pool().data(), runner.kv_pool().data() + runner.kv_pool().size()};
}

class CountingObserver : public LayerObserver {
 public:
  explicit CountingObserver(ModelRunner& runner, kv::BlockId block)
      : runner_(runner), block_(block) {}
  void OnLayerDone(int layer) override {
    layers.push_back(layer);
    const kv::KvLayout& layout = runner_.layout();
    const uint8_t* row =
        runner_.kv_pool().data() + layout.BlockOffset(layer, block_) + layout.RowOffset(1, 1, 2);
    appended.push_back(*std::max_element(row, row + layout.row_bytes()) != 0);
  }

  std::vector<int> layers;
  std::vector<bool> appended;

 private:
  ModelRunner& runner_;
  kv::BlockId block_;
};

TEST_F(ModelRunnerTest, AutoChoosesBf16AndFp8ForQwen3AndFp8DynamicWithoutQkNorm) {
  std::unique_ptr<ModelRunner> runner = Create({});
  EXPECT_EQ(runner->weight_dtype(), ops::WeightDtype::kBf16);
  EXPECT_EQ(runner->layout().format, kv::KvFormat::kFp8);
  EXPECT_EQ(runner->kv_scales_fingerprint().size(), 64u);
  EXPECT_EQ(runner->kv_scales(1).size(), 4u);
  EXPECT_EQ(runner->max_model_len(), 256);
  TinyCheckpoint llama;
  llama.architecture = "LlamaForCausalLM";
  runner = Create(llama);
  EXPECT_EQ(runner->layout().format, kv::KvFormat::kFp8Dynamic);
  EXPECT_EQ(runner->kv_scales_fingerprint(), "");
  EXPECT_TRUE(runner->kv_scales(0).empty());
}

TEST_F(ModelRunnerTest, ObserverSeesEveryLayerOnceAfterItsAppend) {
  std::unique_ptr<ModelRunner> runner = Create({});
  CountingObserver observer(*runner, 3);
  const std::vector<uint32_t> tokens = {1, 2, 3};
  const std::vector<kv::BlockId> blocks = {3};
  for (const std::vector<int>& rows : {std::vector<int>{}, {2}}) {
    observer.layers.clear();
    StepTimings timings;
    absl::Span<float> logits;
    ASSERT_TRUE(runner->Step({{tokens, 0, blocks, rows}}, &observer, &logits, &timings).ok());
    EXPECT_EQ(observer.layers, (std::vector<int>{0, 1}));
    EXPECT_EQ(logits.size(), rows.size() * 48);
    EXPECT_GT(timings.append, absl::ZeroDuration());
    EXPECT_LT(timings.append, timings.total);
  }
  EXPECT_EQ(observer.appended, std::vector<bool>(4, true));
}

TEST_F(ModelRunnerTest, RefusedStepWritesNothing) {
  std::unique_ptr<ModelRunner> runner = Create({});
  const std::vector<uint8_t> before = PoolBytes(*runner);
  const std::vector<uint32_t> good = {1, 2, 3}, bad = {1, 48};
  const std::vector<kv::BlockId> blocks = {3}, other = {4};
  absl::Span<float> logits;
  EXPECT_EQ(
      runner->Step({{good, 0, blocks, {}}, {bad, 0, other, {}}}, nullptr, &logits, nullptr).code(),
      absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(PoolBytes(*runner), before);
}

TEST_F(ModelRunnerTest, StepWritesOnlyTheSlotsOfItsTokens) {
  for (const char* format : {"fp8", "fp8_dynamic", "bf16", "f32"}) {
    SCOPED_TRACE(format);
    std::unique_ptr<ModelRunner> runner = Create({}, format);
    std::memset(runner->kv_pool().data(), 0xa5, runner->kv_pool().size());
    const std::vector<uint32_t> tokens = {1, 2, 3};
    const std::vector<kv::BlockId> blocks = {3, 1};
    ASSERT_TRUE(runner->Step({{tokens, 63, blocks, {}}}, nullptr, nullptr, nullptr).ok());
    const kv::KvLayout& layout = runner->layout();
    for (int block = 0; block < layout.num_blocks; ++block) {
      for (int row = 0; row < kv::kBlockTokens; ++row) {
        const bool written = (block == 3 && row == 63) || (block == 1 && row < 2);
        for (int layer = 0; layer < 2; ++layer) {
          const uint8_t* data = runner->kv_pool().data() + layout.BlockOffset(layer, block) +
                                layout.RowOffset(0, 1, row);
          const std::vector<uint8_t> untouched(layout.row_bytes(), 0xa5);
          EXPECT_EQ(std::memcmp(data, untouched.data(), untouched.size()) != 0, written)
              << block << " " << row;
        }
      }
    }
  }
}

TEST_F(ModelRunnerTest, CopyBlockCopiesAllLayersAndNothingElse) {
  std::unique_ptr<ModelRunner> runner = Create({}, "fp8_dynamic");
  std::vector<uint8_t> want(runner->kv_pool().size());
  for (size_t i = 0; i < want.size(); ++i) want[i] = static_cast<uint8_t>(i * 131 >> 4);
  std::memcpy(runner->kv_pool().data(), want.data(), want.size());
  runner->CopyBlock(5, 9);
  const kv::KvLayout& layout = runner->layout();
  for (int layer = 0; layer < 2; ++layer) {
    std::memcpy(&want[layout.BlockOffset(layer, 9)], &want[layout.BlockOffset(layer, 5)],
                layout.block_bytes());
  }
  EXPECT_EQ(PoolBytes(*runner), want);
}

TEST_F(ModelRunnerTest, SharedPoolIsAMemfd) {
  TinyCheckpoint().WriteTo(dir_);
  options_ = SmallOptions(dir_.path());
  options_.shared_kv = true;
  absl::StatusOr<std::unique_ptr<ModelRunner>> runner = ModelRunner::Create(options_);
  ASSERT_TRUE(runner.ok()) << runner.status();
  EXPECT_GE((*runner)->kv_pool().fd(), 0);
  EXPECT_EQ((*runner)->kv_pool().size(), (*runner)->layout().pool_bytes());
}

TEST_F(ModelRunnerTest, PoolIsAsManyBlocksAsTheBytesHold) {
  TinyCheckpoint().WriteTo(dir_);
  options_ = SmallOptions(dir_.path());
  options_.num_blocks = 0;
  // One block: 2 layers * K and V * 2 heads * 64 tokens * 16 bytes.
  constexpr int64_t kBlockBytes = 2 * 2 * 2 * 64 * 16;
  options_.kv_cache_bytes = 10 * kBlockBytes + kBlockBytes - 1;
  absl::StatusOr<std::unique_ptr<ModelRunner>> runner = ModelRunner::Create(options_);
  ASSERT_TRUE(runner.ok()) << runner.status();
  EXPECT_EQ((*runner)->layout().num_blocks, 10);
}

TEST_F(ModelRunnerTest, BadSettingsAreRefusedBeforeAnythingIsLoaded) {
  TinyCheckpoint().WriteTo(dir_);
  const auto code_with = [&](auto change) {
    options_ = SmallOptions(dir_.path());
    change(options_);
    return ModelRunner::Create(options_).status().code();
  };
  EXPECT_EQ(code_with([](ModelRunnerOptions&) {}), absl::StatusCode::kOk);
  constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code_with([](ModelRunnerOptions& o) { o.backend = "gpu"; }), kInvalid);
  EXPECT_EQ(code_with([](ModelRunnerOptions& o) { o.weight_dtype = "fp16"; }), kInvalid);
  EXPECT_EQ(code_with([](ModelRunnerOptions& o) { o.kv_dtype = "fp8_e5m2"; }), kInvalid);
  EXPECT_EQ(code_with([](ModelRunnerOptions& o) { o.max_model_len = 257; }), kInvalid);
  EXPECT_EQ(code_with([](ModelRunnerOptions& o) { o.max_step_tokens = 0; }), kInvalid);
  EXPECT_EQ(code_with([](ModelRunnerOptions& o) { o.max_logit_rows = 0; }), kInvalid);
  EXPECT_EQ(code_with([](ModelRunnerOptions& o) { o.num_blocks = -1; }), kInvalid);
  EXPECT_EQ(code_with([](ModelRunnerOptions& o) {
              o.num_blocks = 0;
              o.kv_cache_bytes = 100;
            }),
            kInvalid);
  EXPECT_NE(code_with([](ModelRunnerOptions& o) { o.model_path += "/nowhere"; }),
            absl::StatusCode::kOk);
}

// FP8 weights on the CPU: a checkpoint's own codes, and the same ones made while loading, are the
// same numbers; with one rank and with two.
TEST_F(ModelRunnerTest, Fp8WeightsAreTheSameStoredOrRounded) {
  TinyCheckpoint model;
  model.hidden = 160;  // blocks of 128 and a rest
  model.ffn = 192;
  const auto logits_of = [&](bool stored, const char* dtype, int tp) {
    TempDir dir;
    model.fp8 = stored;
    model.WriteTo(dir);
    options_ = SmallOptions(dir.path());
    options_.weight_dtype = dtype;
    options_.tp = tp;
    const auto runner = ModelRunner::Create(options_);
    EXPECT_TRUE(runner.ok()) << runner.status();
    const std::vector<uint32_t> tokens = {3, 1, 4, 1, 5};
    const std::vector<kv::BlockId> blocks = {0};
    const std::vector<int> rows = {4};
    absl::Span<float> logits;
    EXPECT_TRUE((*runner)->Step({{tokens, 0, blocks, rows}}, nullptr, &logits, nullptr).ok());
    EXPECT_EQ((*runner)->weight_dtype(),
              ops::ParseWeightDtype(dtype).value_or(ops::WeightDtype::kFp8));
    return std::vector<float>(logits.begin(), logits.end());
  };
  const std::vector<float> rounded = logits_of(false, "fp8", 1);
  EXPECT_EQ(logits_of(true, "auto", 1), rounded);
  EXPECT_EQ(logits_of(true, "fp8", 2), rounded);
  EXPECT_NE(logits_of(false, "bf16", 1), rounded);
  EXPECT_EQ(logits_of(true, "bf16", 1), rounded)
      << "scales of powers of two: nothing is lost in bf16";
}

// Case 5.3: such a model loads, and its logits say so.
TEST_F(ModelRunnerTest, NanInAWeightReachesTheLogits) {
  TinyCheckpoint model;
  std::vector<float> down(32 * 64, 0.1f);
  down[70] = std::nanf("");
  model.values["model.layers.1.mlp.down_proj.weight"] = down;
  std::unique_ptr<ModelRunner> runner = Create(model);
  StepDriver driver(*runner);
  TestSequence sequence;
  EXPECT_TRUE(std::isnan(driver.Feed(&sequence, std::vector<uint32_t>{1, 2}, 2)[1][0]));
}

// Keys and values of layer `layer` as f32, [side][head][token][D].
std::vector<float> ReadF32(ModelRunner& runner, const TestSequence& sequence, int layer) {
  std::vector<float> values;
  const kv::KvLayout& layout = runner.layout();
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < layout.num_kv_heads; ++head) {
      for (size_t token = 0; token < sequence.cached.size(); ++token) {
        const uint8_t* row = runner.kv_pool().data() +
                             layout.BlockOffset(layer, sequence.blocks[token / kv::kBlockTokens]) +
                             layout.RowOffset(side, head, token % kv::kBlockTokens);
        const float* floats = reinterpret_cast<const float*>(row);
        values.insert(values.end(), floats, floats + layout.head_dim);
      }
    }
  }
  return values;
}

// Case 13.2: the bytes in the cache are those that the scales of the checkpoint give.
TEST_F(ModelRunnerTest, ScalesOfTheCheckpointDecideTheStoredBytes) {
  TinyCheckpoint model;
  for (const int layer : {0, 1}) {
    model.values[absl::StrCat("model.layers.", layer, ".self_attn.k_scale")] = {0.5f};
    model.values[absl::StrCat("model.layers.", layer, ".self_attn.v_scale")] = {2.0f};
  }
  const std::vector<uint32_t> tokens = RandomTokens(70, 48, 1);
  std::unique_ptr<ModelRunner> exact = Create(model, "f32");
  StepDriver exact_driver(*exact);
  TestSequence exact_sequence;
  exact_driver.Feed(&exact_sequence, tokens, 70);
  const std::vector<float> values = ReadF32(*exact, exact_sequence, 0);

  std::unique_ptr<ModelRunner> runner = Create(model, "fp8");
  StepDriver driver(*runner);
  TestSequence sequence;
  driver.Feed(&sequence, tokens, 70);
  const kv::KvLayout& layout = runner->layout();
  size_t i = 0;
  for (int side = 0; side < 2; ++side) {
    const float inverse_scale = side == 0 ? 2.0f : 0.5f;
    for (int head = 0; head < 2; ++head) {
      for (size_t token = 0; token < tokens.size(); ++token) {
        const uint8_t* row = runner->kv_pool().data() +
                             layout.BlockOffset(0, sequence.blocks[token / 64]) +
                             layout.RowOffset(side, head, token % 64);
        for (int d = 0; d < 16; ++d, ++i)
          ASSERT_EQ(row[d], base::Fp8FromFloat(values[i] * inverse_scale));
      }
    }
  }
}

TEST_F(ModelRunnerTest, SamplesCountWhatScalesOfTheCheckpointSaturate) {
  for (const float v_scale : {64.0f, 1.0f / (1 << 20)}) {
    SCOPED_TRACE(v_scale);
    TinyCheckpoint model;
    for (const int layer : {0, 1}) {
      model.values[absl::StrCat("model.layers.", layer, ".self_attn.k_scale")] = {64.0f};
      model.values[absl::StrCat("model.layers.", layer, ".self_attn.v_scale")] = {v_scale};
    }
    std::unique_ptr<ModelRunner> runner = Create(model, "fp8");
    StepDriver driver(*runner);
    TestSequence sequence;
    driver.Feed(&sequence, RandomTokens(20, 48, 1), 10);  // two steps, one a layer
    EXPECT_EQ(runner->saturated_samples()[0], 0u);
    // Of two layers, two heads and 16 values, all but those that are nearly zero.
    if (v_scale > 1) {
      EXPECT_EQ(runner->saturated_samples()[1], 0u);
    }
    if (v_scale < 1) {
      EXPECT_GT(runner->saturated_samples()[1], 60u);
    }
  }
}

// What DESIGN promises of scales from weights alone: nothing saturates. Checked on random models of
// every architecture with the activations they really have.
TEST_F(ModelRunnerTest, NothingSaturatesUnderScalesFromTheWeights) {
  for (const char* architecture : {"Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"}) {
    SCOPED_TRACE(architecture);
    TinyCheckpoint model;
    model.architecture = architecture;
    model.rope_scaling =
        "{\"rope_type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":64}";
    std::unique_ptr<ModelRunner> exact = Create(model, "f32");
    std::unique_ptr<ModelRunner> scaled = Create(model, "fp8");
    StepDriver driver(*exact);
    TestSequence sequence;
    driver.Feed(&sequence, RandomTokens(200, 48, 2), 200);
    for (int layer = 0; layer < 2; ++layer) {
      const std::vector<float> values = ReadF32(*exact, sequence, layer);
      const size_t per_head = values.size() / 4;
      for (size_t i = 0; i < values.size(); ++i) {
        ASSERT_LE(std::abs(values[i]), 448 * scaled->kv_scales(layer)[i / per_head])
            << "layer " << layer;
      }
    }
  }
}

}  // namespace
}  // namespace baton::runtime
