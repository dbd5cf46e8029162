#pragma once

// Byte-pair encoding of one piece of text over the bytes of its tokens.

#include <array>
#include <cstdint>
#include <string>
#include <utility>
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

// The merge rules in the order of their rank, and the tokens by their bytes. Immutable, thread-safe.
class Bpe {
 public:
  // `token_bytes` by id: empty for ids that BPE must never produce. The views must outlive the object. Ids in `merges` must
  // be in range. `whole_pieces_first`: a piece that is a token becomes that token even where the merges give others
  // (tokenizer.json's ignore_merges).
  Bpe(const std::vector<absl::string_view>& token_bytes, const std::vector<BpeMerge>& merges, bool whole_pieces_first);

  // Appends the tokens of `piece`. Time O(n log n) in its length. A byte for which the vocabulary has no token is left
  // out, as the reference does; in vocabularies that hold all 256 bytes nothing is.
  void Encode(absl::string_view piece, std::vector<TokenId>* out) const;

  // Whether every byte has a token.
  bool covers_all_bytes() const { return covers_all_bytes_; }

 private:
  static constexpr uint32_t kNoRank = UINT32_MAX;

  uint32_t Rank(TokenId left, TokenId right) const;
  void Merge(absl::string_view piece, std::vector<TokenId>* out) const;
  void MergeShort(std::vector<TokenId>* symbols) const;
  void MergeLong(std::vector<TokenId>* symbols) const;

  std::array<TokenId, 256> byte_tokens_;
  bool covers_all_bytes_ = true;
  absl::flat_hash_map<uint64_t, uint32_t> ranks_;  // left << 32 | right -> rank
  std::vector<TokenId> results_;                   // by rank
  // Tokens whose own bytes BPE turns into exactly that token, so that a look-up replaces the merging.
  absl::flat_hash_map<absl::string_view, TokenId> whole_pieces_;
};

}  // namespace baton::text
