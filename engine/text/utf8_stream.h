#pragma once

// Bytes in, valid UTF-8 out, never a broken character.

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace baton::text {

// Holds back at most three bytes of an unfinished character. What can never become a character is
// replaced at once by U+FFFD, one for each maximal subpart (Unicode Standard, section 3.9).
// Thread-compatible.
class Utf8Stream {
 public:
  // Appends to `out` what later bytes cannot change.
  void Push(absl::string_view bytes, std::string* out);
  // Appends one U+FFFD when the bytes end inside a character. The stream can be used again.
  void Flush(std::string* out);

 private:
  std::string pending_;  // the beginning of one character
};

}  // namespace baton::text
