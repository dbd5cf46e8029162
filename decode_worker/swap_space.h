#pragma once

// Host memory for the blocks of sequences that had to give way.

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/base/buffer.h"
#include "engine/runtime/model_runner.h"

namespace baton::decode {

// Slots of one block, all layers, each. Taken at start. Engine thread only.
class SwapSpace {
 public:
  // As many slots as `bytes` hold; none is fine. Errors: RESOURCE_EXHAUSTED.
  static absl::StatusOr<SwapSpace> Create(runtime::ModelRunner& runner, int64_t bytes);

  // Copies blocks out of the pool; their slots, in the same order. All or nothing: empty when there
  // are too few.
  std::vector<int> Out(absl::Span<const kv::BlockId> blocks);
  // Copies slots into blocks of the pool. The slots stay taken.
  void In(absl::Span<const int> slots, absl::Span<const kv::BlockId> blocks);
  void Release(absl::Span<const int> slots);

  int num_slots() const { return num_slots_; }
  int num_free() const { return static_cast<int>(free_.size()); }

 private:
  SwapSpace(runtime::ModelRunner& runner, base::Buffer memory, int num_slots);
  uint8_t* SlotAddress(int slot);

  runtime::ModelRunner& runner_;
  base::Buffer memory_;
  int num_slots_;
  std::vector<int> free_;
};

}  // namespace baton::decode
