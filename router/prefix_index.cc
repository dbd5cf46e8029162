#include "router/prefix_index.h"

#include <algorithm>
#include <cstring>

namespace baton::router {

namespace {

// An assumption that is younger than this is not renewed: their number is bounded by that of
// blocks.
constexpr absl::Duration kAssumeAgain = absl::Seconds(1);

}  // namespace

BlockKey KeyOf(const kv::BlockHash& hash) {
  BlockKey key;
  std::memcpy(&key, hash.bytes.data(), sizeof(key));
  return key;
}

void PrefixIndex::Put(uint32_t worker, BlockKey key, absl::Duration until) {
  Holders& holders = holders_[key];
  for (Holder& holder : holders) {
    if (holder.worker != worker) continue;
    holder.until = std::max(holder.until, until);
    return;
  }
  holders.push_back({worker, until});
  keys_of_[worker].insert(key);
}

void PrefixIndex::Drop(uint32_t worker, BlockKey key) {
  const auto found = holders_.find(key);
  if (found == holders_.end()) return;
  Holders& holders = found->second;
  holders.erase(std::remove_if(holders.begin(), holders.end(),
                               [worker](const Holder& h) { return h.worker == worker; }),
                holders.end());
  if (holders.empty()) holders_.erase(found);
}

void PrefixIndex::Add(uint32_t worker, absl::Span<const BlockKey> keys) {
  for (const BlockKey key : keys) Put(worker, key, absl::InfiniteDuration());
}

void PrefixIndex::Remove(uint32_t worker, absl::Span<const BlockKey> keys) {
  const auto own = keys_of_.find(worker);
  if (own == keys_of_.end()) return;
  for (const BlockKey key : keys) {
    if (own->second.erase(key) > 0) Drop(worker, key);
  }
}

void PrefixIndex::Clear(uint32_t worker) {
  const auto own = keys_of_.find(worker);
  if (own == keys_of_.end()) return;
  for (const BlockKey key : own->second) Drop(worker, key);
  keys_of_.erase(own);
}

void PrefixIndex::Assume(uint32_t worker, absl::Span<const BlockKey> keys, absl::Duration until) {
  for (const BlockKey key : keys) {
    const auto found = holders_.find(key);
    const bool believed =
        found != holders_.end() &&
        std::any_of(found->second.begin(), found->second.end(), [&](const Holder& holder) {
          return holder.worker == worker && holder.until + kAssumeAgain >= until;
        });
    if (believed) continue;
    Put(worker, key, until);
    assumptions_.push_back({until, worker, key});
  }
}

void PrefixIndex::Expire(absl::Duration now) {
  while (!assumptions_.empty() && assumptions_.front().until <= now) {
    const Assumption old = assumptions_.front();
    assumptions_.pop_front();
    const auto found = holders_.find(old.key);
    if (found == holders_.end()) continue;
    const bool expired =
        std::any_of(found->second.begin(), found->second.end(),
                    [&](const Holder& h) { return h.worker == old.worker && h.until <= now; });
    if (expired) Remove(old.worker, {&old.key, 1});
  }
}

std::vector<uint32_t> PrefixIndex::Match(absl::Span<const BlockKey> keys,
                                         uint32_t num_workers,
                                         absl::Duration now) const {
  std::vector<uint32_t> depth(num_workers, 0);
  for (uint32_t i = 0; i < keys.size(); ++i) {
    const auto found = holders_.find(keys[i]);
    if (found == holders_.end()) break;
    bool any = false;
    for (const Holder& holder : found->second) {
      if (holder.worker >= num_workers || depth[holder.worker] != i || holder.until <= now)
        continue;
      depth[holder.worker] = i + 1;
      any = true;
    }
    if (!any) break;
  }
  return depth;
}

size_t PrefixIndex::num_keys_of(uint32_t worker) const {
  const auto own = keys_of_.find(worker);
  return own == keys_of_.end() ? 0 : own->second.size();
}

}  // namespace baton::router
