#include "engine/text/unicode_classes.h"

#include <algorithm>
#include <map>

namespace baton::text {
namespace {

struct Run {
  char32_t first;
  char32_t last;
  CharClass char_class;
};

constexpr Run kRuns[] = {
#include "engine/text/unicode_runs.inc"
};

}  // namespace

UnicodeClasses::UnicodeClasses() {
  std::vector<CharClass> flat(0x110000, CharClass::kOther);
  for (const Run& run : kRuns) {
    std::fill(flat.begin() + run.first, flat.begin() + run.last + 1, run.char_class);
  }
  std::map<std::vector<CharClass>, uint32_t> offsets;
  for (uint32_t block = 0; block < stage1_.size(); ++block) {
    const auto begin = flat.begin() + block * kBlockSize;
    const auto [it, inserted] =
        offsets.try_emplace({begin, begin + kBlockSize}, static_cast<uint32_t>(blocks_.size()));
    if (inserted) blocks_.insert(blocks_.end(), begin, begin + kBlockSize);
    stage1_[block] = it->second;
  }
}

const UnicodeClasses& UnicodeClasses::Get() {
  static const UnicodeClasses* const kClasses = new UnicodeClasses();
  return *kClasses;
}

}  // namespace baton::text
