// ModelConfig from the metadata of a GGUF file.

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "engine/base/gguf.h"
#include "engine/base/status_macros.h"
#include "engine/model/model_config.h"

namespace baton::model {
namespace {

using base::GgufFile;

constexpr int64_t kTokenTypeControl = 3;

// Reads keys "<architecture>.<name>"; keeps the first failure.
class Keys {
 public:
  Keys(const GgufFile& file, absl::string_view architecture)
      : file_(file), architecture_(architecture) {}

  std::string Key(absl::string_view name) const { return absl::StrCat(architecture_, ".", name); }
  bool Has(absl::string_view name) const { return file_.HasKey(Key(name)); }
  std::optional<int> Int(absl::string_view name) {
    if (!Has(name)) return std::nullopt;
    const std::optional<int64_t> value = file_.FindInt(Key(name));
    if (!value || *value < 0 || *value > std::numeric_limits<int>::max()) {
      Fail(name, "is no integer from 0 to 2^31-1");
      return std::nullopt;
    }
    return static_cast<int>(*value);
  }
  std::optional<double> Number(absl::string_view name) {
    if (!Has(name)) return std::nullopt;
    const std::optional<double> value = file_.FindFloat(Key(name));
    if (!value || !std::isfinite(*value)) {
      Fail(name, "is no number");
      return std::nullopt;
    }
    return value;
  }
  int RequiredInt(absl::string_view name) {
    if (!Has(name)) Fail(name, "is missing");
    return Int(name).value_or(0);
  }
  void Fail(absl::string_view name, absl::string_view reason) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(absl::StrCat("bad model config: file=", file_.path(),
                                                      " field=", Key(name), " reason=", reason));
  }
  const absl::Status& status() const { return status_; }

 private:
  const GgufFile& file_;
  const std::string architecture_;
  absl::Status status_;
};

absl::StatusOr<Arch> ReadArch(const GgufFile& file) {
  const absl::string_view name = file.FindString("general.architecture").value_or("");
  for (Arch arch : {Arch::kQwen3, Arch::kQwen2, Arch::kLlama}) {
    if (name == NameOf(arch)) return arch;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("bad model config: file=", file.path(), " field=general.architecture reason=\"",
                   absl::CHexEscape(name), "\" is not supported, accepted: qwen3 qwen2 llama"));
}

void ReadShape(const GgufFile& file, Keys* keys, ModelConfig* config) {
  config->num_layers = keys->RequiredInt("block_count");
  config->hidden = keys->RequiredInt("embedding_length");
  config->num_heads = keys->RequiredInt("attention.head_count");
  config->num_kv_heads = keys->Int("attention.head_count_kv").value_or(config->num_heads);
  config->ffn = keys->RequiredInt("feed_forward_length");
  const int head_dim = config->num_heads > 0 ? config->hidden / config->num_heads : 0;
  config->head_dim = keys->Int("attention.key_length").value_or(head_dim);
  if (keys->Int("attention.value_length").value_or(config->head_dim) != config->head_dim) {
    keys->Fail("attention.value_length", "differs from the length of keys");
  }
  if (keys->Int("rope.dimension_count").value_or(config->head_dim) != config->head_dim) {
    keys->Fail("rope.dimension_count", "only the whole head can be rotated");
  }
  const base::GgufTensor* embedding = file.FindTensor("token_embd.weight");
  const int64_t rows =
      embedding != nullptr && embedding->shape.size() == 2 ? embedding->shape[1] : 0;
  config->vocab = static_cast<int>(std::min<int64_t>(rows, std::numeric_limits<int>::max()));
  if (keys->Int("vocab_size").value_or(config->vocab) != config->vocab) {
    keys->Fail("vocab_size", "differs from the rows of token_embd.weight");
  }
  if (!keys->Has("attention.layer_norm_rms_epsilon")) {
    keys->Fail("attention.layer_norm_rms_epsilon", "is missing");
  }
  config->rms_eps = keys->Number("attention.layer_norm_rms_epsilon").value_or(0);
  config->tied_head = file.FindTensor("output.weight") == nullptr;
  config->qk_norm = config->arch == Arch::kQwen3;
  config->attention_bias = config->arch == Arch::kQwen2;
}

void RefuseUnsupported(const GgufFile& file, Keys* keys) {
  if (keys->Int("expert_count").value_or(0) > 0) {
    keys->Fail("expert_count", "mixtures of experts are not supported");
  }
  if (keys->Int("attention.sliding_window").value_or(0) > 0) {
    keys->Fail("attention.sliding_window", "sliding windows are not supported");
  }
  if (keys->Number("rope.scaling.yarn_log_multiplier").value_or(0) != 0) {
    keys->Fail("rope.scaling.yarn_log_multiplier", "is not supported");
  }
  if (keys->Number("rope.scaling.yarn_ext_factor").value_or(1) != 1) {
    keys->Fail("rope.scaling.yarn_ext_factor", "only 1 is supported");
  }
  if (file.FindTensor("rope_freqs.weight") != nullptr) {
    keys->Fail("rope", "tensor rope_freqs.weight (llama3 RoPE scaling) is not supported");
  }
}

// Old files name a linear factor alone.
void ReadRope(const GgufFile& file, Keys* keys, ModelConfig* config) {
  RopeScaling& scaling = config->rope;
  config->rope_theta = keys->Number("rope.freq_base").value_or(10000);
  config->max_position = keys->RequiredInt("context_length");
  std::string type(file.FindString(keys->Key("rope.scaling.type")).value_or("none"));
  double factor = keys->Number("rope.scaling.factor").value_or(0);
  if (const auto old_factor = keys->Number("rope.scale_linear");
      old_factor && *old_factor > 1 && type == "none") {
    type = "linear";
    factor = *old_factor;
  }
  if (type == "none") return;
  if (type != "linear" && type != "yarn") {
    keys->Fail("rope.scaling.type",
               absl::StrCat("\"", absl::CHexEscape(type),
                            "\" is not supported, accepted: none linear yarn"));
    return;
  }
  if (factor == 0) keys->Fail("rope.scaling.factor", "is missing");
  scaling.kind = type == "linear" ? RopeScaling::Kind::kLinear : RopeScaling::Kind::kYarn;
  scaling.factor = factor;
  scaling.original_max_position =
      keys->Int("rope.scaling.original_context_length").value_or(config->max_position);
  const double limit = std::floor(scaling.original_max_position * factor);
  config->max_position = limit < std::numeric_limits<int>::max() ? static_cast<int>(limit) : 0;
  if (scaling.kind == RopeScaling::Kind::kLinear) return;
  // Here the key is a further factor on top of YaRN's own.
  scaling.attention_factor =
      DefaultYarnAttentionFactor(factor) * keys->Number("rope.scaling.attn_factor").value_or(1);
  scaling.beta_fast = keys->Number("rope.scaling.yarn_beta_fast").value_or(scaling.beta_fast);
  scaling.beta_slow = keys->Number("rope.scaling.yarn_beta_slow").value_or(scaling.beta_slow);
}

// The metadata name one end of sequence; chat models end a turn with a second token, known by its
// text only.
std::vector<uint32_t> FindEosIds(const GgufFile& file) {
  std::vector<uint32_t> ids;
  for (const char* key : {"eos_token_id", "eot_token_id", "eom_token_id"}) {
    if (const auto id = file.FindU32(absl::StrCat("tokenizer.ggml.", key))) ids.push_back(*id);
  }
  const auto tokens = file.FindStringArray("tokenizer.ggml.tokens");
  const auto types = file.FindIntArray("tokenizer.ggml.token_type");
  if (tokens && types && tokens->size() == types->size()) {
    for (size_t i = 0; i < tokens->size(); ++i) {
      if ((*types)[i] != kTokenTypeControl) continue;
      if ((*tokens)[i] == "<|im_end|>" || (*tokens)[i] == "<|endoftext|>") {
        ids.push_back(static_cast<uint32_t>(i));
      }
    }
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

GenerationDefaults ReadDefaults(const GgufFile& file) {
  GenerationDefaults defaults;
  defaults.temperature = file.FindFloat("general.sampling.temp");
  defaults.top_p = file.FindFloat("general.sampling.top_p");
  defaults.min_p = file.FindFloat("general.sampling.min_p");
  defaults.repetition_penalty = file.FindFloat("general.sampling.penalty_repeat");
  if (const auto top_k = file.FindU32("general.sampling.top_k")) {
    defaults.top_k = static_cast<int>(std::min<uint32_t>(*top_k, std::numeric_limits<int>::max()));
  }
  return defaults;
}

}  // namespace

absl::StatusOr<ModelConfig> GgufConfig(const GgufFile& file) {
  ModelConfig config;
  BATON_ASSIGN_OR_RETURN(config.arch, ReadArch(file));
  Keys keys(file, NameOf(config.arch));
  config.name = std::string(file.FindString("general.name").value_or(""));
  ReadShape(file, &keys, &config);
  ReadRope(file, &keys, &config);
  RefuseUnsupported(file, &keys);
  BATON_RETURN_IF_ERROR(keys.status());
  config.eos_ids = FindEosIds(file);
  if (const auto bos = file.FindU32("tokenizer.ggml.bos_token_id")) config.bos_id = *bos;
  config.defaults = ReadDefaults(file);
  BATON_RETURN_IF_ERROR(ValidateConfig(file.path(), config));
  return config;
}

}  // namespace baton::model
