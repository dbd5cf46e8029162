#include "engine/base/utf8.h"

#include <cstring>

namespace baton::base {
namespace {

struct Lead {
  uint8_t length;       // of the whole sequence, 0 for a byte that starts none
  uint8_t second_low;   // the second byte's range is narrower than 80..BF for a few leads:
  uint8_t second_high;  // that is what rules out overlong forms, surrogates and > U+10FFFF
};

Lead ClassifyLead(uint8_t byte) {
  if (byte < 0xC2) return {0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte < 0xF0) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte < 0xF4) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

}  // namespace

Utf8Step DecodeUtf8(absl::string_view bytes) {
  const uint8_t first = static_cast<uint8_t>(bytes[0]);
  if (first < 0x80) return {first, 1, Utf8Step::kValid};
  const Lead lead = ClassifyLead(first);
  if (lead.length == 0) return {kReplacementChar, 1, Utf8Step::kInvalid};
  char32_t value = first & (0x7F >> lead.length);
  for (uint8_t i = 1; i < lead.length; ++i) {
    if (i >= bytes.size()) return {kReplacementChar, i, Utf8Step::kIncomplete};
    const uint8_t byte = static_cast<uint8_t>(bytes[i]);
    const uint8_t low = i == 1 ? lead.second_low : 0x80;
    const uint8_t high = i == 1 ? lead.second_high : 0xBF;
    if (byte < low || byte > high) return {kReplacementChar, i, Utf8Step::kInvalid};
    value = (value << 6) | (byte & 0x3F);
  }
  return {value, lead.length, Utf8Step::kValid};
}

bool IsValidUtf8(absl::string_view bytes) {
  size_t i = 0;
  while (i < bytes.size()) {
    while (i + 8 <= bytes.size()) {  // eight ASCII bytes at a time
      uint64_t word;
      std::memcpy(&word, bytes.data() + i, 8);
      if (word & 0x8080808080808080u) break;
      i += 8;
    }
    if (i >= bytes.size()) break;
    const Utf8Step step = DecodeUtf8(bytes.substr(i));
    if (step.kind != Utf8Step::kValid) return false;
    i += step.length;
  }
  return true;
}

void AppendUtf8(char32_t c, std::string* out) {
  if (c < 0x80) {
    out->push_back(static_cast<char>(c));
  } else if (c < 0x800) {
    out->push_back(static_cast<char>(0xC0 | (c >> 6)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else if (c < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | (c >> 12)));
    out->push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | (c >> 18)));
    out->push_back(static_cast<char>(0x80 | ((c >> 12) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  }
}

}  // namespace baton::base
