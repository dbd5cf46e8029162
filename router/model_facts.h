#pragma once

// What the router knows of the model it fronts. Immutable once the process serves.

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

#include "engine/text/chat_template.h"
#include "engine/text/model_text_config.h"
#include "engine/text/tokenizer.h"

namespace baton::router {

struct ModelFacts {
  std::string name;  // clients may ask for it
  std::unique_ptr<text::Tokenizer> tokenizer;
  text::ModelTextConfig config;
  // Absent: the model has none that is known, and chats are refused with `chat_refusal`.
  std::optional<text::ChatTemplate> chat;
  absl::Status chat_refusal;
};

// `chat_template`: name of a built-in one, or empty for the model's own.
// Errors: what the files say; INVALID_ARGUMENT for a name that is not known.
absl::StatusOr<ModelFacts> LoadModelFacts(const std::string& path,
                                          const std::string& served_name,
                                          const std::string& chat_template);

}  // namespace baton::router
