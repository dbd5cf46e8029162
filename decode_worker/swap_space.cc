#include "decode_worker/swap_space.h"

#include <algorithm>
#include <utility>

#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::decode {
namespace {

size_t SlotBytes(const kv::KvLayout& layout) {
  return layout.block_bytes() * static_cast<size_t>(layout.num_layers);
}

}  // namespace

absl::StatusOr<SwapSpace> SwapSpace::Create(runtime::ModelRunner& runner, int64_t bytes) {
  const size_t slot_bytes = SlotBytes(runner.layout());
  const auto num_slots = static_cast<int>(
      std::min<size_t>(static_cast<size_t>(std::max<int64_t>(bytes, 0)) / slot_bytes, INT32_MAX));
  base::Buffer memory;
  if (num_slots > 0) {
    BATON_ASSIGN_OR_RETURN(memory, base::Buffer::Allocate(slot_bytes * num_slots));
  }
  return SwapSpace(runner, std::move(memory), num_slots);
}

SwapSpace::SwapSpace(runtime::ModelRunner& runner, base::Buffer memory, int num_slots)
    : runner_(runner), memory_(std::move(memory)), num_slots_(num_slots) {
  for (int slot = num_slots - 1; slot >= 0; --slot) free_.push_back(slot);
}

uint8_t* SwapSpace::SlotAddress(int slot) {
  return memory_.data() + static_cast<size_t>(slot) * SlotBytes(runner_.layout());
}

std::vector<int> SwapSpace::Out(absl::Span<const kv::BlockId> blocks) {
  if (blocks.size() > free_.size()) return {};
  std::vector<int> slots(free_.end() - static_cast<std::ptrdiff_t>(blocks.size()), free_.end());
  free_.resize(free_.size() - blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) runner_.ReadBlock(blocks[i], SlotAddress(slots[i]));
  return slots;
}

void SwapSpace::In(absl::Span<const int> slots, absl::Span<const kv::BlockId> blocks) {
  BATON_CHECK(slots.size() == blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) runner_.WriteBlock(blocks[i], SlotAddress(slots[i]));
}

void SwapSpace::Release(absl::Span<const int> slots) {
  free_.insert(free_.end(), slots.begin(), slots.end());
  BATON_CHECK(num_free() <= num_slots_);
}

}  // namespace baton::decode
