#pragma once

// Byte-pair encoding of one piece of text over the bytes of its tokens.

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"

#include "engine/text/token_id.h"

namespace baton::text {

struct BpeMerge {
  TokenId left;
  TokenId right;
  TokenId result;
};

// The tokens by their bytes and the merge rules in the order of their rank. Immutable but for a
// memo, thread-safe.
class Bpe {
 public:
  using TokenMap = absl::flat_hash_map<absl::string_view, TokenId>;

  // `tokens`: bytes to id, for the tokens that BPE may produce; the bytes must outlive the object.
  // Ids are below `vocab_size`, those in `merges` too. `whole_pieces_first`: a piece that is a
  // token becomes that token even where the merges give others (tokenizer.json's ignore_merges).
  Bpe(TokenMap tokens,
      size_t vocab_size,
      const std::vector<BpeMerge>& merges,
      bool whole_pieces_first);

  // Appends the tokens of `piece`. Time O(n log n) in its length. A byte for which the vocabulary
  // has no token is left out, as the reference does; in vocabularies that hold all 256 bytes
  // nothing is.
  void Encode(absl::string_view piece, std::vector<TokenId>* out) const;

  // The token with these bytes.
  std::optional<TokenId> Find(absl::string_view bytes) const;

 private:
  static constexpr uint32_t kNoRank = UINT32_MAX;
  // Whether a token's own bytes give exactly that token, so that a look-up replaces the merging. Of
  // published vocabularies nearly every token does, but nothing in the format says so. Worked out
  // at a token's first use: for all at once it would be half of the load time.
  enum Whole : uint8_t { kUnknown, kWhole, kNotWhole };

  uint32_t Rank(TokenId left, TokenId right) const;
  bool IsWhole(TokenId id, absl::string_view bytes) const;
  void Merge(absl::string_view piece, std::vector<TokenId>* out) const;
  void MergeShort(std::vector<TokenId>* symbols) const;
  void MergeLong(std::vector<TokenId>* symbols) const;

  TokenMap tokens_;
  std::array<TokenId, 256> byte_tokens_;
  absl::flat_hash_map<uint64_t, uint32_t> ranks_;  // left << 32 | right -> rank
  std::vector<TokenId> results_;                   // by rank
  std::unique_ptr<std::atomic<uint8_t>[]>
      whole_;  // a memo by id; threads that race write the same value
};

}  // namespace baton::text
