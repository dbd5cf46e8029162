// ModelConfig from the files of a Hugging Face directory.

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "engine/base/json.h"
#include "engine/base/mapped_file.h"
#include "engine/base/status_macros.h"
#include "engine/model/model_config.h"

namespace baton::model {
namespace {

using base::JsonMember;
using base::JsonValue;

constexpr size_t kConfigBytesMax = 1 << 20;

// Reads members of one JSON object. The first failure is kept and read at the end with status(), so
// that a reader of twenty fields stays readable. A member that is null counts as absent.
class Fields {
 public:
  Fields(const std::string& path,
         absl::string_view prefix,
         const JsonValue* object,
         absl::Status* status)
      : path_(path), prefix_(prefix), object_(object), status_(*status) {}

  const JsonValue* Find(absl::string_view key) const {
    const JsonValue* value = object_ == nullptr ? nullptr : object_->Find(key);
    return value == nullptr || value->is_null() ? nullptr : value;
  }
  std::optional<int> Int(absl::string_view key) {
    const JsonValue* value = Find(key);
    if (value == nullptr) return std::nullopt;
    const absl::StatusOr<int64_t> number = value->AsInt64();
    if (!number.ok() || *number < 0 || *number > std::numeric_limits<int>::max()) {
      Fail(key, "is no integer from 0 to 2^31-1");
      return std::nullopt;
    }
    return static_cast<int>(*number);
  }
  std::optional<double> Number(absl::string_view key) {
    const JsonValue* value = Find(key);
    if (value == nullptr) return std::nullopt;
    const absl::StatusOr<double> number = value->AsDouble();
    if (!number.ok() || !std::isfinite(*number)) {
      Fail(key, "is no number");
      return std::nullopt;
    }
    return *number;
  }
  bool Bool(absl::string_view key, bool fallback) {
    const JsonValue* value = Find(key);
    if (value == nullptr) return fallback;
    if (!value->is_bool()) Fail(key, "is neither true nor false");
    return value->is_true();
  }
  std::string String(absl::string_view key) {
    const JsonValue* value = Find(key);
    if (value == nullptr) return "";
    if (!value->is_string()) Fail(key, "is no string");
    return value->text();
  }
  int RequiredInt(absl::string_view key) {
    if (Find(key) == nullptr) Fail(key, "is missing");
    return Int(key).value_or(0);
  }
  double RequiredNumber(absl::string_view key) {
    if (Find(key) == nullptr) Fail(key, "is missing");
    return Number(key).value_or(0);
  }
  // One id or a list of them.
  std::vector<uint32_t> Ids(absl::string_view key) {
    std::vector<uint32_t> ids;
    const JsonValue* value = Find(key);
    if (value == nullptr) return ids;
    const bool is_list = value->is_array();
    const size_t count = is_list ? value->items().size() : 1;
    for (size_t i = 0; i < count; ++i) {
      const absl::StatusOr<int64_t> id = (is_list ? value->items()[i] : *value).AsInt64();
      if (!id.ok() || *id < 0 || *id > std::numeric_limits<int>::max()) {
        Fail(key, "is neither a token id nor a list of them");
        return {};
      }
      ids.push_back(static_cast<uint32_t>(*id));
    }
    return ids;
  }
  void Fail(absl::string_view key, absl::string_view reason) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(absl::StrCat("bad model config: file=", path_,
                                                      " field=", prefix_, key, " reason=", reason));
  }

 private:
  const std::string& path_;
  const std::string prefix_;
  const JsonValue* object_;
  absl::Status& status_;
};

std::string Quoted(absl::string_view text) {
  return absl::StrCat("\"", absl::CHexEscape(text), "\"");
}

Arch ReadArch(Fields* fields) {
  const JsonValue* list = fields->Find("architectures");
  std::string name;
  if (list != nullptr && list->items().size() == 1) name = list->items()[0].text();
  if (name == "Qwen3ForCausalLM") return Arch::kQwen3;
  if (name == "Qwen2ForCausalLM") return Arch::kQwen2;
  if (name == "LlamaForCausalLM") return Arch::kLlama;
  fields->Fail("architectures",
               absl::StrCat(Quoted(name),
                            " is not supported, accepted: Qwen3ForCausalLM Qwen2ForCausalLM "
                            "LlamaForCausalLM"));
  return Arch::kLlama;
}

// The layout of Qwen's own -FP8 checkpoints.
bool IsBlockFp8(const JsonValue& quantization) {
  const auto is = [&](absl::string_view key, absl::string_view want) {
    const JsonValue* value = quantization.Find(key);
    return value != nullptr && value->text() == want;
  };
  const JsonValue* size = quantization.Find("weight_block_size");
  if (size == nullptr || size->items().size() != 2) return false;
  const bool square = size->items()[0].text() == "128" && size->items()[1].text() == "128";
  const JsonValue* format = quantization.Find("fmt");
  return square && is("quant_method", "fp8") && is("activation_scheme", "dynamic") &&
         (format == nullptr || format->text() == "e4m3");
}

// What transformers would do with the weights and Baton would not: refused, never ignored.
void RefuseUnsupported(const ModelConfig& config, Fields* fields) {
  const std::string activation = fields->String("hidden_act");
  if (!activation.empty() && activation != "silu" && activation != "swish") {
    fields->Fail("hidden_act",
                 absl::StrCat(Quoted(activation), " is not supported, accepted: silu"));
  }
  for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    if (fields->Int(key).value_or(0) > 0)
      fields->Fail(key, "mixtures of experts are not supported");
  }
  if (const JsonValue* quantization = fields->Find("quantization_config")) {
    if (!IsBlockFp8(*quantization)) {
      const JsonValue* method = quantization->Find("quant_method");
      fields->Fail(
          "quantization_config",
          absl::StrCat("quantised weights (", Quoted(method == nullptr ? "" : method->text()),
                       ") are not supported, accepted: bf16, f16 and f32 weights, and fp8 with "
                       "fmt e4m3, activation_scheme dynamic and weight_block_size [128,128]"));
    }
  }
  if (config.arch != Arch::kQwen2 && fields->Bool("attention_bias", false)) {
    fields->Fail("attention_bias", "a bias on all four projections is not supported");
  }
  if (fields->Bool("mlp_bias", false)) fields->Fail("mlp_bias", "is not supported");
  if (fields->Bool("rope_interleaved", false)) fields->Fail("rope_interleaved", "is not supported");
  if (fields->Number("partial_rotary_factor").value_or(1) != 1) {
    fields->Fail("partial_rotary_factor", "only 1 is supported");
  }
}

// A window is in use when it is switched on and covers some layer; Qwen2 and Qwen3 leave the first
// max_window_layers without one.
void RefuseSlidingWindow(const ModelConfig& config, Fields* fields) {
  if (const JsonValue* types = fields->Find("layer_types")) {
    for (const JsonValue& type : types->items()) {
      if (type.text() != "full_attention") {
        fields->Fail("layer_types", absl::StrCat(Quoted(type.text()),
                                                 " is not supported, accepted: full_attention"));
      }
    }
    return;
  }
  const bool on =
      fields->Bool("use_sliding_window", false) && fields->Find("sliding_window") != nullptr;
  if (on && fields->Int("max_window_layers").value_or(0) < config.num_layers) {
    fields->Fail("sliding_window", "sliding windows are not supported");
  }
}

std::string RopeType(Fields* rope) {
  const std::string type = rope->String("rope_type");
  return type.empty() ? rope->String("type") : type;
}

// `max_position` is max_position_embeddings. Fills config->rope and config->max_position.
void ReadRopeScaling(Fields* rope, int max_position, ModelConfig* config) {
  const std::string type = RopeType(rope);
  RopeScaling& scaling = config->rope;
  config->max_position = max_position;
  if (type.empty() || type == "default") return;
  if (type != "linear" && type != "yarn") {
    rope->Fail("rope_type",
               absl::StrCat(Quoted(type), " is not supported, accepted: default linear yarn"));
    return;
  }
  scaling.kind = type == "linear" ? RopeScaling::Kind::kLinear : RopeScaling::Kind::kYarn;
  scaling.factor = rope->RequiredNumber("factor");
  // With a scaling, max_position_embeddings is what the model was first trained on, unless that is
  // named apart: then it may or may not include the factor already, and says nothing.
  scaling.original_max_position =
      rope->Int("original_max_position_embeddings").value_or(max_position);
  const double limit = std::floor(scaling.original_max_position * scaling.factor);
  config->max_position = limit < std::numeric_limits<int>::max() ? static_cast<int>(limit) : 0;
  if (scaling.kind == RopeScaling::Kind::kLinear) return;
  const double mscale = rope->Number("mscale").value_or(0);
  const double mscale_all_dim = rope->Number("mscale_all_dim").value_or(0);
  scaling.attention_factor = DefaultYarnAttentionFactor(scaling.factor);
  if (mscale != 0 && mscale_all_dim != 0) {
    const double log_factor = scaling.factor <= 1 ? 0 : 0.1 * std::log(scaling.factor);
    scaling.attention_factor = (mscale * log_factor + 1) / (mscale_all_dim * log_factor + 1);
  }
  if (const auto given = rope->Number("attention_factor")) scaling.attention_factor = *given;
  scaling.beta_fast = rope->Number("beta_fast").value_or(scaling.beta_fast);
  scaling.beta_slow = rope->Number("beta_slow").value_or(scaling.beta_slow);
  scaling.truncate = rope->Bool("truncate", scaling.truncate);
}

// transformers 4 writes rope_theta and rope_scaling, transformers 5 both together as
// rope_parameters.
void ReadRope(const std::string& path, Fields* fields, absl::Status* status, ModelConfig* config) {
  const int max_position = fields->RequiredInt("max_position_embeddings");
  const JsonValue* parameters = fields->Find("rope_parameters");
  const JsonValue* scaling = fields->Find("rope_scaling");
  Fields new_spelling(path, "rope_parameters.", parameters, status);
  Fields old_spelling(path, "rope_scaling.", scaling, status);
  if (parameters != nullptr && !parameters->is_object())
    fields->Fail("rope_parameters", "is no object");
  if (scaling != nullptr && !scaling->is_object()) fields->Fail("rope_scaling", "is no object");
  if (parameters != nullptr && scaling != nullptr &&
      (RopeType(&new_spelling) != RopeType(&old_spelling) ||
       new_spelling.Number("factor") != old_spelling.Number("factor"))) {
    fields->Fail("rope_scaling", "disagrees with rope_parameters");
  }
  if (scaling != nullptr && RopeType(&old_spelling).empty()) {
    old_spelling.Fail("rope_type", "is missing, accepted: default linear yarn");
  }
  for (const char* nested : {"full_attention", "sliding_attention"}) {
    if (new_spelling.Find(nested) != nullptr)
      new_spelling.Fail(nested, "one RoPE per layer type is not supported");
  }
  const std::optional<double> theta = new_spelling.Number("rope_theta");
  config->rope_theta = theta ? *theta : fields->Number("rope_theta").value_or(config->rope_theta);
  ReadRopeScaling(parameters != nullptr ? &new_spelling : &old_spelling, max_position, config);
}

// Qwen3's own default in transformers; the others divide.
int DefaultHeadDim(const ModelConfig& config) {
  if (config.arch == Arch::kQwen3) return 128;
  return config.num_heads > 0 ? config.hidden / config.num_heads : 0;
}

void ReadShape(Fields* fields, ModelConfig* config) {
  config->num_layers = fields->RequiredInt("num_hidden_layers");
  config->hidden = fields->RequiredInt("hidden_size");
  config->num_heads = fields->RequiredInt("num_attention_heads");
  config->num_kv_heads = fields->Int("num_key_value_heads").value_or(config->num_heads);
  config->head_dim = fields->Int("head_dim").value_or(DefaultHeadDim(*config));
  config->ffn = fields->RequiredInt("intermediate_size");
  config->vocab = fields->RequiredInt("vocab_size");
  config->rms_eps = fields->Number("rms_norm_eps").value_or(config->rms_eps);
  config->tied_head = fields->Bool("tie_word_embeddings", false);
  config->qk_norm = config->arch == Arch::kQwen3;
  config->attention_bias = config->arch == Arch::kQwen2;
}

// do_sample: false asks for greedy decoding, whatever else the file says.
void ReadDefaults(Fields* fields, GenerationDefaults* defaults) {
  defaults->temperature = fields->Number("temperature");
  if (!fields->Bool("do_sample", true)) defaults->temperature = 0;
  defaults->top_k = fields->Int("top_k");
  defaults->top_p = fields->Number("top_p");
  defaults->min_p = fields->Number("min_p");
  defaults->repetition_penalty = fields->Number("repetition_penalty");
}

void AddIds(const std::vector<uint32_t>& more, std::vector<uint32_t>* ids) {
  ids->insert(ids->end(), more.begin(), more.end());
  std::sort(ids->begin(), ids->end());
  ids->erase(std::unique(ids->begin(), ids->end()), ids->end());
}

absl::StatusOr<JsonValue> ParseObject(const std::string& path, absl::string_view text) {
  absl::StatusOr<JsonValue> json = base::ParseJson(text);
  if (!json.ok()) return Annotate(json.status(), absl::StrCat("bad model config: file=", path));
  if (!json->is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat("bad model config: file=", path, " reason=no JSON object"));
  }
  return json;
}

absl::Status ReadGeneration(const std::string& path, absl::string_view text, ModelConfig* config) {
  BATON_ASSIGN_OR_RETURN(const JsonValue json, ParseObject(path, text));
  absl::Status status;
  Fields fields(path, "", &json, &status);
  ReadDefaults(&fields, &config->defaults);
  AddIds(fields.Ids("eos_token_id"), &config->eos_ids);
  if (const std::vector<uint32_t> bos = fields.Ids("bos_token_id"); bos.size() == 1)
    config->bos_id = bos[0];
  return status;
}

}  // namespace

absl::StatusOr<ModelConfig> ParseHfConfig(const std::string& path,
                                          absl::string_view config_json,
                                          absl::string_view generation_json) {
  BATON_ASSIGN_OR_RETURN(const JsonValue json, ParseObject(path, config_json));
  absl::Status status;
  Fields fields(path, "", &json, &status);
  ModelConfig config;
  config.arch = ReadArch(&fields);
  config.name = fields.String("_name_or_path");
  BATON_RETURN_IF_ERROR(status);
  ReadShape(&fields, &config);
  ReadRope(path, &fields, &status, &config);
  RefuseUnsupported(config, &fields);
  RefuseSlidingWindow(config, &fields);
  AddIds(fields.Ids("eos_token_id"), &config.eos_ids);
  if (const std::vector<uint32_t> bos = fields.Ids("bos_token_id"); bos.size() == 1)
    config.bos_id = bos[0];
  BATON_RETURN_IF_ERROR(status);
  if (!generation_json.empty()) {
    BATON_RETURN_IF_ERROR(ReadGeneration("generation_config.json", generation_json, &config));
  }
  BATON_RETURN_IF_ERROR(ValidateConfig(path, config));
  return config;
}

absl::StatusOr<ModelConfig> LoadHfConfig(const std::string& directory) {
  BATON_ASSIGN_OR_RETURN(const std::string config_path,
                         base::ResolveInDirectory(directory, "config.json"));
  BATON_ASSIGN_OR_RETURN(const std::string config_json,
                         base::ReadSmallFile(config_path, kConfigBytesMax));
  std::string generation_json;
  absl::StatusOr<std::string> generation_path =
      base::ResolveInDirectory(directory, "generation_config.json");
  if (generation_path.ok()) {
    BATON_ASSIGN_OR_RETURN(generation_json, base::ReadSmallFile(*generation_path, kConfigBytesMax));
  } else if (!absl::IsNotFound(generation_path.status())) {
    return generation_path.status();
  }
  return ParseHfConfig(absl::StrCat(directory, "/config.json"), config_json, generation_json);
}

}  // namespace baton::model
