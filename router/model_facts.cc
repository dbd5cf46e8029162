#include "router/model_facts.h"

#include <utility>

#include "engine/base/status_macros.h"

namespace baton::router {

absl::StatusOr<ModelFacts> LoadModelFacts(const std::string& path,
                                          const std::string& served_name,
                                          const std::string& chat_template) {
  ModelFacts facts;
  BATON_ASSIGN_OR_RETURN(facts.tokenizer, text::Tokenizer::Load(path));
  BATON_ASSIGN_OR_RETURN(facts.config, text::LoadModelTextConfig(path, *facts.tokenizer));
  facts.name = served_name.empty() ? text::ModelNameFromPath(path) : served_name;
  absl::StatusOr<text::ChatTemplate> chat =
      text::ChatTemplate::Select(chat_template, *facts.tokenizer);
  if (chat.ok()) {
    facts.chat = *std::move(chat);
  } else if (!chat_template.empty()) {
    return chat.status();
  } else {
    facts.chat_refusal = absl::FailedPreconditionError(
        absl::StrCat("chat: this model has no chat template: ", chat.status().message()));
  }
  return facts;
}

}  // namespace baton::router
