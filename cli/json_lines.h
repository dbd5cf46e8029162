#pragma once

// What `baton tokenize` and `baton render` share: the tokenizer's flags, and JSON Lines from
// standard input to standard output.

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "engine/base/json.h"
#include "engine/text/tokenizer.h"

namespace baton::cli {

// Answers a record with the members of a JSON object, without its braces.
using RecordHandler = std::function<absl::StatusOr<std::string>(const base::JsonValue& record)>;

// The file that --tokenizer names.
// Errors: INVALID_ARGUMENT when the flag is missing; those of Tokenizer::Load.
absl::StatusOr<std::unique_ptr<text::Tokenizer>> LoadTokenizerFlag();
bool LiteralFlag();

// Writes one line for each line of `in`: what `handler` says, or {"error": ...} when it fails or
// the line is no JSON or too long. Goes on after errors.
// Errors: INTERNAL when reading or writing fails.
absl::Status ProcessJsonLines(FILE* in, FILE* out, const RecordHandler& handler);

// "ids":[1,2,3]
std::string IdsMember(absl::Span<const text::TokenId> ids);

// The whole of a command: flags, tokenizer, lines. `make_handler` is called once.
using HandlerFactory = std::function<RecordHandler(const text::Tokenizer& tokenizer, bool literal)>;
int RunJsonLinesCommand(int argc,
                        char** argv,
                        absl::string_view usage,
                        const HandlerFactory& make_handler);

}  // namespace baton::cli
