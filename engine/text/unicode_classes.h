#pragma once

// The character classes that pre-tokenizers are written in, as of Unicode 16.0 (what the Hugging
// Face reference implements), for every code point.

#include <array>
#include <cstdint>
#include <vector>

namespace baton::text {

enum class CharClass : uint8_t {
  kOther,
  kLetter,   // \p{L}
  kNumber,   // \p{N}
  kSpace,    // \s without CR and LF
  kNewline,  // CR and LF
};

inline bool IsSpace(CharClass c) { return c == CharClass::kSpace || c == CharClass::kNewline; }

// A two-stage table over all code points, built once from the generated runs. Immutable,
// thread-safe.
class UnicodeClasses {
 public:
  static const UnicodeClasses& Get();

  // `code_point` must be at most U+10FFFF. Surrogates are kOther.
  CharClass Of(char32_t code_point) const {
    return blocks_[stage1_[code_point >> kBlockBits] + (code_point & (kBlockSize - 1))];
  }

 private:
  static constexpr int kBlockBits = 8;
  static constexpr uint32_t kBlockSize = 1u << kBlockBits;

  UnicodeClasses();

  std::array<uint32_t, (0x110000 >> kBlockBits)> stage1_;  // offset of each block in blocks_
  std::vector<CharClass> blocks_;                          // equal blocks are stored once
};

}  // namespace baton::text
