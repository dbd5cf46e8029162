#include "engine/model/weights.h"

#include <memory>
#include <string>
#include <vector>

#include "engine/base/dequant.h"
#include "engine/model/checkpoint.h"
#include "gtest/gtest.h"
#include "tests/support/tiny_checkpoint.h"

namespace baton::model {
namespace {

using testing_support::GgufBytes;
using testing_support::Raw;
using testing_support::TempDir;
using testing_support::TinyCheckpoint;

class PlainMatrix : public ops::Matrix {
 public:
  int rows() const override { return source_rows; }
  int cols() const override { return source_cols; }
  size_t bytes() const override { return values.size() * sizeof(float); }

  int source_rows = 0;
  int source_cols = 0;
  int first_col = 0;
  bool interleaved = false;
  bool has_q4 = false;
  std::vector<float> values;
};

// Packs by reading every row and computes nothing.
class PackOnlyBackend : public ops::Backend {
 public:
  absl::string_view name() const override { return "pack-only"; }
  std::string description() const override { return "pack-only"; }
  ops::WeightDtype weight_dtype() const override { return ops::WeightDtype::kF32; }
  absl::StatusOr<std::unique_ptr<ops::Matrix>> Pack(const ops::MatrixSource& source,
                                                    bool interleave_half) override {
    auto matrix = std::make_unique<PlainMatrix>();
    matrix->source_rows = source.rows;
    matrix->source_cols = source.cols;
    matrix->interleaved = interleave_half;
    matrix->first_col = source.first_col;
    const size_t cols = source.source_cols();
    matrix->values.resize(source.rows * cols);
    for (int row = 0; row < source.rows; ++row) {
      source.read_row(row, matrix->values.data() + row * cols);
    }
    std::vector<uint8_t> codes(cols);
    std::vector<float> scales(cols), mins(cols);
    matrix->has_q4 = source.read_row_q4(0, codes.data(), scales.data(), mins.data());
    if (source.rows == fail_rows) return absl::InvalidArgumentError("no");
    return std::unique_ptr<ops::Matrix>(std::move(matrix));
  }
  absl::StatusOr<std::unique_ptr<ops::Activation>> NewActivation(ops::ActivationKind,
                                                                 int,
                                                                 int) override {
    return None();
  }
  absl::Status Embed(const ops::Matrix&, absl::Span<const int32_t>, ops::Activation*) override {
    return None();
  }
  absl::Status RmsNorm(
      const ops::Activation&, int, absl::Span<const float>, float, ops::Activation*) override {
    return None();
  }
  absl::Status QkvProject(const ops::Activation&,
                          int,
                          const ops::Matrix&,
                          absl::Span<const float>,
                          ops::Activation*) override {
    return None();
  }
  absl::Status QkNormRopeAppend(const ops::QkNormRopeAppendArgs&) override { return None(); }
  absl::Status PagedAttention(const ops::PagedAttentionArgs&) override { return None(); }
  absl::Status ProjectAdd(const ops::Activation&,
                          int,
                          const ops::Matrix&,
                          ops::Activation*) override {
    return None();
  }
  absl::Status GateUpSilu(const ops::Activation&,
                          int,
                          const ops::Matrix&,
                          ops::Activation*) override {
    return None();
  }
  absl::Status Logits(const ops::Activation&,
                      absl::Span<const int32_t>,
                      absl::Span<const float>,
                      float,
                      const ops::Matrix&,
                      float*) override {
    return None();
  }
  absl::Status Synchronize() override { return None(); }
  absl::StatusOr<std::vector<float>> Read(const ops::Activation&, int, int) override {
    return None();
  }

  int fail_rows = -1;

 private:
  static absl::Status None() { return absl::UnimplementedError("packs only"); }
};

const PlainMatrix& Plain(const ops::Matrix& matrix) {
  return static_cast<const PlainMatrix&>(matrix);
}

std::unique_ptr<Checkpoint> Open(const TempDir& dir, const std::string& file = "") {
  absl::StatusOr<std::unique_ptr<Checkpoint>> checkpoint =
      Checkpoint::Open(file.empty() ? dir.path() : dir.File(file));
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  return checkpoint.ok() ? *std::move(checkpoint) : nullptr;
}

ShardPlan Shard(const Checkpoint& checkpoint, int tp, int rank) {
  absl::StatusOr<ShardPlan> plan =
      ShardPlan::Make(checkpoint.config(), ops::WeightDtype::kF32, tp, rank);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *plan;
}

absl::StatusOr<Weights> LoadAll(const Checkpoint& checkpoint, ops::Backend& backend) {
  return LoadWeights(checkpoint, Shard(checkpoint, 1, 0), backend.weight_dtype(), backend);
}

std::vector<float> RowOf(const Checkpoint& checkpoint, TensorRole role, int layer, int row) {
  std::vector<float> values(checkpoint.shape(role, layer).cols);
  checkpoint.ReadRow(role, layer, row, values.data());
  return values;
}

std::vector<float> RowOf(const PlainMatrix& matrix, int row) {
  const size_t cols = matrix.values.size() / matrix.rows();
  return {matrix.values.begin() + row * cols, matrix.values.begin() + (row + 1) * cols};
}

// Rank 1 of 2: its heads' rows of q, k, v and their biases, its rows of gate and up; of o and down
// whole rows, with the columns that are its own.
TEST(LoadWeightsTest, ARankReadsItsShare) {
  TempDir dir;
  TinyCheckpoint model;
  model.architecture = "Qwen2ForCausalLM";
  model.WriteTo(dir);
  const std::unique_ptr<Checkpoint> checkpoint = Open(dir);
  PackOnlyBackend backend;
  absl::StatusOr<Weights> weights =
      LoadWeights(*checkpoint, Shard(*checkpoint, 2, 1), backend.weight_dtype(), backend);
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(weights->embed, nullptr) << "rank 0's";
  const LayerWeights& layer = weights->layers[1];
  const PlainMatrix& qkv = Plain(*layer.qkv);
  ASSERT_EQ(qkv.rows(), (2 + 1 + 1) * 16);
  EXPECT_EQ(RowOf(qkv, 0), RowOf(*checkpoint, TensorRole::kQ, 1, 2 * 16));
  EXPECT_EQ(RowOf(qkv, 2 * 16), RowOf(*checkpoint, TensorRole::kK, 1, 16));
  EXPECT_EQ(RowOf(qkv, 3 * 16 + 5), RowOf(*checkpoint, TensorRole::kV, 1, 16 + 5));
  ASSERT_EQ(layer.qkv_bias.size(), 64u);
  EXPECT_EQ(layer.qkv_bias[0], RowOf(*checkpoint, TensorRole::kQBias, 1, 0)[2 * 16]);
  EXPECT_EQ(layer.qkv_bias[63], RowOf(*checkpoint, TensorRole::kVBias, 1, 0)[31]);
  const PlainMatrix& gate_up = Plain(*layer.gate_up);
  ASSERT_EQ(gate_up.rows(), 64);
  EXPECT_EQ(RowOf(gate_up, 1), RowOf(*checkpoint, TensorRole::kGate, 1, 33));
  EXPECT_EQ(RowOf(gate_up, 32 + 1), RowOf(*checkpoint, TensorRole::kUp, 1, 33));
  for (const auto& [matrix, role] :
       {std::pair(layer.o.get(), TensorRole::kO), std::pair(layer.down.get(), TensorRole::kDown)}) {
    const PlainMatrix& part = Plain(*matrix);
    EXPECT_EQ(part.cols(), 32);
    EXPECT_EQ(part.first_col, 32);
    EXPECT_EQ(RowOf(part, 3), RowOf(*checkpoint, role, 1, 3)) << "the whole row is read";
  }
}

TEST(LoadWeightsTest, FusesQkvAndGateUpInOrder) {
  TempDir dir;
  TinyCheckpoint model;
  model.architecture = "Qwen2ForCausalLM";
  model.WriteTo(dir);
  const std::unique_ptr<Checkpoint> checkpoint = Open(dir);
  PackOnlyBackend backend;
  absl::StatusOr<Weights> weights = LoadAll(*checkpoint, backend);
  ASSERT_TRUE(weights.ok()) << weights.status();
  ASSERT_EQ(weights->layers.size(), 2u);
  for (int layer = 0; layer < 2; ++layer) {
    const PlainMatrix& qkv = Plain(*weights->layers[layer].qkv);
    ASSERT_EQ(qkv.rows(), 64 + 32 + 32);
    EXPECT_FALSE(qkv.interleaved);
    EXPECT_EQ(RowOf(qkv, 63), RowOf(*checkpoint, TensorRole::kQ, layer, 63));
    EXPECT_EQ(RowOf(qkv, 64), RowOf(*checkpoint, TensorRole::kK, layer, 0));
    EXPECT_EQ(RowOf(qkv, 96 + 5), RowOf(*checkpoint, TensorRole::kV, layer, 5));
    const PlainMatrix& gate_up = Plain(*weights->layers[layer].gate_up);
    ASSERT_EQ(gate_up.rows(), 128);
    EXPECT_TRUE(gate_up.interleaved);
    EXPECT_EQ(RowOf(gate_up, 63), RowOf(*checkpoint, TensorRole::kGate, layer, 63));
    EXPECT_EQ(RowOf(gate_up, 64), RowOf(*checkpoint, TensorRole::kUp, layer, 0));
    EXPECT_EQ(RowOf(Plain(*weights->layers[layer].down), 3),
              RowOf(*checkpoint, TensorRole::kDown, layer, 3));
    EXPECT_EQ(RowOf(Plain(*weights->layers[layer].o), 3),
              RowOf(*checkpoint, TensorRole::kO, layer, 3));
    ASSERT_EQ(weights->layers[layer].qkv_bias.size(), 128u);
    EXPECT_EQ(weights->layers[layer].qkv_bias[64],
              RowOf(*checkpoint, TensorRole::kKBias, layer, 0)[0]);
    EXPECT_TRUE(weights->layers[layer].q_norm.empty());
  }
}

TEST(LoadWeightsTest, TiedHeadIsTheEmbeddingAndPackedOnce) {
  PackOnlyBackend backend;
  for (const bool tied : {true, false}) {
    TempDir dir;
    TinyCheckpoint model;
    model.tied = tied;
    model.WriteTo(dir);
    absl::StatusOr<Weights> weights = LoadAll(*Open(dir), backend);
    ASSERT_TRUE(weights.ok()) << weights.status();
    EXPECT_EQ(weights->head == nullptr, tied);
    EXPECT_EQ(&weights->head_matrix() == weights->embed.get(), tied);
    EXPECT_EQ(weights->layers[0].q_norm.size(), 16u);
  }
}

TEST(LoadWeightsTest, FailureNamesFileAndTensor) {
  TempDir dir;
  TinyCheckpoint().WriteTo(dir);
  PackOnlyBackend backend;
  backend.fail_rows = 128;  // q, k, v of layer 0
  const absl::Status status = LoadAll(*Open(dir), backend).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find(dir.path()), std::string::npos) << status;
  EXPECT_NE(status.message().find("layer=0 tensor=q"), std::string::npos) << status;
}

// A one-layer Qwen3 GGUF file whose matrices are all in `format`, all zero.
void WriteGguf(const TempDir& dir, base::WeightFormat format) {
  GgufBytes file;
  file.AddString("general.architecture", "qwen3").AddString("general.name", "tiny");
  file.AddU32("qwen3.block_count", 1)
      .AddU32("qwen3.context_length", 256)
      .AddU32("qwen3.embedding_length", 256);
  file.AddU32("qwen3.feed_forward_length", 256).AddU32("qwen3.attention.head_count", 4);
  file.AddU32("qwen3.attention.head_count_kv", 4).AddU32("qwen3.attention.key_length", 64);
  file.AddU32("qwen3.attention.value_length", 64)
      .AddF32("qwen3.attention.layer_norm_rms_epsilon", 1e-6f);
  file.AddF32("qwen3.rope.freq_base", 1e6f);
  const auto matrix = [&](const char* name, uint64_t rows) {
    const std::string data(rows * base::RowBytes(format, 256), '\0');
    file.AddTensor(name, base::InfoOf(format).ggml_type, {256, rows}, data);
  };
  const auto vector = [&](const char* name, uint64_t size) {
    file.AddTensor(name, 0, {size}, testing_support::RawFloats(std::vector<float>(size, 1.0f)));
  };
  matrix("token_embd.weight", 64);
  for (const char* name :
       {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}) {
    matrix(absl::StrCat("blk.0.", name, ".weight").c_str(), 256);
  }
  vector("blk.0.attn_norm.weight", 256);
  vector("blk.0.ffn_norm.weight", 256);
  vector("blk.0.attn_q_norm.weight", 64);
  vector("blk.0.attn_k_norm.weight", 64);
  vector("output_norm.weight", 256);
  dir.Write("model.gguf", file.Build());
}

TEST(ResolveWeightDtypeTest, AutoIsTheNearestToWhatIsStored) {
  using base::WeightFormat;
  using ops::WeightDtype;
  const std::pair<WeightFormat, WeightDtype> expected[] = {
      {WeightFormat::kF32, WeightDtype::kBf16},  {WeightFormat::kF16, WeightDtype::kBf16},
      {WeightFormat::kBf16, WeightDtype::kBf16}, {WeightFormat::kQ8_0, WeightDtype::kInt8},
      {WeightFormat::kQ6_K, WeightDtype::kInt8}, {WeightFormat::kQ4_0, WeightDtype::kQ4},
      {WeightFormat::kQ4_1, WeightDtype::kQ4},   {WeightFormat::kQ4_K, WeightDtype::kQ4}};
  for (const auto& [format, dtype] : expected) {
    TempDir dir;
    WriteGguf(dir, format);
    const std::unique_ptr<Checkpoint> checkpoint = Open(dir, "model.gguf");
    ASSERT_NE(checkpoint, nullptr);
    EXPECT_EQ(*ResolveWeightDtype(*checkpoint, "auto"), dtype) << base::NameOf(format);
    EXPECT_EQ(*ResolveWeightDtype(*checkpoint, "f32"), WeightDtype::kF32);
  }
}

TEST(ResolveWeightDtypeTest, OtherNamesAreRefusedWithTheAcceptedOnes) {
  TempDir dir;
  TinyCheckpoint().WriteTo(dir);
  for (const char* name : {"fp16", "BF16", "int4", ""}) {
    const absl::Status status = ResolveWeightDtype(*Open(dir), name).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("auto, f32, bf16, int8, q4"), std::string::npos) << status;
  }
}

TEST(LoadWeightsTest, FourBitRowsAreOfferedAsTheyAreStored) {
  PackOnlyBackend backend;
  for (const auto format : {base::WeightFormat::kQ4_K, base::WeightFormat::kQ8_0}) {
    TempDir dir;
    WriteGguf(dir, format);
    absl::StatusOr<Weights> weights = LoadAll(*Open(dir, "model.gguf"), backend);
    ASSERT_TRUE(weights.ok()) << weights.status();
    EXPECT_EQ(Plain(*weights->layers[0].qkv).has_q4, format == base::WeightFormat::kQ4_K);
  }
}

}  // namespace
}  // namespace baton::model
