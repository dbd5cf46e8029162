#pragma once

// How often keys and values meet the largest number of e4m3 where scales are fixed.

#include <array>
#include <cstdint>

#include "absl/types/span.h"
#include "engine/kv/kv_layout.h"
#include "engine/runtime/model_runner.h"

namespace baton::runtime {

// Looks at a few of the rows that a step has appended: of each sequence the last one, in one layer,
// the next one at the next step. Engine thread only.
class SaturationSample {
 public:
  // After a step; `pool` is on the host, of format kFp8.
  void Look(const kv::KvLayout& layout,
            const uint8_t* pool,
            absl::Span<const StepSequence> sequences);
  // K and V values seen so far that are stored as the largest number.
  const std::array<uint64_t, 2>& counts() const { return counts_; }

 private:
  int layer_ = 0;
  std::array<uint64_t, 2> counts_ = {0, 0};
};

}  // namespace baton::runtime
