#include "engine/kv/prefix_cache.h"

#include <algorithm>

#include "engine/base/log.h"

namespace baton::kv {

PrefixCache::PrefixCache(BlockPool* pool) : pool_(pool) {
  entries_.resize(static_cast<size_t>(pool->num_blocks()));
  by_hash_.reserve(entries_.size());
  pool_->set_holder(this);
}

PrefixCache::~PrefixCache() {
  Clear();
  pool_->set_holder(nullptr);
}

std::vector<BlockId> PrefixCache::Match(absl::Span<const uint32_t> tokens,
                                        absl::Span<const BlockHash> hashes,
                                        int max_blocks) {
  std::vector<BlockId> blocks;
  BlockId parent = kNone;
  const int limit = std::min(max_blocks, static_cast<int>(hashes.size()));
  for (int i = 0; i < limit; ++i) {
    const BlockId block = Find(tokens, hashes[i], i, parent);
    if (block == kNone) break;
    pool_->AddUser(block);
    blocks.push_back(block);
    parent = block;
  }
  query_tokens_ += tokens.size();
  hit_tokens_ += blocks.size() * kBlockTokens;
  return blocks;
}

int PrefixCache::MatchLength(absl::Span<const uint32_t> tokens,
                             absl::Span<const BlockHash> hashes,
                             int max_blocks) const {
  BlockId parent = kNone;
  const int limit = std::min(max_blocks, static_cast<int>(hashes.size()));
  for (int i = 0; i < limit; ++i) {
    parent = Find(tokens, hashes[i], i, parent);
    if (parent == kNone) return i;
  }
  return std::max(limit, 0);
}

void PrefixCache::Insert(absl::Span<const uint32_t> tokens,
                         absl::Span<const BlockHash> hashes,
                         absl::Span<const BlockId> blocks) {
  const int count = static_cast<int>(std::min(hashes.size(), blocks.size()));
  BATON_CHECK(tokens.size() >= static_cast<size_t>(count) * kBlockTokens);
  BlockId parent = kNone;
  for (int i = 0; i < count; ++i) {
    BlockId block = Find(tokens, hashes[i], i, parent);
    if (block == kNone) {
      if (by_hash_.contains(hashes[i]))
        return;  // a collision: the first one stays, this sequence ends here
      block = blocks[i];
      Add(tokens.subspan(static_cast<size_t>(i) * kBlockTokens, kBlockTokens), hashes[i], parent,
          block);
    }
    parent = block;
  }
}

BlockId PrefixCache::Find(absl::Span<const uint32_t> tokens,
                          const BlockHash& hash,
                          int index,
                          BlockId parent) const {
  const auto found = by_hash_.find(hash);
  if (found == by_hash_.end()) return kNone;
  const Entry& entry = entries_[found->second];
  const size_t begin = static_cast<size_t>(index) * kBlockTokens;
  if (entry.parent != parent || tokens.size() < begin + kBlockTokens) return kNone;
  const bool equal = std::equal(entry.tokens.begin(), entry.tokens.end(), tokens.begin() + begin);
  return equal ? found->second : kNone;
}

void PrefixCache::Add(absl::Span<const uint32_t> block_tokens,
                      const BlockHash& hash,
                      BlockId parent,
                      BlockId block) {
  pool_->Hold(block);
  Entry& entry = entries_[block];
  entry.present = true;
  entry.hash = hash;
  std::copy(block_tokens.begin(), block_tokens.end(), entry.tokens.begin());
  entry.parent = parent;
  entry.first_child = entry.next_sibling = entry.prev_sibling = kNone;
  entry.unused_since = 0;
  by_hash_[hash] = block;
  ++num_entries_;
  if (listener_) listener_(hash, /*stored=*/true);
  if (parent == kNone) return;

  Entry& above = entries_[parent];
  if (above.unused_since != 0 && above.first_child == kNone) {
    unused_leaves_.erase({above.unused_since, parent});
    unused_inner_.insert({above.unused_since, parent});
  }
  entry.next_sibling = above.first_child;
  if (above.first_child != kNone) entries_[above.first_child].prev_sibling = block;
  above.first_child = block;
}

void PrefixCache::Remove(BlockId block) {
  Entry& entry = entries_[block];
  BATON_CHECK(entry.present && entry.first_child == kNone, "block=", block);
  if (entry.unused_since != 0) unused_leaves_.erase({entry.unused_since, block});
  by_hash_.erase(entry.hash);
  if (entry.next_sibling != kNone) entries_[entry.next_sibling].prev_sibling = entry.prev_sibling;
  if (entry.prev_sibling != kNone) {
    entries_[entry.prev_sibling].next_sibling = entry.next_sibling;
  } else if (entry.parent != kNone) {
    Entry& above = entries_[entry.parent];
    above.first_child = entry.next_sibling;
    if (above.first_child == kNone && above.unused_since != 0) {
      unused_inner_.erase({above.unused_since, entry.parent});
      unused_leaves_.insert({above.unused_since, entry.parent});
    }
  }
  entry.present = false;
  --num_entries_;
  if (listener_) listener_(entry.hash, /*stored=*/false);
  pool_->Unhold(block);
}

void PrefixCache::RemoveWithDescendants(BlockId block) {
  BlockId at = block;
  while (
      true) {  // down to a leaf, remove it, back up; no recursion: chains are as long as contexts
    while (entries_[at].first_child != kNone) at = entries_[at].first_child;
    const BlockId above = entries_[at].parent;
    Remove(at);
    if (at == block) return;
    at = above;
  }
}

void PrefixCache::Clear() {
  for (BlockId block = 0; block < static_cast<BlockId>(entries_.size()); ++block) {
    if (entries_[block].present) RemoveWithDescendants(block);
  }
}

void PrefixCache::OnUsed(BlockId block) {
  Entry& entry = entries_[block];
  OrderOf(entry).erase({entry.unused_since, block});
  entry.unused_since = 0;
}

void PrefixCache::OnUnused(BlockId block) {
  Entry& entry = entries_[block];
  entry.unused_since = ++ticks_;
  OrderOf(entry).insert({entry.unused_since, block});
}

void PrefixCache::Evict() {
  const int before = num_entries_;
  if (!unused_leaves_.empty()) {
    Remove(unused_leaves_.begin()->second);
  } else if (!unused_inner_.empty()) {
    RemoveWithDescendants(unused_inner_.begin()->second);
  }
  evictions_ += static_cast<uint64_t>(before - num_entries_);
}

bool PrefixCache::Holds(BlockId block) const { return entries_[block].present; }

void PrefixCache::CheckInvariants() const {
  int present = 0;
  size_t unused = 0;
  for (BlockId block = 0; block < static_cast<BlockId>(entries_.size()); ++block) {
    const Entry& entry = entries_[block];
    if (!entry.present) continue;
    ++present;
    const auto found = by_hash_.find(entry.hash);
    BATON_CHECK(found != by_hash_.end() && found->second == block, "block=", block);
    BATON_CHECK(entry.parent == kNone || entries_[entry.parent].present, "block=", block);
    for (BlockId child = entry.first_child; child != kNone; child = entries_[child].next_sibling) {
      BATON_CHECK(entries_[child].present && entries_[child].parent == block, "child=", child);
    }
    BATON_CHECK((entry.unused_since != 0) == (pool_->state(block) == BlockState::kCached),
                "block=", block);
    if (entry.unused_since == 0) continue;
    ++unused;
    const EvictionOrder& order = entry.first_child == kNone ? unused_leaves_ : unused_inner_;
    BATON_CHECK(order.count({entry.unused_since, block}) == 1, "block=", block);
  }
  BATON_CHECK(present == num_entries_ && by_hash_.size() == static_cast<size_t>(present));
  BATON_CHECK(unused == unused_leaves_.size() + unused_inner_.size());
}

}  // namespace baton::kv
