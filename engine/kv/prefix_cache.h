#pragma once

// Finds blocks that hold the keys and values of a prompt's beginning.

#include <array>
#include <cstdint>
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "engine/kv/block_hash.h"
#include "engine/kv/block_pool.h"
#include "engine/kv/kv_layout.h"

namespace baton::kv {

// Full blocks that the side which computes may take from the cache: never the one with the last
// prompt token, whose logits are needed.
constexpr int MaxMatchBlocks(int prompt_tokens) {
  return prompt_tokens <= 0 ? 0 : (prompt_tokens - 1) / kBlockTokens;
}

// A forest of full blocks, one entry a block, each the child of the block before it. An entry is
// found by hash, then its tokens and its parent are compared, so that a collision can only cost a
// hit, never serve a stranger's keys. An entry's parent is always in the cache too; the entry
// leaves when its block is evicted. Engine thread only.
class PrefixCache : public BlockPool::Holder {
 public:
  // Becomes the holder of `pool`, which outlives it.
  explicit PrefixCache(BlockPool* pool);
  // Told of every block that becomes findable, or no longer is. Must not call back.
  using Listener = std::function<void(const BlockHash& hash, bool stored)>;
  void set_listener(Listener listener) { listener_ = std::move(listener); }
  ~PrefixCache() override;

  // The longest run of cached blocks from block 0 that equals the beginning of `tokens`, at most
  // `max_blocks` (see MaxMatchBlocks). Every block returned has one user more: the caller releases
  // them, or allocates the rest. `hashes` covers the full blocks of `tokens`.
  std::vector<BlockId> Match(absl::Span<const uint32_t> tokens,
                             absl::Span<const BlockHash> hashes,
                             int max_blocks);
  // How many blocks Match would return. Takes nothing, counts nothing.
  int MatchLength(absl::Span<const uint32_t> tokens,
                  absl::Span<const BlockHash> hashes,
                  int max_blocks) const;

  // Makes the full blocks of a sequence findable. `blocks` are the sequence's own, active, from
  // block 0; those of the first min(hashes, blocks) are complete in every layer. Where an equal
  // block is cached already, the first one stays and the sequence's own remains private to it. May
  // be called again with a longer sequence.
  void Insert(absl::Span<const uint32_t> tokens,
              absl::Span<const BlockHash> hashes,
              absl::Span<const BlockId> blocks);

  // Forgets everything; unused blocks become free.
  void Clear();

  int num_entries() const { return num_entries_; }
  // Over all Match calls: tokens asked for and tokens found.
  uint64_t query_tokens() const { return query_tokens_; }
  uint64_t hit_tokens() const { return hit_tokens_; }
  // Blocks that have left the cache to make room.
  uint64_t evictions() const { return evictions_; }

  // BlockPool::Holder.
  void OnUsed(BlockId block) override;
  void OnUnused(BlockId block) override;
  // Least recently used first, children before parents. When every unused block has descendants and
  // all of those are in use, the oldest goes and its descendants leave the cache (they stay with
  // their users).
  void Evict() override;
  bool Holds(BlockId block) const override;

  // Ends the process when entries, links and the eviction order do not fit together. For tests and
  // debug builds.
  void CheckInvariants() const;

 private:
  static constexpr BlockId kNone = -1;

  struct Entry {
    bool present = false;
    BlockHash hash;
    std::array<uint32_t, kBlockTokens> tokens;
    BlockId parent = kNone;
    // Children form a doubly linked list.
    BlockId first_child = kNone;
    BlockId next_sibling = kNone;
    BlockId prev_sibling = kNone;
    uint64_t unused_since = 0;  // 0: in use
  };
  using EvictionOrder = std::set<std::pair<uint64_t, BlockId>>;  // by unused_since

  // The entry of block `index` of a sequence whose previous block is `parent`; kNone if there is
  // none.
  BlockId Find(absl::Span<const uint32_t> tokens,
               const BlockHash& hash,
               int index,
               BlockId parent) const;
  void Add(absl::Span<const uint32_t> block_tokens,
           const BlockHash& hash,
           BlockId parent,
           BlockId block);
  // `block` has no children.
  void Remove(BlockId block);
  void RemoveWithDescendants(BlockId block);
  EvictionOrder& OrderOf(const Entry& entry) {
    return entry.first_child == kNone ? unused_leaves_ : unused_inner_;
  }

  BlockPool* pool_;
  Listener listener_;
  std::vector<Entry> entries_;  // by block id
  absl::flat_hash_map<BlockHash, BlockId> by_hash_;
  EvictionOrder unused_leaves_;
  EvictionOrder unused_inner_;
  int num_entries_ = 0;
  uint64_t ticks_ = 0;
  uint64_t query_tokens_ = 0;
  uint64_t hit_tokens_ = 0;
  uint64_t evictions_ = 0;
};

}  // namespace baton::kv
