#include "engine/text/model_text_config.h"

#include <sys/stat.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/base/gguf.h"
#include "engine/base/json.h"
#include "engine/base/mapped_file.h"
#include "engine/base/status_macros.h"
#include "engine/text/tokenizer.h"

namespace baton::text {
namespace {

using base::JsonValue;

constexpr size_t kMaxConfigBytes = size_t{4} << 20;
constexpr size_t kMaxEndIds = 64;

absl::Status BadField(absl::string_view file, absl::string_view field, absl::string_view reason) {
  return absl::InvalidArgumentError(absl::StrCat(file, ": ", field, ": ", reason));
}

// Leaves `out` alone when the field is absent or null.
absl::Status ReadNumber(absl::string_view file,
                        const JsonValue& json,
                        const char* field,
                        std::optional<float>* out) {
  const JsonValue* value = json.Find(field);
  if (value == nullptr || value->is_null()) return absl::OkStatus();
  const absl::StatusOr<double> number = value->AsDouble();
  if (!number.ok()) return BadField(file, field, "want a number");
  *out = static_cast<float>(*number);
  return absl::OkStatus();
}

absl::Status AddId(absl::string_view file, const JsonValue& value, std::vector<uint32_t>* ids) {
  const absl::StatusOr<int64_t> id = value.AsInt64();
  if (!id.ok() || *id < 0 || *id > std::numeric_limits<int32_t>::max()) {
    return BadField(file, "eos_token_id", "want token ids");
  }
  ids->push_back(static_cast<uint32_t>(*id));
  return absl::OkStatus();
}

// One id or a list of them.
absl::Status ReadEndIds(absl::string_view file, const JsonValue& json, std::vector<uint32_t>* ids) {
  const JsonValue* value = json.Find("eos_token_id");
  if (value == nullptr || value->is_null()) return absl::OkStatus();
  if (!value->is_array()) return AddId(file, *value, ids);
  if (value->items().size() > kMaxEndIds) return BadField(file, "eos_token_id", "too many");
  for (const JsonValue& item : value->items()) BATON_RETURN_IF_ERROR(AddId(file, item, ids));
  return absl::OkStatus();
}

absl::Status ReadGeneration(const JsonValue& json, ModelTextConfig* config) {
  constexpr absl::string_view kFile = "generation_config.json";
  BATON_RETURN_IF_ERROR(ReadEndIds(kFile, json, &config->eos_ids));
  BATON_RETURN_IF_ERROR(ReadNumber(kFile, json, "temperature", &config->temperature));
  BATON_RETURN_IF_ERROR(ReadNumber(kFile, json, "top_p", &config->top_p));
  BATON_RETURN_IF_ERROR(ReadNumber(kFile, json, "min_p", &config->min_p));
  BATON_RETURN_IF_ERROR(ReadNumber(kFile, json, "repetition_penalty", &config->repetition_penalty));
  std::optional<float> top_k;
  BATON_RETURN_IF_ERROR(ReadNumber(kFile, json, "top_k", &top_k));
  if (top_k.has_value()) config->top_k = static_cast<int32_t>(std::clamp(*top_k, 0.0f, 1e9f));
  // The author asks for greedy decoding, whatever else the file says.
  const JsonValue* do_sample = json.Find("do_sample");
  if (do_sample != nullptr && do_sample->is_bool() && !do_sample->is_true())
    config->temperature = 0.0f;
  return absl::OkStatus();
}

void SortIds(std::vector<uint32_t>* ids) {
  std::sort(ids->begin(), ids->end());
  ids->erase(std::unique(ids->begin(), ids->end()), ids->end());
}

absl::StatusOr<ModelTextConfig> FromDirectory(const std::string& directory) {
  BATON_ASSIGN_OR_RETURN(const std::string config,
                         base::ReadSmallFile(directory + "/config.json", kMaxConfigBytes));
  absl::StatusOr<std::string> generation =
      base::ReadSmallFile(directory + "/generation_config.json", kMaxConfigBytes);
  if (!generation.ok() && !absl::IsNotFound(generation.status())) return generation.status();
  absl::StatusOr<ModelTextConfig> parsed =
      ParseModelTextConfig(config, generation.ok() ? *generation : "");
  if (!parsed.ok()) return Annotate(parsed.status(), directory);
  return parsed;
}

std::optional<float> FindFloat(const base::GgufFile& file, absl::string_view key) {
  const std::optional<double> value = file.FindFloat(key);
  return value.has_value() ? std::optional<float>(static_cast<float>(*value)) : std::nullopt;
}

absl::StatusOr<ModelTextConfig> FromGguf(const std::string& path, const Tokenizer& tokenizer) {
  BATON_ASSIGN_OR_RETURN(const std::unique_ptr<base::GgufFile> file, base::GgufFile::Open(path));
  ModelTextConfig config;
  config.architecture = std::string(file->FindString("general.architecture").value_or(""));
  config.vocab_size = file->FindU32(config.architecture + ".vocab_size")
                          .value_or(static_cast<uint32_t>(tokenizer.vocab_size()));
  for (const char* key : {"eos_token_id", "eot_token_id", "eom_token_id"}) {
    if (const auto id = file->FindU32(absl::StrCat("tokenizer.ggml.", key)))
      config.eos_ids.push_back(*id);
  }
  config.temperature = FindFloat(*file, "general.sampling.temp");
  config.top_p = FindFloat(*file, "general.sampling.top_p");
  config.min_p = FindFloat(*file, "general.sampling.min_p");
  config.repetition_penalty = FindFloat(*file, "general.sampling.penalty_repeat");
  if (const auto top_k = file->FindU32("general.sampling.top_k")) {
    config.top_k = static_cast<int32_t>(std::min<uint32_t>(*top_k, 1'000'000'000));
  }
  // Chat models end a turn with a second token, which GGUF metadata does not name.
  for (const char* text : {"<|im_end|>", "<|endoftext|>"}) {
    const std::optional<TokenId> id = tokenizer.FindToken(text);
    if (id.has_value() && tokenizer.IsSpecial(*id)) config.eos_ids.push_back(*id);
  }
  return config;
}

}  // namespace

absl::StatusOr<ModelTextConfig> ParseModelTextConfig(absl::string_view config_json,
                                                     absl::string_view generation_json) {
  BATON_ASSIGN_OR_RETURN(const JsonValue json, base::ParseJson(config_json));
  ModelTextConfig config;
  if (const JsonValue* names = json.Find("architectures");
      names != nullptr && !names->items().empty()) {
    config.architecture = names->items()[0].text();
  }
  const JsonValue* vocab_size = json.Find("vocab_size");
  if (vocab_size == nullptr) return BadField("config.json", "vocab_size", "missing");
  const absl::StatusOr<int64_t> rows = vocab_size->AsInt64();
  if (!rows.ok() || *rows < 1 || *rows > std::numeric_limits<int32_t>::max()) {
    return BadField("config.json", "vocab_size", "want a positive integer");
  }
  config.vocab_size = static_cast<uint32_t>(*rows);
  BATON_RETURN_IF_ERROR(ReadEndIds("config.json", json, &config.eos_ids));
  if (!generation_json.empty()) {
    BATON_ASSIGN_OR_RETURN(const JsonValue generation, base::ParseJson(generation_json));
    BATON_RETURN_IF_ERROR(ReadGeneration(generation, &config));
  }
  SortIds(&config.eos_ids);
  return config;
}

absl::StatusOr<ModelTextConfig> LoadModelTextConfig(const std::string& path,
                                                    const Tokenizer& tokenizer) {
  struct stat info;
  const bool is_directory = stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
  BATON_ASSIGN_OR_RETURN(ModelTextConfig config,
                         is_directory ? FromDirectory(path) : FromGguf(path, tokenizer));
  if (tokenizer.eos_id().has_value()) config.eos_ids.push_back(*tokenizer.eos_id());
  SortIds(&config.eos_ids);
  return config;
}

std::string ModelNameFromPath(absl::string_view path) {
  path = absl::StripSuffix(path, "/");
  const size_t slash = path.rfind('/');
  if (slash != absl::string_view::npos) path.remove_prefix(slash + 1);
  return std::string(absl::StripSuffix(path, ".gguf"));
}

}  // namespace baton::text
