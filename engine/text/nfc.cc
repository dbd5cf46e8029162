#include "engine/text/nfc.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <utf8proc.h>

#include "engine/base/log.h"
#include "engine/base/utf8.h"

namespace baton::text {
namespace {

constexpr auto kDecompose = static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE);
constexpr auto kCompose = static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE);
constexpr char32_t kFirstActive = 0x300;  // every character below is inert

int CombiningClass(int32_t c) { return c < 0x300 ? 0 : utf8proc_get_property(c)->combining_class; }

// Appends the full canonical decomposition of `c`.
void Decompose(char32_t c, std::vector<int32_t>* out) {
  if (c < 0xC0) {
    out->push_back(static_cast<int32_t>(c));
    return;
  }
  int32_t buffer[32];  // the longest canonical decomposition has four characters
  const auto count =
      utf8proc_decompose_char(static_cast<int32_t>(c), buffer, 32, kDecompose, nullptr);
  if (count < 0 || count > 32) {  // unassigned characters decompose to themselves; an error does
                                  // not happen for scalar values
    out->push_back(static_cast<int32_t>(c));
    return;
  }
  out->insert(out->end(), buffer, buffer + count);
}

// Canonical ordering. utf8proc's own is an insertion sort, quadratic in a run of unordered marks:
// 26 s for 200 kB.
void Reorder(std::vector<int32_t>* chars) {
  auto begin = chars->begin();
  while (begin != chars->end()) {
    if (CombiningClass(*begin) == 0) {
      ++begin;
      continue;
    }
    auto end = begin;
    while (end != chars->end() && CombiningClass(*end) != 0) ++end;
    std::stable_sort(begin, end,
                     [](int32_t a, int32_t b) { return CombiningClass(a) < CombiningClass(b); });
    begin = end;
  }
}

void Compose(std::vector<int32_t>* chars) {
  const auto count = utf8proc_normalize_utf32(
      chars->data(), static_cast<utf8proc_ssize_t>(chars->size()), kCompose);
  BATON_CHECK(count >= 0, "utf8proc refused scalar values");
  chars->resize(static_cast<size_t>(count));
}

// Which characters NFC leaves alone whatever stands beside them, so long as every neighbour is
// inert too: starters that are their own composition and are never the second half of one.
class InertSet {
 public:
  InertSet() : bits_(0x110000, true) {
    std::vector<int32_t> chars;
    for (int32_t c = kFirstActive; c < 0x110000; ++c) {
      const utf8proc_property_t& property = *utf8proc_get_property(c);
      const bool second = property.comb_index >= 0x8000 && property.comb_index != UINT16_MAX;
      const bool jamo = c >= 0x1161 && c < 0x1200;  // vowels and trailing consonants
      bits_[c] = property.combining_class == 0 && !second && !jamo;
      if (!bits_[c] || property.decomp_seqindex == UINT16_MAX || property.decomp_type != 0)
        continue;
      chars.clear();
      Decompose(static_cast<char32_t>(c), &chars);
      Compose(&chars);
      bits_[c] = chars.size() == 1 && chars[0] == c;
    }
  }
  bool Contains(char32_t c) const { return bits_[c]; }

 private:
  std::vector<bool> bits_;
};

const InertSet& Inert() {
  static const InertSet* const kSet = new InertSet();
  return *kSet;
}

// The offset of the first byte at or behind `pos` that is not ASCII.
size_t SkipAscii(absl::string_view text, size_t pos) {
  while (pos + 8 <= text.size()) {
    uint64_t word;
    std::memcpy(&word, text.data() + pos, 8);
    if (word & 0x8080808080808080u) break;
    pos += 8;
  }
  while (pos < text.size() && static_cast<uint8_t>(text[pos]) < 0x80) ++pos;
  return pos;
}

bool IsNfcAlready(absl::string_view text) {
  size_t pos = SkipAscii(text, 0);
  if (pos == text.size()) return true;
  const InertSet& inert = Inert();
  while (pos < text.size()) {
    const base::Utf8Step step = base::DecodeUtf8(text.substr(pos));
    if (step.kind != base::Utf8Step::kValid || !inert.Contains(step.code_point)) return false;
    pos = SkipAscii(text, pos + step.length);
  }
  return true;
}

}  // namespace

absl::string_view ToNfc(absl::string_view text, std::string* storage) {
  if (IsNfcAlready(text)) return text;
  std::vector<int32_t> chars;
  chars.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const base::Utf8Step step = base::DecodeUtf8(text.substr(pos));
    Decompose(step.code_point, &chars);
    pos += step.length;
  }
  Reorder(&chars);
  Compose(&chars);
  storage->clear();
  storage->reserve(text.size());
  for (const int32_t c : chars) base::AppendUtf8(static_cast<char32_t>(c), storage);
  return *storage;
}

absl::string_view ToValidUtf8(absl::string_view text, std::string* storage) {
  if (base::IsValidUtf8(text)) return text;
  storage->clear();
  for (size_t pos = 0; pos < text.size();) {
    const base::Utf8Step step = base::DecodeUtf8(text.substr(pos));
    base::AppendUtf8(step.code_point, storage);
    pos += step.length;
  }
  return *storage;
}

}  // namespace baton::text
