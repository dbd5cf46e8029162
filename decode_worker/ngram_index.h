#pragma once

// Finds where the end of a text has occurred before in it.

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace baton::decode {

// An index over the tokens of one sequence, of the kind LZ77 compressors use: for the last 4 and
// the last 2 tokens, a chain of the places where the same ones stood before. Taking in a token and
// looking up are O(1), in memory of about 30 bytes a token. Tokens are not stored: callers pass the
// same text, grown. Thread-compatible.
class NgramIndex {
 public:
  // `capacity`: most tokens of the text. Allocates here only.
  explicit NgramIndex(int capacity);

  // Takes in what `tokens` has more than last time.
  void Extend(absl::Span<const uint32_t> tokens);

  struct Match {
    int length = 0;  // tokens before `next` that equal the end of the text, at most kMaxLength
    int next = 0;    // what followed there; always before the end
  };
  // The longest match of the few latest places of each chain; of equal ones the latest. `length` 0:
  // none.
  Match Find(absl::Span<const uint32_t> tokens) const;

  static constexpr int kMaxLength = 32;

 private:
  struct Chains {
    int order = 0;                  // tokens that must be equal
    int most_places = 0;            // looked at
    std::vector<int32_t> latest;    // by hash: end of the latest place, 0: none
    std::vector<int32_t> previous;  // by end: the one before with the same hash
  };
  static uint32_t HashBefore(absl::Span<const uint32_t> tokens, int end, int order);
  void FindIn(const Chains& chains, absl::Span<const uint32_t> tokens, Match* best) const;

  Chains long_;
  Chains short_;
  uint32_t mask_;
  int size_ = 0;
};

}  // namespace baton::decode
