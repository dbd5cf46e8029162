#pragma once

// UTF-8 as the Unicode Standard defines it: no overlong forms, no surrogates, nothing past
// U+10FFFF.

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace baton::base {

inline constexpr char32_t kReplacementChar = 0xFFFD;

// One step of decoding. `length` is the bytes consumed, at least 1 when the input is not empty.
struct Utf8Step {
  enum Kind : uint8_t {
    kValid,       // a whole character
    kInvalid,     // a maximal subpart that no later byte can complete; stands for one U+FFFD
    kIncomplete,  // the input ends inside a sequence that could still become valid
  };
  char32_t code_point = kReplacementChar;
  uint8_t length = 0;
  Kind kind = kInvalid;
};

// Decodes the sequence at the start of `bytes`, which must not be empty.
Utf8Step DecodeUtf8(absl::string_view bytes);

bool IsValidUtf8(absl::string_view bytes);

// Appends `code_point`, which must be a scalar value, to `out`.
void AppendUtf8(char32_t code_point, std::string* out);

// Number of bytes AppendUtf8 would write.
inline size_t Utf8Length(char32_t code_point) {
  return code_point < 0x80 ? 1 : code_point < 0x800 ? 2 : code_point < 0x10000 ? 3 : 4;
}

}  // namespace baton::base
