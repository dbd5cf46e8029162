#include <array>

#include "engine/base/utf8.h"
#include "engine/text/vocabulary.h"

namespace baton::text {
namespace {

// Printable Latin-1 stands for itself; the other 68 bytes are numbered from U+0100 on.
constexpr int kAlphabetEnd = 0x100 + 68;

constexpr bool IsItself(int byte) {
  return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

struct Alphabet {
  std::array<char16_t, 256> char_of = {};
  std::array<int16_t, kAlphabetEnd> byte_of = {};
};

constexpr Alphabet MakeAlphabet() {
  Alphabet alphabet;
  for (int c = 0; c < kAlphabetEnd; ++c) alphabet.byte_of[c] = -1;
  int next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const int c = IsItself(byte) ? byte : next++;
    alphabet.char_of[byte] = static_cast<char16_t>(c);
    alphabet.byte_of[c] = static_cast<int16_t>(byte);
  }
  return alphabet;
}

constexpr Alphabet kAlphabet = MakeAlphabet();

}  // namespace

std::optional<std::string> DecodeByteAlphabet(absl::string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const base::Utf8Step step = base::DecodeUtf8(text.substr(pos));
    if (step.kind != base::Utf8Step::kValid || step.code_point >= kAlphabetEnd) return std::nullopt;
    const int byte = kAlphabet.byte_of[step.code_point];
    if (byte < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(byte));
    pos += step.length;
  }
  return bytes;
}

std::string EncodeByteAlphabet(absl::string_view bytes) {
  std::string text;
  text.reserve(bytes.size() * 2);
  for (const char c : bytes) base::AppendUtf8(kAlphabet.char_of[static_cast<uint8_t>(c)], &text);
  return text;
}

}  // namespace baton::text
