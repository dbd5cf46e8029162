// `baton render`: chat records to prompts and token ids, one JSON object a line.

#include "absl/strings/str_cat.h"

#include "cli/commands.h"
#include "cli/json_lines.h"
#include "engine/base/status_macros.h"
#include "engine/text/chat_record.h"
#include "engine/text/chat_template.h"

namespace baton::cli {
namespace {

absl::StatusOr<std::string> AnswerChat(const text::Tokenizer& tokenizer,
                                       bool literal,
                                       const base::JsonValue& json) {
  BATON_ASSIGN_OR_RETURN(text::ChatRecord record, text::ReadChatRecord(json));
  BATON_ASSIGN_OR_RETURN(const text::ChatTemplate chat_template,
                         text::ChatTemplate::Select(record.template_name, tokenizer));
  record.options.like_reference = true;
  BATON_ASSIGN_OR_RETURN(const text::RenderedPrompt prompt,
                         chat_template.Render(record.messages, record.options));
  std::string members = "\"prompt\":";
  base::AppendJsonString(prompt.text, &members);
  absl::StrAppend(&members, ",",
                  IdsMember(literal ? tokenizer.EncodeWithTrusted(prompt.text, prompt.trusted)
                                    : tokenizer.Encode(prompt.text, text::SpecialPolicy::kParse)));
  return members;
}

}  // namespace

int RunRender(int argc, char** argv) {
  return RunJsonLinesCommand(argc, argv,
                             "baton render --tokenizer FILE [--literal]: JSON Lines on standard "
                             "input, chat records -> {\"prompt\": .., \"ids\": [..]}.\n"
                             "A record: {\"template\": NAME, \"messages\": [..], \"tools\": [..], "
                             "\"add_generation_prompt\": BOOL, \"enable_thinking\": BOOL};\n"
                             "templates: qwen3, qwen3-2025-04, qwen3-instruct-2507, "
                             "qwen3-thinking-2507, smollm2, chatml; absent: the tokenizer's own.\n"
                             "Prompts are those of the official templates, exactly.",
                             [](const text::Tokenizer& tokenizer, bool literal) {
                               return [&tokenizer, literal](const base::JsonValue& record) {
                                 return AnswerChat(tokenizer, literal, record);
                               };
                             });
}

}  // namespace baton::cli
