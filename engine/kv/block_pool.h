#pragma once

// Ids of KV blocks: which are free, who uses them. Owns ids, not memory.

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/kv/kv_layout.h"

namespace baton::kv {

enum class BlockState : uint8_t {
  kFree,
  kCached,       // no users, held by the prefix cache only: taken back when free blocks run out
  kActive,       // one user or more
  kReserved,     // promised to one request that is in prefill elsewhere, written by a peer
  kQuarantined,  // nobody's, but a peer may still write into it
};

struct BlockCounts {
  int free = 0;
  int cached = 0;
  int active = 0;
  int reserved = 0;
  int quarantined = 0;
  int total() const { return free + cached + active + reserved + quarantined; }
};

// Hands out block ids and counts their users. Engine thread only.
// Invariant: free + cached + active + reserved + quarantined == num_blocks. Misuse (a user too many
// taken away, a state that a call does not allow) is our own bug and ends the process: the
// alternative is a stranger's keys and values.
class BlockPool {
 public:
  // Who holds blocks that nobody uses: the prefix cache.
  class Holder {
   public:
    virtual ~Holder() = default;
    // A held block got its first user, or lost its last one.
    virtual void OnUsed(BlockId block) = 0;
    virtual void OnUnused(BlockId block) = 0;
    // Gives back at least one unused block by Unhold(). Called only when there is one.
    virtual void Evict() = 0;
    // For CheckInvariants.
    virtual bool Holds(BlockId block) const = 0;
  };

  explicit BlockPool(int num_blocks);
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // Takes `count` blocks, all or nothing, as kActive (one user each) or kReserved. Free blocks go
  // first, then cached ones in the holder's order. Errors: RESOURCE_EXHAUSTED when free and cached
  // blocks together are fewer; nothing is taken then.
  absl::StatusOr<std::vector<BlockId>> Allocate(int count, BlockState state = BlockState::kActive);

  // One more user of an active or cached block.
  void AddUser(BlockId block);
  // One user less of an active block, or a reserved block back unused. The last user leaves it
  // cached if the prefix cache holds it, else free. The span form goes from the last block to the
  // first, so that a sequence's end is evicted before its beginning.
  void Release(BlockId block);
  void Release(absl::Span<const BlockId> blocks);

  // Reserved -> active with one user: the blocks have landed.
  void Activate(absl::Span<const BlockId> blocks);
  // Reserved -> quarantined: revoked, a writer may be left.
  void Quarantine(absl::Span<const BlockId> blocks);
  // Quarantined -> free: the writer is quiet or dead.
  void EndQuarantine(absl::Span<const BlockId> blocks);

  // The prefix cache says that it holds an active block, or that it does not hold a block any more.
  void Hold(BlockId block);
  void Unhold(BlockId block);

  BlockState state(BlockId block) const { return blocks_[Index(block)].state; }
  int users(BlockId block) const { return blocks_[Index(block)].users; }
  const BlockCounts& counts() const { return counts_; }
  int num_blocks() const { return static_cast<int>(blocks_.size()); }
  // What Allocate can give.
  int num_available() const { return counts_.free + counts_.cached; }

  void set_holder(Holder* holder) { holder_ = holder; }
  // Called with every block that becomes free. Tests fill such blocks with NaN.
  void set_on_free(std::function<void(BlockId)> on_free) { on_free_ = std::move(on_free); }

  // Ends the process when users, states, the free list and the counts do not fit together. For
  // tests and debug builds.
  void CheckInvariants() const;

 private:
  struct Block {
    BlockState state = BlockState::kFree;
    bool held = false;
    int32_t users = 0;
  };

  size_t Index(BlockId block) const;
  int& Count(BlockState state);
  void SetState(BlockId block, BlockState state);
  void Move(absl::Span<const BlockId> blocks, BlockState from, BlockState to);
  void MakeFree(BlockId block);

  std::vector<Block> blocks_;
  std::vector<BlockId> free_ids_;  // the last freed is taken first: its memory is warm
  BlockCounts counts_;
  Holder* holder_ = nullptr;
  std::function<void(BlockId)> on_free_;
};

}  // namespace baton::kv
