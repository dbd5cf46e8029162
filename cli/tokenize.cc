// `baton tokenize`: texts to token ids, one JSON object a line.

#include "absl/status/status.h"

#include "cli/commands.h"
#include "cli/json_lines.h"

namespace baton::cli {
namespace {

absl::StatusOr<std::string> AnswerText(const text::Tokenizer& tokenizer,
                                       bool literal,
                                       const base::JsonValue& record) {
  const base::JsonValue* text = record.Find("text");
  if (text == nullptr || !text->is_string())
    return absl::InvalidArgumentError("the record has no \"text\"");
  return IdsMember(tokenizer.Encode(
      text->text(), literal ? text::SpecialPolicy::kLiteral : text::SpecialPolicy::kParse));
}

}  // namespace

int RunTokenize(int argc, char** argv) {
  return RunJsonLinesCommand(argc, argv,
                             "baton tokenize --tokenizer FILE [--literal]: JSON Lines on standard "
                             "input, {\"text\": ..} -> {\"ids\": [..]}.",
                             [](const text::Tokenizer& tokenizer, bool literal) {
                               return [&tokenizer, literal](const base::JsonValue& record) {
                                 return AnswerText(tokenizer, literal, record);
                               };
                             });
}

}  // namespace baton::cli
