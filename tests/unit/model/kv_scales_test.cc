#include "engine/model/kv_scales.h"

#include <cmath>
#include <limits>
#include <memory>

#include "engine/model/checkpoint.h"
#include "gtest/gtest.h"
#include "tests/support/tiny_checkpoint.h"

namespace baton::model {
namespace {

using testing_support::TempDir;
using testing_support::TinyCheckpoint;

constexpr char kKNorm[] = "model.layers.1.self_attn.k_norm.weight";
constexpr char kKProj[] = "model.layers.1.self_attn.k_proj.weight";
constexpr char kVProj[] = "model.layers.1.self_attn.v_proj.weight";
constexpr char kKBias[] = "model.layers.1.self_attn.k_proj.bias";
constexpr char kVBias[] = "model.layers.1.self_attn.v_proj.bias";
constexpr char kAttnNorm[] = "model.layers.1.input_layernorm.weight";

KvScaleTable ScalesOf(const TinyCheckpoint& model) {
  TempDir dir;
  model.WriteTo(dir);
  absl::StatusOr<std::unique_ptr<Checkpoint>> checkpoint = Checkpoint::Open(dir.path());
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  return MakeKvScales(**checkpoint);
}

// Zeros but for one value.
std::vector<float> OneAt(int size, int index, float value) {
  std::vector<float> values(size, 0.0f);
  values[index] = value;
  return values;
}

TEST(RoundUpToPowerOfTwoTest, IsTheSmallestPowerThatIsNotBelow) {
  EXPECT_EQ(RoundUpToPowerOfTwo(1.0), 1.0f);
  EXPECT_EQ(RoundUpToPowerOfTwo(std::nextafter(1.0, 2.0)), 2.0f);
  EXPECT_EQ(RoundUpToPowerOfTwo(std::nextafter(1.0, 0.0)), 1.0f);
  EXPECT_EQ(RoundUpToPowerOfTwo(0.3), 0.5f);
  EXPECT_EQ(RoundUpToPowerOfTwo(0.25), 0.25f);
  EXPECT_EQ(RoundUpToPowerOfTwo(5.0), 8.0f);
}

TEST(RoundUpToPowerOfTwoTest, StaysWithinItsLimits) {
  EXPECT_EQ(RoundUpToPowerOfTwo(0.0), 1.0f);
  EXPECT_EQ(RoundUpToPowerOfTwo(1e-300), std::ldexp(1.0f, -96));
  EXPECT_EQ(RoundUpToPowerOfTwo(1e300), std::ldexp(1.0f, 96));
  EXPECT_EQ(RoundUpToPowerOfTwo(std::numeric_limits<double>::infinity()), std::ldexp(1.0f, 96));
  EXPECT_EQ(RoundUpToPowerOfTwo(std::nan("")), std::ldexp(1.0f, 96));
}

TEST(KvScalesTest, NormedKeysUseTheLargestNormWeight) {
  TinyCheckpoint model;  // D = 16: sqrt(D) = 4
  model.values[kKNorm] = OneAt(16, 5, -112.0f);
  // 4 * 112 / 448 = 1, a power of two itself.
  EXPECT_EQ(ScalesOf(model).layer(1)[0], 1.0f);
  model.values[kKNorm] = OneAt(16, 5, 112.5f);
  EXPECT_EQ(ScalesOf(model).layer(1)[0], 2.0f);
  EXPECT_EQ(ScalesOf(model).layer(1)[1], 2.0f);
}

TEST(KvScalesTest, YarnsAttentionFactorRaisesTheKeyBoundOnly) {
  TinyCheckpoint model;
  model.values[kKNorm] = OneAt(16, 0, 112.0f);
  model.values[kVProj] = std::vector<float>(2 * 16 * 32, 0.0f);
  model.rope_scaling =
      "{\"rope_type\":\"yarn\",\"factor\":2.0,\"original_max_position_embeddings\":128,\"attention_"
      "factor\":1.1}";
  const KvScaleTable scales = ScalesOf(model);
  EXPECT_EQ(scales.layer(1)[0], 2.0f);
  EXPECT_EQ(scales.layer(1)[2], 1.0f);  // all zero
}

TEST(KvScalesTest, ValuesUseTheLargestRowOfTheHeadWithTheNormWeight) {
  TinyCheckpoint model;
  model.hidden = 64;  // sqrt(E) = 8
  model.values[kAttnNorm] = std::vector<float>(64, 0.5f);
  // Head 1, row 3: (48, 64) * 0.5 has norm 40; 8 * 40 / 448 = 0.714.
  std::vector<float> weights(2 * 16 * 64, 0.0f);
  weights[(16 + 3) * 64 + 7] = 48;
  weights[(16 + 3) * 64 + 9] = -64;
  weights[2 * 64] = 1;  // head 0, row 2: 8 * 0.5 / 448 = 0.0089
  model.values[kVProj] = weights;
  const KvScaleTable scales = ScalesOf(model);
  EXPECT_EQ(scales.layer(1)[3], 1.0f);
  EXPECT_EQ(scales.layer(1)[2], 0.015625f);
}

TEST(KvScalesTest, BiasIsAddedToTheBound) {
  TinyCheckpoint model;
  model.architecture = "Qwen2ForCausalLM";
  model.values[kVProj] = std::vector<float>(2 * 16 * 32, 0.0f);
  model.values[kVBias] = OneAt(32, 20, -449.0f);
  model.values[kKProj] = std::vector<float>(2 * 16 * 32, 0.0f);
  model.values[kKBias] = std::vector<float>(32, 0.0f);
  // The pair (3, 3 + 8) of head 0 may turn into its norm, sqrt(300^2 + 400^2) = 500.
  model.values[kKBias][3] = 300;
  model.values[kKBias][11] = 400;
  const KvScaleTable scales = ScalesOf(model);
  EXPECT_EQ(scales.layer(1)[0], 2.0f);
  EXPECT_EQ(scales.layer(1)[1], 1.0f);
  EXPECT_EQ(scales.layer(1)[2], 1.0f);
  EXPECT_EQ(scales.layer(1)[3], 2.0f);
}

TEST(KvScalesTest, DamagedWeightsGetTheWidestScaleAndStillLoad) {
  TinyCheckpoint model;
  model.values[kKNorm] = OneAt(16, 2, std::nanf(""));
  EXPECT_EQ(ScalesOf(model).layer(1)[0], std::ldexp(1.0f, 96));
}

// Case 13.2
TEST(KvScalesTest, ScalesOfTheCheckpointWin) {
  TinyCheckpoint model;
  for (const int layer : {0, 1}) {
    model.values[absl::StrCat("model.layers.", layer, ".self_attn.k_scale")] = {0.5f};
    model.values[absl::StrCat("model.layers.", layer, ".self_attn.v_scale")] = {2.0f};
  }
  const KvScaleTable scales = ScalesOf(model);
  EXPECT_TRUE(scales.from_checkpoint());
  for (const int layer : {0, 1}) {
    EXPECT_EQ(std::vector<float>(scales.layer(layer).begin(), scales.layer(layer).end()),
              (std::vector<float>{0.5f, 0.5f, 2.0f, 2.0f}));
  }
}

// Case 13.2: stored codes need powers of two; rounded up, nothing saturates that did not before.
TEST(KvScalesTest, OtherScalesOfTheCheckpointAreRoundedUp) {
  TinyCheckpoint model;
  for (const int layer : {0, 1}) {
    model.values[absl::StrCat("model.layers.", layer, ".self_attn.k_proj.k_scale")] = {0.3f};
    model.values[absl::StrCat("model.layers.", layer, ".self_attn.v_proj.v_scale")] = {0.02f};
  }
  const KvScaleTable scales = ScalesOf(model);
  EXPECT_EQ(scales.layer(0)[0], 0.5f);
  EXPECT_EQ(scales.layer(0)[2], 0.03125f);
}

// Case 13.2
TEST(KvScalesTest, WithoutScalesInTheCheckpointTheyComeFromTheWeights) {
  const KvScaleTable scales = ScalesOf(TinyCheckpoint{});
  EXPECT_FALSE(scales.from_checkpoint());
  for (const float scale : scales.layer(0)) {
    EXPECT_NE(scale, 1.0f);
    EXPECT_EQ(std::exp2(std::round(std::log2(scale))), scale);
  }
}

// Case 13.2
TEST(KvScalesTest, ScalesForSomeLayersOnlyAreRefused) {
  TinyCheckpoint model;
  model.values["model.layers.1.self_attn.k_scale"] = {0.5f};
  model.values["model.layers.1.self_attn.v_scale"] = {0.5f};
  TempDir dir;
  model.WriteTo(dir);
  EXPECT_EQ(Checkpoint::Open(dir.path()).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(KvScalesTest, FingerprintFollowsTheScales) {
  TinyCheckpoint model;
  const std::string first = ScalesOf(model).Fingerprint();
  EXPECT_EQ(first.size(), 64u);
  EXPECT_EQ(ScalesOf(model).Fingerprint(), first);
  model.values[kKNorm] = OneAt(16, 0, 1000.0f);
  EXPECT_NE(ScalesOf(model).Fingerprint(), first);
  EXPECT_EQ(KvScaleTable().Fingerprint(), "");
}

TEST(ResolveKvFormatTest, AutoIsFp8OnlyWithQkNorm) {
  ModelConfig config;
  config.qk_norm = true;
  EXPECT_EQ(*ResolveKvFormat(config, "auto"), kv::KvFormat::kFp8);
  config.qk_norm = false;
  EXPECT_EQ(*ResolveKvFormat(config, "auto"), kv::KvFormat::kFp8Dynamic);
  EXPECT_EQ(*ResolveKvFormat(config, "fp8"), kv::KvFormat::kFp8);
}

// Case 18.2
TEST(ResolveKvFormatTest, OtherNamesAreRefusedWithTheAcceptedOnes) {
  for (const char* name : {"fp8_e5m2", "int3", "FP8 ", ""}) {
    const absl::Status status = ResolveKvFormat(ModelConfig{}, name).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("fp8_dynamic"), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace baton::model
