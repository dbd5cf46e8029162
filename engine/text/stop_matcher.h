#pragma once

// Stop strings over the bytes of an answer. The same code runs in the workers, which end the
// request at the accepted token that completes a match, and in the router, which holds back text
// that may yet become one.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace baton::text {

inline constexpr size_t kMaxStopStrings = 16;
inline constexpr size_t kMaxStopStringBytes = 256;  // of one

// Finds the match that ends first; of matches that end at the same byte, the longest. Bytes come in
// any portions: matches may begin and end inside tokens. Thread-compatible; a copy goes on from the
// same state.
class StopMatcher {
 public:
  // No stop strings: everything is released at once.
  StopMatcher() = default;
  // `include_stop`: the text keeps the stop string that ended it.
  // Errors: INVALID_ARGUMENT for an empty stop string, too many, or too long a one.
  static absl::StatusOr<StopMatcher> Create(std::vector<std::string> stops, bool include_stop);

  // Takes the next bytes and appends to `out` those that no later byte can make part of a match.
  // True when a match is complete: `out` then has all of the text before it (and the stop string,
  // if included), the rest of `bytes` is dropped, and later calls take nothing.
  bool Push(absl::string_view bytes, std::string* out);
  // The answer ended in another way: appends what was held back. Nothing after a match.
  void Flush(std::string* out);

  bool matched() const { return matched_.has_value(); }
  // Which stop string matched, as an index into those given.
  std::optional<size_t> matched_index() const { return matched_; }
  const std::string& stop(size_t index) const { return patterns_[index].text; }

 private:
  // One stop string as a Knuth-Morris-Pratt automaton.
  struct Pattern {
    std::string text;
    std::vector<uint32_t>
        fallback;          // for a matched length: the next shorter one that can still match
    uint32_t matched = 0;  // bytes of `text` that the input so far ends with

    void Step(char byte);
  };

  static Pattern MakePattern(std::string text);

  std::vector<Pattern> patterns_;
  bool include_stop_ = false;
  std::string held_;  // the longest end of the input that begins a stop string
  std::optional<size_t> matched_;
};

}  // namespace baton::text
