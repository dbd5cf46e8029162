#pragma once

// Finds added tokens (control tokens and others that stand outside BPE) in raw text: leftmost, then
// longest.

#include <array>
#include <cstdint>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"

#include "engine/text/token_id.h"

namespace baton::text {

// A byte trie. Immutable once the last token has been added, then thread-safe.
class AddedTokenFinder {
 public:
  // `content` must not be empty.
  void Add(absl::string_view content, TokenId id);

  struct Match {
    size_t begin;
    size_t end;
    TokenId id;
  };
  // The first match in text[from, to), which lies wholly in it.
  std::optional<Match> Find(absl::string_view text, size_t from, size_t to) const;

 private:
  static constexpr uint32_t kRoot = 0;

  std::array<bool, 256> starts_ = {};                  // bytes that a token begins with
  absl::flat_hash_map<uint64_t, uint32_t> edges_;      // node << 8 | byte -> node
  absl::flat_hash_map<uint32_t, TokenId> token_ends_;  // node -> token
};

}  // namespace baton::text
