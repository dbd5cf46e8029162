#include "cli/json_lines.h"

#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "engine/base/flags.h"
#include "engine/base/status_macros.h"
#include "engine/text/nfc.h"

ABSL_FLAG(std::string,
          tokenizer,
          "",
          "tokenizer.json, the directory that holds it, or a GGUF file.");
ABSL_FLAG(bool,
          literal,
          false,
          "The text is untrusted: what looks like a control token stays text (of chat records, the "
          "text of system, user and "
          "tool messages).");

namespace baton::cli {
namespace {

constexpr size_t kMaxLineBytes = size_t{64} << 20;

// The next line without its end. False at the end of the input. `too_long`: the line was read past
// but not kept.
bool ReadLine(FILE* in, std::string* line, bool* too_long) {
  line->clear();
  *too_long = false;
  bool any = false;
  for (int c = std::getc(in); c != EOF; c = std::getc(in)) {
    any = true;
    if (c == '\n') break;
    if (line->size() == kMaxLineBytes) {
      *too_long = true;
    } else {
      line->push_back(static_cast<char>(c));
    }
  }
  return any;
}

absl::StatusOr<std::string> AnswerLine(const std::string& line,
                                       bool too_long,
                                       const RecordHandler& handler) {
  if (too_long) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a line has more than ", kMaxLineBytes, " bytes"));
  }
  BATON_ASSIGN_OR_RETURN(const base::JsonValue record, base::ParseJson(line));
  if (!record.is_object()) return absl::InvalidArgumentError("a line is not a JSON object");
  return handler(record);
}

}  // namespace

absl::StatusOr<std::unique_ptr<text::Tokenizer>> LoadTokenizerFlag() {
  const std::string path = absl::GetFlag(FLAGS_tokenizer);
  if (path.empty())
    return absl::InvalidArgumentError(
        "--tokenizer is missing: name a tokenizer.json, its directory or a GGUF file");
  return text::Tokenizer::Load(path);
}

bool LiteralFlag() { return absl::GetFlag(FLAGS_literal); }

absl::Status ProcessJsonLines(FILE* in, FILE* out, const RecordHandler& handler) {
  std::string line;
  bool too_long = false;
  while (ReadLine(in, &line, &too_long)) {
    const auto answer = AnswerLine(line, too_long, handler);
    std::string text = "{";
    if (answer.ok()) {
      text += *answer;
    } else {
      text += "\"error\":";
      std::string storage;  // messages may quote what was read
      base::AppendJsonString(text::ToValidUtf8(answer.status().message(), &storage), &text);
    }
    text += "}\n";
    if (std::fwrite(text.data(), 1, text.size(), out) != text.size() || std::fflush(out) != 0) {
      return absl::InternalError("cannot write the answer");
    }
  }
  return std::ferror(in) ? absl::InternalError("cannot read the input") : absl::OkStatus();
}

std::string IdsMember(absl::Span<const text::TokenId> ids) {
  return absl::StrCat("\"ids\":[", absl::StrJoin(ids, ","), "]");
}

int RunJsonLinesCommand(int argc,
                        char** argv,
                        absl::string_view usage,
                        const HandlerFactory& make_handler) {
  const base::FlagsOutcome flags = base::HandleFlags(argc, argv, usage, {"cli/json_lines"});
  if (!flags.go_on) return flags.exit_code;
  const auto tokenizer = LoadTokenizerFlag();
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "%s: %s\n", argv[0], std::string(tokenizer.status().message()).c_str());
    return 2;
  }
  const absl::Status status =
      ProcessJsonLines(stdin, stdout, make_handler(**tokenizer, LiteralFlag()));
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s: %s\n", argv[0], std::string(status.message()).c_str());
  return 1;
}

}  // namespace baton::cli
