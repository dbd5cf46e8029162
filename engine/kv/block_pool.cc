#include "engine/kv/block_pool.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/base/log.h"

namespace baton::kv {

BlockPool::BlockPool(int num_blocks) {
  BATON_CHECK(num_blocks >= 0);
  blocks_.resize(static_cast<size_t>(num_blocks));
  free_ids_.reserve(blocks_.size());
  for (BlockId block = num_blocks - 1; block >= 0; --block) free_ids_.push_back(block);
  counts_.free = num_blocks;
}

absl::StatusOr<std::vector<BlockId>> BlockPool::Allocate(int count, BlockState state) {
  BATON_CHECK(count >= 0 && (state == BlockState::kActive || state == BlockState::kReserved));
  if (count > num_available()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("kv blocks: need_blocks=", count, " free_blocks=", num_available()));
  }
  while (counts_.free < count) {
    const int free_before = counts_.free;
    holder_->Evict();
    BATON_CHECK(counts_.free > free_before, "prefix cache evicted nothing");
  }
  std::vector<BlockId> taken(free_ids_.rbegin(), free_ids_.rbegin() + count);
  free_ids_.resize(free_ids_.size() - taken.size());
  for (BlockId block : taken) {
    blocks_[block].users = state == BlockState::kActive ? 1 : 0;
    SetState(block, state);
  }
  return taken;
}

void BlockPool::AddUser(BlockId block) {
  Block& entry = blocks_[Index(block)];
  BATON_CHECK(entry.state == BlockState::kActive || entry.state == BlockState::kCached,
              "block=", block);
  ++entry.users;
  if (entry.state == BlockState::kActive) return;
  SetState(block, BlockState::kActive);
  holder_->OnUsed(block);
}

void BlockPool::Release(BlockId block) {
  Block& entry = blocks_[Index(block)];
  if (entry.state == BlockState::kReserved) {
    MakeFree(block);
    return;
  }
  BATON_CHECK(entry.state == BlockState::kActive && entry.users > 0, "block=", block);
  if (--entry.users > 0) return;
  if (!entry.held) {
    MakeFree(block);
    return;
  }
  SetState(block, BlockState::kCached);
  holder_->OnUnused(block);
}

void BlockPool::Release(absl::Span<const BlockId> blocks) {
  for (size_t i = blocks.size(); i-- > 0;) Release(blocks[i]);
}

void BlockPool::Activate(absl::Span<const BlockId> blocks) {
  Move(blocks, BlockState::kReserved, BlockState::kActive);
  for (BlockId block : blocks) blocks_[block].users = 1;
}

void BlockPool::Quarantine(absl::Span<const BlockId> blocks) {
  Move(blocks, BlockState::kReserved, BlockState::kQuarantined);
}

void BlockPool::EndQuarantine(absl::Span<const BlockId> blocks) {
  for (BlockId block : blocks) {
    BATON_CHECK(state(block) == BlockState::kQuarantined, "block=", block);
    MakeFree(block);
  }
}

void BlockPool::Hold(BlockId block) {
  Block& entry = blocks_[Index(block)];
  BATON_CHECK(entry.state == BlockState::kActive && !entry.held, "block=", block);
  entry.held = true;
}

void BlockPool::Unhold(BlockId block) {
  Block& entry = blocks_[Index(block)];
  BATON_CHECK(entry.held, "block=", block);
  entry.held = false;
  if (entry.state == BlockState::kCached) MakeFree(block);
}

size_t BlockPool::Index(BlockId block) const {
  BATON_CHECK(block >= 0 && static_cast<size_t>(block) < blocks_.size(), "block=", block);
  return static_cast<size_t>(block);
}

int& BlockPool::Count(BlockState state) {
  switch (state) {
    case BlockState::kFree:
      return counts_.free;
    case BlockState::kCached:
      return counts_.cached;
    case BlockState::kActive:
      return counts_.active;
    case BlockState::kReserved:
      return counts_.reserved;
    case BlockState::kQuarantined:
      break;
  }
  return counts_.quarantined;
}

void BlockPool::SetState(BlockId block, BlockState state) {
  --Count(blocks_[block].state);
  ++Count(state);
  blocks_[block].state = state;
}

void BlockPool::Move(absl::Span<const BlockId> blocks, BlockState from, BlockState to) {
  for (BlockId block : blocks) {
    BATON_CHECK(state(block) == from, "block=", block);
    SetState(block, to);
  }
}

void BlockPool::MakeFree(BlockId block) {
  SetState(block, BlockState::kFree);
  free_ids_.push_back(block);
  if (on_free_) on_free_(block);
}

void BlockPool::CheckInvariants() const {
  BlockCounts seen;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const Block& block = blocks_[i];
    const bool active = block.state == BlockState::kActive;
    BATON_CHECK(active ? block.users > 0 : block.users == 0, "block=", i, " users=", block.users);
    BATON_CHECK(block.state == BlockState::kCached ? block.held : (active || !block.held),
                "block=", i);
    BATON_CHECK(block.held == (holder_ != nullptr && holder_->Holds(static_cast<BlockId>(i))),
                "block=", i);
    switch (block.state) {
      case BlockState::kFree:
        ++seen.free;
        break;
      case BlockState::kCached:
        ++seen.cached;
        break;
      case BlockState::kActive:
        ++seen.active;
        break;
      case BlockState::kReserved:
        ++seen.reserved;
        break;
      case BlockState::kQuarantined:
        ++seen.quarantined;
        break;
    }
  }
  BATON_CHECK(seen.free == counts_.free && seen.cached == counts_.cached &&
              seen.active == counts_.active && seen.reserved == counts_.reserved &&
              seen.quarantined == counts_.quarantined);
  BATON_CHECK(counts_.total() == num_blocks());
  std::vector<bool> listed(blocks_.size(), false);
  for (BlockId block : free_ids_) {
    BATON_CHECK(state(block) == BlockState::kFree && !listed[block], "block=", block);
    listed[block] = true;
  }
  BATON_CHECK(static_cast<int>(free_ids_.size()) == counts_.free);
}

}  // namespace baton::kv
