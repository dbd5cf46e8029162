#pragma once

// The weights of a model as its files hold them: one view of a Hugging Face directory and of a GGUF
// file, by role.

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "engine/base/dequant.h"
#include "engine/model/model_config.h"

namespace baton::base {
class GgufFile;
class SafetensorsModel;
}  // namespace baton::base

namespace baton::model {

// What a tensor is for. E hidden, D head dim, Hq/Hkv heads, F ffn, V vocab; matrices are [outputs,
// inputs].
enum class TensorRole {
  kEmbed,      // [V, E]
  kAttnNorm,   // [E]
  kQ,          // [Hq*D, E]
  kK,          // [Hkv*D, E]
  kV,          // [Hkv*D, E]
  kQBias,      // [Hq*D]
  kKBias,      // [Hkv*D]
  kVBias,      // [Hkv*D]
  kO,          // [E, Hq*D]
  kQNorm,      // [D]
  kKNorm,      // [D]
  kFfnNorm,    // [E]
  kGate,       // [F, E]
  kUp,         // [F, E]
  kDown,       // [E, F]
  kFinalNorm,  // [E]
  kHead,       // [V, E]; absent where it is the embedding (config().tied_head)
};
inline constexpr int kNumTensorRoles = static_cast<int>(TensorRole::kHead) + 1;

// Side of the square blocks of an FP8 matrix that share a scale.
inline constexpr int64_t kFp8Block = 128;

// A vector is one row.
struct Shape {
  int64_t rows = 0;
  int64_t cols = 0;
};

// Scales of the FP8 KV cache that the checkpoint brings: value = code * scale. One per KV head.
struct KvScales {
  std::vector<float> k;
  std::vector<float> v;
};

// Owns the mappings of the files. Immutable, thread-safe. The layer is ignored for kEmbed,
// kFinalNorm and kHead.
class Checkpoint {
 public:
  // `path` is a Hugging Face directory or a GGUF file.
  // Errors: NOT_FOUND, or INVALID_ARGUMENT with file, tensor and reason: what the readers of the
  // files and of the config refuse; a tensor that is missing, has another shape than the config
  // says or a dtype that is not supported; a tensor nobody would read, so that it cannot be left
  // out in silence; KV scales for some layers only.
  // `hash_all_data`: the fingerprint covers every byte of the weights, which reads them all.
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& path,
                                                          bool hash_all_data = false);
  // Made-up weights of the shape that `path`/config.json says (engine/base/hash_weights.h): for
  // measurements without a checkpoint. Errors: those of the config.
  static absl::StatusOr<std::unique_ptr<Checkpoint>> OpenDummy(const std::string& path);
  ~Checkpoint();

  const ModelConfig& config() const { return config_; }
  const std::string& path() const { return path_; }

  // The three below are for a role that is there; any other is a bug of the caller.
  bool Has(TensorRole role, int layer) const { return At(role, layer).is_there(); }
  Shape shape(TensorRole role, int layer) const;
  base::WeightFormat format(TensorRole role, int layer) const;
  std::string source_dtype(TensorRole role,
                           int layer) const;  // its name: "f32", "bf16", "q8_0", ...
  // Row `row` as f32, exactly dequantised, into out[cols]. Rows come in the order of Hugging Face
  // checkpoints: GGUF files of architecture llama store the rows of q and k interleaved, which is
  // undone here.
  void ReadRow(TensorRole role, int layer, int64_t row, float* out) const;
  // For 4-bit sources: codes [cols] of 0..15, scales and minimums [cols / 32]; the value is scale *
  // code + minimum, exactly as ReadRow gives it. False, and nothing written, for other sources.
  bool ReadRowQ4(TensorRole role,
                 int layer,
                 int64_t row,
                 uint8_t* codes,
                 float* scales,
                 float* minimums) const;

  // Of made-up weights: seed and standard deviation. False for others.
  bool MadeUp(TensorRole role, int layer, uint64_t* seed, float* std) const;
  // For e4m3 sources: codes [cols], and one scale per kFp8Block columns, that of the square block
  // of kFp8Block rows and columns; the value is scale * code, exactly as ReadRow gives it. False,
  // and nothing written, for other sources.
  bool ReadRowFp8(TensorRole role, int layer, int64_t row, uint8_t* codes, float* scales) const;

  // Empty when the checkpoint brings none; it brings them for all layers or for none.
  std::optional<KvScales> kv_scales(int layer) const;

  // Bytes of all weights as stored, and their most frequent format by bytes (what --weight-dtype
  // auto looks at).
  int64_t weight_bytes() const;
  base::WeightFormat main_format() const;
  // Hex SHA-256 over config, roles, shapes, formats, KV scales and fixed samples of the data, or
  // all of it: the two differ. Equal however the tensors are spread over shards. Workers compare it
  // before they exchange KV blocks.
  const std::string& fingerprint() const { return fingerprint_; }

  // For the tokenizer in its metadata; null for a Hugging Face directory.
  const base::GgufFile* gguf() const { return gguf_.get(); }

 private:
  friend class CheckpointBuilder;
  struct Tensor {
    const uint8_t* data = nullptr;
    base::WeightFormat format = base::WeightFormat::kF32;
    int64_t rows = 0;
    int64_t cols = 0;
    size_t row_bytes = 0;
    int interleaved_head_dim =
        0;  // rows (2j, 2j+1) of a head are rows (j, j + D/2) of the result; 0: as stored
    // Made up: of HashWeight. Norms have std 0 and are ones.
    bool made = false;
    uint64_t seed = 0;
    float std = 0;
    bool is_there() const { return data != nullptr || made; }
    std::vector<float> block_scales;  // kF8E4m3: [rows / kFp8Block][cols / kFp8Block], rounded up
  };
  using LayerTensors = std::array<Tensor, kNumTensorRoles>;

  Checkpoint();
  const Tensor& At(TensorRole role, int layer) const;
  const uint8_t* RowData(const Tensor& tensor, int64_t row) const;
  // kF8E4m3: the scales of the row's blocks.
  const float* BlockScales(const Tensor& tensor, int64_t row) const;
  void ComputeFingerprint(bool hash_all_data);

  std::string path_;
  ModelConfig config_;
  std::unique_ptr<base::SafetensorsModel> safetensors_;
  std::unique_ptr<base::GgufFile> gguf_;
  LayerTensors globals_;
  std::vector<LayerTensors> layers_;
  std::vector<KvScales> kv_scales_;  // per layer, or empty
  std::string fingerprint_;
};

// "embed", "attn_norm", "q", ...: for messages.
absl::string_view NameOf(TensorRole role);
// True for roles that each layer has of its own.
bool IsPerLayer(TensorRole role);

}  // namespace baton::model
