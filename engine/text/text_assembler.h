#pragma once

// Token ids of one answer to the text deltas that the client gets.

#include <optional>
#include <string>
#include <utility>

#include "engine/text/stop_matcher.h"
#include "engine/text/tokenizer.h"
#include "engine/text/utf8_stream.h"

namespace baton::text {

struct TextAssemblerOptions {
  bool show_special = false;  // control tokens appear in the text
  bool include_stop =
      false;  // the text keeps the end token that finished it (stop strings: StopMatcher::Create)
};

// Token -> bytes -> stop strings held back -> whole characters. The deltas joined are the answer's
// text, always valid UTF-8. An answer that ends inside a character gets one U+FFFD for it, in
// streams and unary answers alike. Copyable, so that choices of one prompt can share their first
// token. Thread-compatible.
class TextAssembler {
 public:
  using Options = TextAssemblerOptions;

  // `tokenizer` must outlive the assembler.
  TextAssembler(const Tokenizer& tokenizer, StopMatcher stops, Options options)
      : tokenizer_(&tokenizer), stops_(std::move(stops)), options_(options) {}

  // Takes the next token of the answer; returns what can be sent. After a match it takes nothing
  // more: see stopped().
  std::string Push(TokenId id);
  // The answer is over, for whatever reason: what was held back, unless it lay behind a match.
  // `end_token` is the end token or stop token id that finished it, if one did; it must not have
  // been pushed.
  std::string Finish(std::optional<TokenId> end_token = std::nullopt);

  // A stop string is complete; generation has to end, and the text ends in front of it.
  bool stopped() const { return stops_.matched(); }
  const StopMatcher& stops() const { return stops_; }

 private:
  const Tokenizer* tokenizer_;
  StopMatcher stops_;
  Options options_;
  Utf8Stream stream_;
};

}  // namespace baton::text
