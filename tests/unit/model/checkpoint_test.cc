#include "engine/model/checkpoint.h"

#include <bit>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

#include "engine/base/dequant.h"
#include "engine/base/gguf.h"
#include "engine/base/safetensors.h"
#include "engine/model/tensor_names.h"
#include "tests/support/model_files.h"

namespace baton::model {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::GgufBytes;
using testing_support::RawFloats;
using testing_support::SafetensorsBytes;
using testing_support::TempDir;

constexpr char kModels[] = BATON_SOURCE_DIR "/tests/data/models/";

std::string ConfigJson(absl::string_view arch, bool tied) {
  return absl::StrCat(
      R"({"architectures":[")", arch, R"("],"hidden_size":32,"num_hidden_layers":2,)",
      R"("num_attention_heads":4,"num_key_value_heads":2,"head_dim":8,"intermediate_size":64,)",
      R"("vocab_size":16,"max_position_embeddings":128,"tie_word_embeddings":)",
      tied ? "true" : "false", "}");
}

// A number that tells where it comes from.
float ValueOf(const ExpectedTensor& tensor, int64_t row, int64_t col) {
  return static_cast<float>(static_cast<int>(tensor.role) * 100000 + (tensor.layer + 1) * 10000 +
                            row * 64 + col);
}

std::string DataOf(const ExpectedTensor& tensor) {
  std::vector<float> values;
  for (int64_t row = 0; row < tensor.shape.rows; ++row) {
    for (int64_t col = 0; col < tensor.shape.cols; ++col)
      values.push_back(ValueOf(tensor, row, col));
  }
  return RawFloats(values);
}

std::vector<int64_t> HfShape(const ExpectedTensor& tensor) {
  if (tensor.is_vector) return {tensor.shape.cols};
  return {tensor.shape.rows, tensor.shape.cols};
}

// Adds one tensor of the model, or something else in its place.
using AddTensor = std::function<void(const ExpectedTensor& tensor, SafetensorsBytes* file)>;

void AddAsExpected(const ExpectedTensor& tensor, SafetensorsBytes* file) {
  file->Add(tensor.hf_name, "F32", HfShape(tensor), DataOf(tensor));
}

// A Hugging Face directory on disk.
class HfModel {
 public:
  explicit HfModel(absl::string_view arch = "Qwen3ForCausalLM", bool tied = true)
      : arch_(arch), tied_(tied) {
    directory_.Write("config.json", ConfigJson(arch, tied));
  }
  ModelConfig config() const { return *ParseHfConfig("config.json", ConfigJson(arch_, tied_), ""); }
  const TempDir& directory() const { return directory_; }
  const std::string& path() const { return directory_.path(); }

  absl::StatusOr<std::unique_ptr<Checkpoint>> Open(
      const AddTensor& add = AddAsExpected,
      const std::function<void(SafetensorsBytes*)>& more = nullptr) {
    SafetensorsBytes file;
    for (const ExpectedTensor& tensor : ExpectedTensors(config())) add(tensor, &file);
    if (more != nullptr) more(&file);
    directory_.Write("model.safetensors", file.Build());
    return Checkpoint::Open(path());
  }

 private:
  std::string arch_;
  bool tied_;
  TempDir directory_;
};

std::vector<float> Row(const Checkpoint& checkpoint, TensorRole role, int layer, int64_t row) {
  std::vector<float> values(checkpoint.shape(role, layer).cols);
  checkpoint.ReadRow(role, layer, row, values.data());
  return values;
}

void ExpectAllValues(const Checkpoint& checkpoint) {
  for (const ExpectedTensor& tensor : ExpectedTensors(checkpoint.config())) {
    ASSERT_TRUE(checkpoint.Has(tensor.role, tensor.layer)) << tensor.hf_name;
    EXPECT_EQ(checkpoint.source_dtype(tensor.role, tensor.layer), "f32");
    for (int64_t row = 0; row < tensor.shape.rows; ++row) {
      const std::vector<float> values = Row(checkpoint, tensor.role, tensor.layer, row);
      for (int64_t col = 0; col < tensor.shape.cols; ++col) {
        ASSERT_EQ(values[col], ValueOf(tensor, row, col))
            << tensor.hf_name << " row " << row << " column " << col;
      }
    }
  }
}

TEST(CheckpointTest, ReadsEveryTensorOfEveryArchitecture) {
  for (const char* arch : {"Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"}) {
    for (const bool tied : {true, false}) {
      auto checkpoint = HfModel(arch, tied).Open();
      ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
      EXPECT_EQ((*checkpoint)->Has(TensorRole::kHead, 0), !tied);
      EXPECT_EQ((*checkpoint)->Has(TensorRole::kQNorm, 0), std::string(arch) == "Qwen3ForCausalLM");
      EXPECT_EQ((*checkpoint)->Has(TensorRole::kQBias, 1), std::string(arch) == "Qwen2ForCausalLM");
      EXPECT_EQ((*checkpoint)->gguf(), nullptr);
    }
  }
}

TEST(CheckpointTest, GivesTheValuesOfTheFile) {
  HfModel model("Qwen2ForCausalLM", false);
  auto checkpoint = model.Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ExpectAllValues(**checkpoint);
  std::vector<uint8_t> codes(32);
  float scale, minimum;
  EXPECT_FALSE((*checkpoint)->ReadRowQ4(TensorRole::kQ, 0, 0, codes.data(), &scale, &minimum));
}

// The committed random checkpoints: f32, f16 and bf16, one to three shards.
TEST(CheckpointTest, OpensTheCommittedModels) {
  const std::map<std::string, base::WeightFormat> kFormats = {
      {"random-qwen3-gqa2-tied", base::WeightFormat::kF32},
      {"random-qwen3-gqa1-hd128", base::WeightFormat::kBf16},
      {"random-qwen3-gqa4-yarn", base::WeightFormat::kBf16},
      {"random-qwen3-gqa5-shards", base::WeightFormat::kF16},
      {"random-qwen2-gqa2-tied", base::WeightFormat::kBf16},
      {"random-qwen2-gqa1-linear", base::WeightFormat::kBf16},
      {"random-llama-gqa1", base::WeightFormat::kBf16},
      {"random-llama-gqa4-hd128", base::WeightFormat::kF16},
      {"random-llama-gqa2-yarn", base::WeightFormat::kBf16}};
  for (const auto& [name, format] : kFormats) {
    auto checkpoint = Checkpoint::Open(kModels + name);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ((*checkpoint)->main_format(), format) << name;
    EXPECT_GT((*checkpoint)->weight_bytes(), 100000);
    EXPECT_EQ((*checkpoint)->fingerprint().size(), 64u);
  }
}

TEST(CheckpointTest, RefusesMissingWrongAndUnknownTensorsWithFileTensorAndReason) {
  const std::string name = "model.layers.1.self_attn.k_proj.weight";
  const auto refusal = [&](const AddTensor& instead) {
    HfModel model;
    const absl::Status status =
        model
            .Open([&](const ExpectedTensor& tensor, SafetensorsBytes* file) {
              (tensor.hf_name == name ? instead : AddAsExpected)(tensor, file);
            })
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(model.path()));
    return std::string(status.message());
  };
  EXPECT_THAT(refusal([](const ExpectedTensor&, SafetensorsBytes*) {}),
              HasSubstr("missing tensor: file="));
  EXPECT_THAT(refusal([](const ExpectedTensor& tensor, SafetensorsBytes* file) {
                file->Add(tensor.hf_name, "F32", {32, 16}, DataOf(tensor));
              }),
              HasSubstr("shape=[32,16] the config needs [16,32]"));
  EXPECT_THAT(refusal([](const ExpectedTensor& tensor, SafetensorsBytes* file) {
                file->Add(tensor.hf_name, "F32", {16, 32, 1}, DataOf(tensor));
              }),
              HasSubstr("shape=[16,32,1]"));
  EXPECT_THAT(refusal([](const ExpectedTensor& tensor, SafetensorsBytes* file) {
                file->Add(tensor.hf_name, "F8_E4M3", {16, 32}, std::string(512, '\0'));
              }),
              HasSubstr("missing tensor: file="));
  EXPECT_THAT(refusal([](const ExpectedTensor& tensor, SafetensorsBytes* file) {
                file->Add(tensor.hf_name, "F8_E5M2", {16, 32}, std::string(512, '\0'));
              }),
              HasSubstr("F8_E5M2 is not supported, accepted: F32 F16 BF16 F8_E4M3"));
  EXPECT_THAT(refusal([](const ExpectedTensor& tensor, SafetensorsBytes* file) {
                file->Add(tensor.hf_name, "F8_E4M3", {16, 32}, std::string(512, '\0'));
                file->Add(tensor.hf_name + "_scale_inv", "F32", {1}, std::string(4, '\0'));
              }),
              HasSubstr("shape=[1] want [1,1]"));
  EXPECT_THAT(refusal([](const ExpectedTensor& tensor, SafetensorsBytes* file) {
                file->Add(tensor.hf_name, "F8_E4M3", {16, 32}, std::string(512, '\0'));
                file->Add(tensor.hf_name + "_scale_inv", "F32", {1, 1}, RawFloats({-1.0f}));
              }),
              HasSubstr("bad weight scale"));
  EXPECT_THAT(refusal([](const ExpectedTensor& tensor, SafetensorsBytes* file) {
                AddAsExpected(tensor, file);
                file->Add("model.layers.1.self_attn.o_proj.bias", "F32", {32},
                          std::string(128, '\0'));
              }),
              HasSubstr("unknown tensor"));
}

TEST(CheckpointTest, IgnoresOnlyWhatTransformersIgnores) {
  const auto open = [](bool tied, const char* name, const std::vector<int64_t>& shape,
                       size_t bytes) {
    HfModel model("Qwen3ForCausalLM", tied);
    return model
        .Open(AddAsExpected,
              [&](SafetensorsBytes* file) {
                file->Add(name, "F32", shape, std::string(bytes, '\0'));
              })
        .status();
  };
  EXPECT_TRUE(open(true, "lm_head.weight", {16, 32}, 2048).ok());
  EXPECT_TRUE(open(true, "model.layers.0.self_attn.rotary_emb.inv_freq", {4}, 16).ok());
  EXPECT_FALSE(open(true, "model.layers.2.input_layernorm.weight", {32}, 128).ok());
  EXPECT_FALSE(open(true, "lm_head.bias", {16}, 64).ok());
}

TEST(CheckpointTest, RefusesWhatIsNoModel) {
  TempDir empty;
  EXPECT_EQ(Checkpoint::Open(empty.path()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Checkpoint::Open(empty.File("missing")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Checkpoint::Open(empty.Write("file", "text")).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// ---- KV scales

std::string ScaleName(int layer, absl::string_view name) {
  return absl::StrCat("model.layers.", layer, ".self_attn.", name);
}

// Case 13.2: loaded under each of the usual names.
TEST(CheckpointTest, Case13_2_ReadsKvScalesUnderTheUsualNames) {
  for (const auto& [k, v] : std::vector<std::pair<std::string, std::string>>{
           {"k_scale", "v_scale"},
           {"attn.k_scale", "attn.v_scale"},
           {"k_proj.k_scale", "v_proj.v_scale"},
           {"k_proj.output_scale", "v_proj.output_scale"}}) {
    HfModel model;
    auto checkpoint = model.Open(AddAsExpected, [&, k = k, v = v](SafetensorsBytes* file) {
      for (int layer = 0; layer < 2; ++layer) {
        file->Add(ScaleName(layer, k), "F32", {}, RawFloats({0.5f + layer}));
        file->Add(ScaleName(layer, v), "F32", {2}, RawFloats({2.0f, 4.0f}));
      }
    });
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_THAT((*checkpoint)->kv_scales(0)->k, ElementsAre(0.5f, 0.5f)) << k;
    EXPECT_THAT((*checkpoint)->kv_scales(1)->k, ElementsAre(1.5f, 1.5f)) << k;
    EXPECT_THAT((*checkpoint)->kv_scales(1)->v, ElementsAre(2.0f, 4.0f)) << v;
  }
  HfModel model;
  auto both = model.Open(AddAsExpected, [](SafetensorsBytes* file) {
    for (int layer = 0; layer < 2; ++layer)
      file->Add(ScaleName(layer, "kv_scale"), "F32", {1}, RawFloats({0.25f}));
  });
  ASSERT_TRUE(both.ok()) << both.status();
  EXPECT_THAT((*both)->kv_scales(0)->k, ElementsAre(0.25f, 0.25f));
  EXPECT_THAT((*both)->kv_scales(0)->v, ElementsAre(0.25f, 0.25f));
}

// Case 13.2
TEST(CheckpointTest, Case13_2_NoKvScalesAreNoneNotOne) {
  HfModel model;
  auto checkpoint = model.Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_FALSE((*checkpoint)->kv_scales(0).has_value());
}

// Case 13.2
TEST(CheckpointTest, Case13_2_RefusesKvScalesThatArePartlyMissingOrNoScales) {
  const auto refusal = [](const std::function<void(SafetensorsBytes*)>& more) {
    HfModel model;
    const absl::Status status = model.Open(AddAsExpected, more).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refusal([](SafetensorsBytes* file) {
                file->Add(ScaleName(0, "k_scale"), "F32", {}, RawFloats({1}));
                file->Add(ScaleName(0, "v_scale"), "F32", {}, RawFloats({1}));
              }),
              HasSubstr("first_missing=k_scale of layer 1"));
  EXPECT_THAT(refusal([](SafetensorsBytes* file) {
                for (int layer = 0; layer < 2; ++layer)
                  file->Add(ScaleName(layer, "k_scale"), "F32", {}, RawFloats({1}));
              }),
              HasSubstr("first_missing=v_scale of layer 0"));
  for (float bad :
       {0.0f, -1.0f, std::bit_cast<float>(0x7f800000), std::bit_cast<float>(0x7fc00000)}) {
    EXPECT_THAT(refusal([bad](SafetensorsBytes* file) {
                  file->Add(ScaleName(0, "k_scale"), "F32", {}, RawFloats({bad}));
                }),
                HasSubstr("bad KV scale"));
  }
  EXPECT_THAT(refusal([](SafetensorsBytes* file) {
                file->Add(ScaleName(0, "k_scale"), "F32", {3}, RawFloats({1, 1, 1}));
              }),
              HasSubstr("KV scales are 1 or 2 numbers"));
}

// ---- fingerprint

TEST(CheckpointTest, FingerprintChangesWithWhatIsComputedAndWithNothingElse) {
  HfModel model;
  const std::string base = (*model.Open())->fingerprint();
  EXPECT_EQ((*model.Open())->fingerprint(), base);

  // Another order in the file, another directory: the same model.
  HfModel other;
  SafetensorsBytes reversed;
  const std::vector<ExpectedTensor> tensors = ExpectedTensors(other.config());
  for (auto it = tensors.rbegin(); it != tensors.rend(); ++it) AddAsExpected(*it, &reversed);
  other.directory().Write("model.safetensors", reversed.Build());
  EXPECT_EQ((*Checkpoint::Open(other.path()))->fingerprint(), base);

  const auto changed = model.Open([](const ExpectedTensor& tensor, SafetensorsBytes* file) {
    std::string data = DataOf(tensor);
    if (tensor.role == TensorRole::kDown && tensor.layer == 1) data[0] ^= 1;
    file->Add(tensor.hf_name, "F32", HfShape(tensor), data);
  });
  EXPECT_NE((*changed)->fingerprint(), base);
  const auto scaled = model.Open(AddAsExpected, [](SafetensorsBytes* file) {
    for (int layer = 0; layer < 2; ++layer)
      file->Add(ScaleName(layer, "kv_scale"), "F32", {1}, RawFloats({0.25f}));
  });
  EXPECT_NE((*scaled)->fingerprint(), base);
}

// Copies that differ where no sample is taken are told apart only when asked to look everywhere.
TEST(CheckpointTest, FingerprintOfAllDataSeesEveryByte) {
  HfModel model;
  ASSERT_TRUE(model.Open().ok());
  const std::string sampled = (*Checkpoint::Open(model.path()))->fingerprint();
  const std::string whole = (*Checkpoint::Open(model.path(), true))->fingerprint();
  EXPECT_EQ((*Checkpoint::Open(model.path(), true))->fingerprint(), whole);
  EXPECT_NE(whole, sampled);

  ASSERT_TRUE(model
                  .Open([](const ExpectedTensor& tensor, SafetensorsBytes* file) {
                    std::string data = DataOf(tensor);
                    if (tensor.role == TensorRole::kEmbed) {
                      ASSERT_EQ(data.size(), 2048u);  // of which four times 256 are samples
                      data[data.size() / 6 + 130] ^= 1;
                    }
                    file->Add(tensor.hf_name, "F32", HfShape(tensor), data);
                  })
                  .ok());
  EXPECT_EQ((*Checkpoint::Open(model.path()))->fingerprint(), sampled);
  EXPECT_NE((*Checkpoint::Open(model.path(), true))->fingerprint(), whole);
}

// ---- GGUF

// The model of ExpectedTensors as llama.cpp's converter would write it: for architecture llama, row
// 2j + s of a head of q and k is row j + s * D/2 of the original.
GgufBytes GgufModel(const std::string& arch, const ModelConfig& config) {
  GgufBytes bytes;
  const auto key = [&](const char* name) { return absl::StrCat(arch, ".", name); };
  bytes.AddString("general.architecture", arch)
      .AddU32(key("block_count"), config.num_layers)
      .AddU32(key("context_length"), config.max_position)
      .AddU32(key("embedding_length"), config.hidden)
      .AddU32(key("feed_forward_length"), config.ffn)
      .AddU32(key("attention.head_count"), config.num_heads)
      .AddU32(key("attention.head_count_kv"), config.num_kv_heads)
      .AddU32(key("attention.key_length"), config.head_dim)
      .AddF32(key("attention.layer_norm_rms_epsilon"), 1e-6f);
  for (const ExpectedTensor& tensor : ExpectedTensors(config)) {
    std::string data = DataOf(tensor);
    if (arch == "llama" && (tensor.role == TensorRole::kQ || tensor.role == TensorRole::kK)) {
      const size_t row_bytes = tensor.shape.cols * sizeof(float);
      const int64_t half = config.head_dim / 2;
      std::string permuted;
      for (int64_t head = 0; head < tensor.shape.rows; head += config.head_dim) {
        for (int64_t j = 0; j < half; ++j) {
          for (int64_t s = 0; s < 2; ++s)
            permuted += data.substr((head + j + s * half) * row_bytes, row_bytes);
        }
      }
      data = permuted;
    }
    std::vector<uint64_t> shape = {static_cast<uint64_t>(tensor.shape.cols)};
    if (!tensor.is_vector) shape.push_back(static_cast<uint64_t>(tensor.shape.rows));
    bytes.AddTensor(tensor.gguf_name, 0, shape, data);
  }
  return bytes;
}

TEST(CheckpointTest, GgufGivesTheSameRowsAsHuggingFaceForEveryArchitecture) {
  const std::map<std::string, std::string> kArchs = {
      {"qwen3", "Qwen3ForCausalLM"}, {"qwen2", "Qwen2ForCausalLM"}, {"llama", "LlamaForCausalLM"}};
  for (const auto& [gguf_arch, hf_arch] : kArchs) {
    for (const bool tied : {true, false}) {
      TempDir directory;
      const ModelConfig config = HfModel(hf_arch, tied).config();
      auto checkpoint =
          Checkpoint::Open(directory.Write("m.gguf", GgufModel(gguf_arch, config).Build()));
      ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
      EXPECT_EQ((*checkpoint)->config().tied_head, tied);
      EXPECT_NE((*checkpoint)->gguf(), nullptr);
      ExpectAllValues(**checkpoint);
    }
  }
}

TEST(CheckpointTest, GgufRowsOfFourBitsKeepTheirCodes) {
  TempDir directory;
  const ModelConfig config = HfModel("LlamaForCausalLM").config();
  GgufBytes bytes;
  GgufBytes whole = GgufModel("llama", config);
  const std::string built = whole.Build();
  // The same model with layer 0's down projection [32, 64] in q4_1: row r has scale 2, minimum -1,
  // codes (r + i) % 16.
  std::string q4;
  for (int row = 0; row < 32; ++row) {
    for (int block = 0; block < 2; ++block) {
      q4 += std::string("\x00\x40\x00\xbc", 4);
      for (int i = 0; i < 16; ++i)
        q4 += static_cast<char>(((row + i) % 16) | (((row + i + 16) % 16) << 4));
    }
  }
  auto file =
      base::GgufFile::Parse("m", {reinterpret_cast<const uint8_t*>(built.data()), built.size()});
  ASSERT_TRUE(file.ok());
  bytes.AddString("general.architecture", "llama");
  for (const char* name :
       {"block_count", "context_length", "embedding_length", "feed_forward_length",
        "attention.head_count", "attention.head_count_kv", "attention.key_length"}) {
    const std::string key = absl::StrCat("llama.", name);
    bytes.AddU32(key, *(*file)->FindU32(key));
  }
  bytes.AddF32("llama.attention.layer_norm_rms_epsilon", 1e-6f);
  for (const base::GgufTensor& tensor : (*file)->tensors()) {
    const bool replaced = tensor.name == "blk.0.ffn_down.weight";
    const absl::string_view data(reinterpret_cast<const char*>(tensor.data.data()),
                                 tensor.data.size());
    bytes.AddTensor(tensor.name, replaced ? 3 : 0, {tensor.shape.begin(), tensor.shape.end()},
                    replaced ? absl::string_view(q4) : data);
  }
  auto checkpoint = Checkpoint::Open(directory.Write("m.gguf", bytes.Build()));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ((*checkpoint)->source_dtype(TensorRole::kDown, 0), "q4_1");
  std::vector<uint8_t> codes(64);
  std::vector<float> scales(2), minimums(2);
  ASSERT_TRUE(
      (*checkpoint)
          ->ReadRowQ4(TensorRole::kDown, 0, 5, codes.data(), scales.data(), minimums.data()));
  EXPECT_THAT(scales, ElementsAre(2, 2));
  EXPECT_THAT(minimums, ElementsAre(-1, -1));
  const std::vector<float> row = Row(**checkpoint, TensorRole::kDown, 0, 5);
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(codes[i], (5 + i) % 16) << i;
    EXPECT_EQ(row[i], 2.0f * codes[i] - 1) << i;
  }
}

TEST(CheckpointTest, GgufWithMissingOrUnknownTensorsIsRefused) {
  TempDir directory;
  const ModelConfig config = HfModel("LlamaForCausalLM").config();
  GgufBytes more = GgufModel("llama", config);
  more.AddTensor("blk.0.attn_output.bias", 0, {32}, std::string(128, '\0'));
  const absl::Status status = Checkpoint::Open(directory.Write("m.gguf", more.Build())).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("unknown tensor"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("blk.0.attn_output.bias"));
  std::string bytes = GgufModel("llama", config).Build();
  bytes.replace(bytes.find("blk.1.attn_q.weight"), 19, "blk.9.attn_q.weight");
  EXPECT_THAT(std::string(Checkpoint::Open(directory.Write("m.gguf", bytes)).status().message()),
              HasSubstr("tensor=\"blk.1.attn_q.weight\" reason=the config needs it"));
}

}  // namespace
}  // namespace baton::model
