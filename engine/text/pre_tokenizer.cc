#include "engine/text/pre_tokenizer.h"

#include "engine/base/utf8.h"

namespace baton::text {
namespace {

constexpr char32_t kLongS = 0x17F;  // equals s when case is ignored

char32_t FoldContraction(char32_t c, bool ignore_case) {
  if (!ignore_case) return c;
  if (c >= 'A' && c <= 'Z') return c + ('a' - 'A');
  return c == kLongS ? 's' : c;
}

}  // namespace

absl::string_view PreTokenizerName(PreTokenizerKind kind) {
  return kind == PreTokenizerKind::kQwen2 ? "qwen2" : "smollm";
}

std::optional<PreTokenizerKind> FindPreTokenizer(absl::string_view name) {
  if (name == "qwen2") return PreTokenizerKind::kQwen2;
  if (name == "smollm") return PreTokenizerKind::kSmolLm;
  return std::nullopt;
}

absl::string_view PreTokenizer::Next() {
  if (pos_ >= text_.size()) return {};
  const size_t begin = pos_;
  pos_ = kind_ == PreTokenizerKind::kQwen2 ? EndQwen2(begin) : EndSmolLm(begin);
  return text_.substr(begin, pos_ - begin);
}

PreTokenizer::Char PreTokenizer::Read(size_t pos) const {
  const uint8_t first = static_cast<uint8_t>(text_[pos]);
  if (first < 0x80) return {first, classes_.Of(first), pos + 1};
  const base::Utf8Step step = base::DecodeUtf8(text_.substr(pos));
  return {step.code_point, classes_.Of(step.code_point), pos + step.length};
}

size_t PreTokenizer::SkipClass(size_t pos, CharClass char_class) const {
  while (pos < text_.size()) {
    const Char c = Read(pos);
    if (c.char_class != char_class) break;
    pos = c.end;
  }
  return pos;
}

size_t PreTokenizer::SkipNewlines(size_t pos) const {
  while (pos < text_.size() && (text_[pos] == '\r' || text_[pos] == '\n')) ++pos;
  return pos;
}

size_t PreTokenizer::MatchContraction(size_t pos, bool ignore_case) const {
  if (text_[pos] != '\'' || pos + 1 >= text_.size()) return pos;
  const Char first = Read(pos + 1);
  const char32_t a = FoldContraction(first.code_point, ignore_case);
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return first.end;
  if ((a != 'r' && a != 'v' && a != 'l') || first.end >= text_.size()) return pos;
  const Char second = Read(first.end);
  return FoldContraction(second.code_point, ignore_case) == (a == 'l' ? U'l' : U'e') ? second.end
                                                                                     : pos;
}

size_t PreTokenizer::EndQwen2(size_t pos) const {
  const Char c = Read(pos);
  if (c.char_class == CharClass::kLetter) return SkipClass(c.end, CharClass::kLetter);
  if (c.code_point == '\'') {
    const size_t end = MatchContraction(pos, /*ignore_case=*/true);
    if (end > pos) return end;
  }
  if (c.char_class == CharClass::kNumber) return c.end;
  if (c.char_class == CharClass::kNewline) return EndSpace(pos, c, /*newlines=*/true);
  if (c.end < text_.size()) {
    const Char next = Read(c.end);
    if (next.char_class == CharClass::kLetter) return SkipClass(next.end, CharClass::kLetter);
    if (c.code_point == ' ' && next.char_class == CharClass::kOther) {
      return SkipNewlines(SkipClass(next.end, CharClass::kOther));
    }
  }
  if (c.char_class == CharClass::kOther) return SkipNewlines(SkipClass(c.end, CharClass::kOther));
  return EndSpace(pos, c, /*newlines=*/true);
}

size_t PreTokenizer::EndSmolLm(size_t pos) const {
  const Char c = Read(pos);
  if (c.char_class == CharClass::kNumber) return c.end;
  if (c.char_class == CharClass::kLetter) return SkipClass(c.end, CharClass::kLetter);
  if (c.code_point == '\'') {
    const size_t end = MatchContraction(pos, /*ignore_case=*/false);
    if (end > pos) return end;
  }
  if (c.char_class == CharClass::kOther) return SkipClass(c.end, CharClass::kOther);
  if (c.code_point == ' ' && c.end < text_.size()) {
    const Char next = Read(c.end);
    if (next.char_class == CharClass::kLetter || next.char_class == CharClass::kOther) {
      return SkipClass(next.end, next.char_class);
    }
  }
  return EndSpace(pos, c, /*newlines=*/false);
}

size_t PreTokenizer::EndSpace(size_t pos, const Char& first, bool newlines) const {
  size_t last_begin = pos;  // of the last white-space character
  size_t end = first.end;
  size_t newline_end = first.char_class == CharClass::kNewline ? first.end : 0;
  bool followed_by_number = false;
  while (end < text_.size()) {
    const Char c = Read(end);
    if (!IsSpace(c.char_class)) {
      followed_by_number = c.char_class == CharClass::kNumber;
      break;
    }
    last_begin = end;
    end = c.end;
    if (c.char_class == CharClass::kNewline) newline_end = c.end;
  }
  if (newlines && newline_end > 0) return newline_end;
  // \s+(?!\S): the last white-space character goes to the next piece, if there is one and if others
  // remain. Numbers have been cut out before GPT-2's rule runs, so for it the text ends in front of
  // one.
  if (end == text_.size() || (kind_ == PreTokenizerKind::kSmolLm && followed_by_number)) return end;
  return last_begin > pos ? last_begin : end;
}

}  // namespace baton::text
