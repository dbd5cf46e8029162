#pragma once

// Names of full blocks by content: a SHA-256 chain over everything that decides the bytes of a
// block.

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/kv/kv_layout.h"

namespace baton::kv {

struct BlockHash {
  std::array<uint8_t, 32> bytes{};

  friend bool operator==(const BlockHash& a, const BlockHash& b) { return a.bytes == b.bytes; }
  friend bool operator!=(const BlockHash& a, const BlockHash& b) { return a.bytes != b.bytes; }
  template <typename H>
  friend H AbslHashValue(H state, const BlockHash& hash) {
    uint64_t low;  // already uniform
    std::memcpy(&low, hash.bytes.data(), sizeof(low));
    return H::combine(std::move(state), low);
  }
};

// hash(block i) = SHA-256(hash(block i-1), 64 token ids), and the root in place of block -1 stands
// for the model, the KV format and the salt. So equal hashes mean equal tokens from position 0 on,
// in the same model, format and salt. Immutable, thread-safe.
class BlockHasher {
 public:
  // `model_fingerprint` is LayoutFingerprint.model or what else names model and precision. `salt`
  // separates tenants: blocks are shared within a salt only. `hash_bits` below 256 is for tests of
  // collisions.
  BlockHasher(absl::string_view model_fingerprint,
              KvFormat format,
              absl::string_view salt,
              int hash_bits = 256);

  const BlockHash& root() const { return root_; }
  // `tokens` is one full block.
  BlockHash Next(const BlockHash& parent, absl::Span<const uint32_t> tokens) const;
  // Hashes of all full blocks of `tokens`, from block 0.
  std::vector<BlockHash> HashBlocks(absl::Span<const uint32_t> tokens) const;
  // Appends the hashes of the full blocks of `tokens` that `hashes` does not cover yet: for
  // generated tokens.
  void Extend(absl::Span<const uint32_t> tokens, std::vector<BlockHash>* hashes) const;

 private:
  BlockHash Truncated(BlockHash hash) const;

  int hash_bits_;
  BlockHash root_;
};

}  // namespace baton::kv
