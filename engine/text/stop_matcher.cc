#include "engine/text/stop_matcher.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace baton::text {

absl::StatusOr<StopMatcher> StopMatcher::Create(std::vector<std::string> stops, bool include_stop) {
  if (stops.size() > kMaxStopStrings) {
    return absl::InvalidArgumentError(
        absl::StrCat("stop: ", stops.size(), " stop strings, accepted are ", kMaxStopStrings));
  }
  StopMatcher matcher;
  matcher.include_stop_ = include_stop;
  for (std::string& stop : stops) {
    if (stop.empty()) return absl::InvalidArgumentError("stop: a stop string is empty");
    if (stop.size() > kMaxStopStringBytes) {
      return absl::InvalidArgumentError(absl::StrCat("stop: a stop string has ", stop.size(),
                                                     " bytes, accepted are ", kMaxStopStringBytes));
    }
    matcher.patterns_.push_back(MakePattern(std::move(stop)));
  }
  return matcher;
}

StopMatcher::Pattern StopMatcher::MakePattern(std::string text) {
  Pattern pattern;
  pattern.text = std::move(text);
  pattern.fallback.assign(pattern.text.size() + 1, 0);
  for (size_t length = 1; length < pattern.text.size(); ++length) {
    pattern.Step(pattern.text[length]);
    pattern.fallback[length + 1] = pattern.matched;
  }
  pattern.matched = 0;
  return pattern;
}

void StopMatcher::Pattern::Step(char byte) {
  while (matched > 0 && text[matched] != byte) matched = fallback[matched];
  if (text[matched] == byte) ++matched;
}

bool StopMatcher::Push(absl::string_view bytes, std::string* out) {
  if (matched()) return true;
  if (patterns_.empty()) {
    out->append(bytes.data(), bytes.size());
    return false;
  }
  for (const char byte : bytes) {
    held_.push_back(byte);
    size_t longest = 0;
    for (size_t i = 0; i < patterns_.size(); ++i) {
      Pattern& pattern = patterns_[i];
      pattern.Step(byte);
      longest = std::max<size_t>(longest, pattern.matched);
      const bool complete = pattern.matched == pattern.text.size();
      if (complete && (!matched_ || pattern.text.size() > stop(*matched_).size())) matched_ = i;
    }
    if (matched_) {
      const size_t kept = include_stop_ ? held_.size() : held_.size() - stop(*matched_).size();
      out->append(held_, 0, kept);
      held_.clear();
      return true;
    }
    if (held_.size() > longest) {
      const size_t free = held_.size() - longest;
      out->append(held_, 0, free);
      held_.erase(0, free);
    }
  }
  return false;
}

void StopMatcher::Flush(std::string* out) {
  out->append(held_);
  held_.clear();
  for (Pattern& pattern : patterns_) pattern.matched = 0;
}

}  // namespace baton::text
