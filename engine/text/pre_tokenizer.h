#pragma once

// Cuts text into the pieces that BPE works on, by hand-written scanners instead of a regex engine:
// linear in the length of the text whatever it holds.

#include <cstddef>
#include <optional>

#include "absl/strings/string_view.h"

#include "engine/text/unicode_classes.h"

namespace baton::text {

enum class PreTokenizerKind {
  // (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|
  // ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
  kQwen2,
  // Every \p{N} by itself; what lies between by GPT-2's rule:
  // 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
  kSmolLm,
};

// "qwen2" or "smollm", the names GGUF files use.
absl::string_view PreTokenizerName(PreTokenizerKind kind);
std::optional<PreTokenizerKind> FindPreTokenizer(absl::string_view name);

// Walks over the pieces of one text. Thread-compatible.
class PreTokenizer {
 public:
  // `text` must be valid UTF-8 and outlive the walk.
  PreTokenizer(PreTokenizerKind kind, absl::string_view text)
      : kind_(kind), text_(text), classes_(UnicodeClasses::Get()) {}

  // The next piece; empty at the end. The pieces joined are the text.
  absl::string_view Next();

 private:
  struct Char {
    char32_t code_point;
    CharClass char_class;
    size_t end;  // offset behind the character
  };

  // The character at `pos`, which must lie inside the text.
  Char Read(size_t pos) const;
  // The end of the run of characters from `pos` on that are in `char_class`.
  size_t SkipClass(size_t pos, CharClass char_class) const;
  size_t SkipNewlines(size_t pos) const;
  // The end of a contraction such as 've at `pos`, or `pos`.
  size_t MatchContraction(size_t pos, bool ignore_case) const;
  size_t EndQwen2(size_t pos) const;
  size_t EndSmolLm(size_t pos) const;
  // The end of a white-space piece that begins at `pos` with `first`. `newlines`: the alternative
  // \s*[\r\n]+ comes first.
  size_t EndSpace(size_t pos, const Char& first, bool newlines) const;

  const PreTokenizerKind kind_;
  const absl::string_view text_;
  const UnicodeClasses& classes_;
  size_t pos_ = 0;
};

}  // namespace baton::text
