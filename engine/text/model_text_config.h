#pragma once

// What the router needs to know of a model beside its tokenizer: name, vocabulary, end tokens,
// recommended sampling. It must not depend on what the model computes, so this is a small reader of
// its own.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace baton::text {

class Tokenizer;

struct ModelTextConfig {
  std::string architecture;  // "Qwen3ForCausalLM", "qwen3": as the file says
  uint32_t vocab_size = 0;   // rows of the embedding: ids are below it
  std::vector<uint32_t>
      eos_ids;  // ascending, each once: every id that any file calls an end of the answer
  // What the model's author recommends for sampling.
  std::optional<float> temperature;
  std::optional<int32_t> top_k;
  std::optional<float> top_p;
  std::optional<float> min_p;
  std::optional<float> repetition_penalty;
};

// `path` names a Hugging Face directory (config.json, and generation_config.json where it is there)
// or a GGUF file; `tokenizer` adds its end token and is the vocabulary of a GGUF file that names
// none. Errors: NOT_FOUND; INVALID_ARGUMENT naming file, field and reason.
absl::StatusOr<ModelTextConfig> LoadModelTextConfig(const std::string& path,
                                                    const Tokenizer& tokenizer);

// The same from the texts of the two files; `generation_json` may be empty. Nothing of the
// tokenizer is added.
absl::StatusOr<ModelTextConfig> ParseModelTextConfig(absl::string_view config_json,
                                                     absl::string_view generation_json);

// The last part of a model's path, without ".gguf": what the model is called when nobody says
// otherwise.
std::string ModelNameFromPath(absl::string_view path);

}  // namespace baton::text
