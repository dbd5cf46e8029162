#pragma once

// What a decoder's shape and numbers are, from a Hugging Face config.json or the metadata of a GGUF
// file.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace baton::base {
class GgufFile;
}

namespace baton::model {

// One decoder runs all three: Qwen3 normalises q and k per head, Qwen2 has a bias on q, k and v,
// Llama neither.
enum class Arch { kQwen3, kQwen2, kLlama };
absl::string_view NameOf(Arch arch);  // "qwen3", "qwen2", "llama"

struct RopeScaling {
  enum class Kind { kNone, kLinear, kYarn };
  Kind kind = Kind::kNone;
  double factor = 1;
  // The rest is YaRN's.
  int original_max_position = 0;
  double attention_factor =
      1;  // of cos and sin, worked out from the factor where the config names none
  double beta_fast = 32;
  double beta_slow = 1;
  bool truncate = true;  // the ends of the ramp are rounded to whole dimensions
};

// What the model's author recommends; a request overrides it.
struct GenerationDefaults {
  std::optional<double> temperature;
  std::optional<int> top_k;
  std::optional<double> top_p;
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
};

struct ModelConfig {
  Arch arch = Arch::kQwen3;
  std::string name;  // for people; empty when the files name none
  int num_layers = 0;
  int hidden = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int ffn = 0;
  int vocab = 0;
  double rms_eps = 1e-6;
  bool qk_norm = false;
  bool attention_bias = false;
  bool tied_head = false;  // the head is the embedding
  double rope_theta = 10000;
  RopeScaling rope;
  int max_position = 0;           // positions that may be used, scaling included
  std::vector<uint32_t> eos_ids;  // ascending; empty when the files name none
  std::optional<uint32_t> bos_id;
  GenerationDefaults defaults;
};

// Reads config.json of `directory` and, where it is there, generation_config.json.
// Errors: INVALID_ARGUMENT with file, field and reason: a field that is missing, of another kind or
// out of range; an architecture, activation, RoPE type, sliding window, quantisation or mixture of
// experts that is not supported.
absl::StatusOr<ModelConfig> LoadHfConfig(const std::string& directory);
// The same from texts. `generation_json` may be empty; `path` is for messages.
absl::StatusOr<ModelConfig> ParseHfConfig(const std::string& path,
                                          absl::string_view config_json,
                                          absl::string_view generation_json);
// Errors: as LoadHfConfig, for keys of the metadata.
absl::StatusOr<ModelConfig> GgufConfig(const base::GgufFile& file);

// Checks that no field is out of range and that they fit together; both readers end with it.
// Errors: INVALID_ARGUMENT with `path` and the field.
absl::Status ValidateConfig(const std::string& path, const ModelConfig& config);

// The context length to serve with; 0 asks for the largest.
// Errors: INVALID_ARGUMENT with both numbers above max_position, or for a negative one.
absl::StatusOr<int> ResolveMaxModelLen(const ModelConfig& config, int requested);

// [head_dim / 2] inverse frequencies as transformers computes them in f32, scaling included.
std::vector<float> RopeInvFreq(const ModelConfig& config);
// What cos and sin are multiplied with; 1 but for YaRN.
float RopeAttentionFactor(const ModelConfig& config);
// YaRN's attention factor where the config names none.
double DefaultYarnAttentionFactor(double factor);

// Everything that makes two models compute differently, as one line of text.
std::string Describe(const ModelConfig& config);

}  // namespace baton::model
