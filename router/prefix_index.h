#pragma once

// Which worker's prefix cache holds which blocks, as the workers' events tell.

#include <cstdint>
#include <deque>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "engine/kv/block_hash.h"

namespace baton::router {

// A block's name in the index: the first 8 bytes of its chained hash. A collision costs a wrong
// guess, nothing else: workers compare whole hashes and tokens.
using BlockKey = uint64_t;
BlockKey KeyOf(const kv::BlockHash& hash);

// Workers are named by a small number. Thread-compatible.
class PrefixIndex {
 public:
  // The worker has these blocks now; no longer has them; has none.
  void Add(uint32_t worker, absl::Span<const BlockKey> keys);
  void Remove(uint32_t worker, absl::Span<const BlockKey> keys);
  void Clear(uint32_t worker);
  // The worker was sent a prompt of these blocks and will have them soon: believed until `until`,
  // so that a burst with one prefix stays together before the first event comes.
  void Assume(uint32_t worker, absl::Span<const BlockKey> keys, absl::Duration until);
  // Forgets assumptions that have not come true.
  void Expire(absl::Duration now);

  // For each worker below `num_workers`, how many blocks from the first one on it has.
  std::vector<uint32_t> Match(absl::Span<const BlockKey> keys,
                              uint32_t num_workers,
                              absl::Duration now) const;

  size_t num_keys() const { return holders_.size(); }
  size_t num_keys_of(uint32_t worker) const;

 private:
  struct Holder {
    uint32_t worker;
    absl::Duration until;  // infinite: the worker has said so
  };
  using Holders = absl::InlinedVector<Holder, 2>;
  struct Assumption {
    absl::Duration until;
    uint32_t worker;
    BlockKey key;
  };

  void Put(uint32_t worker, BlockKey key, absl::Duration until);
  void Drop(uint32_t worker, BlockKey key);

  absl::flat_hash_map<BlockKey, Holders> holders_;
  absl::flat_hash_map<uint32_t, absl::flat_hash_set<BlockKey>> keys_of_;
  std::deque<Assumption> assumptions_;  // by time made, so nearly by `until`
};

}  // namespace baton::router
