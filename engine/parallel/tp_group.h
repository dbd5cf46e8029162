#pragma once

// What the ranks of a tensor-parallel model tell each other while a step runs.

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"

namespace baton::parallel {

// One rank's end of a group. Every rank makes the same calls in the same order, each on its own
// thread; a call returns when the ranks it needs have come. Memory is where the backend computes:
// on the host here (LocalGroup), on a device for groups that work on one.
// Errors of all calls: what the group was aborted with; the contents of `out` are lost then.
class TpGroup {
 public:
  virtual ~TpGroup() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // out[i] = in[i] of rank 0 + in[i] of rank 1 + ..., in this order on every rank, so all get the
  // same bits. in, out [count]; they do not overlap.
  virtual absl::Status AllReduceSum(const float* in, float* out, size_t count) = 0;
  // out [size * count]: `in` [count] of rank 0, then of rank 1, ...
  virtual absl::Status AllGather(const uint32_t* in, uint32_t* out, size_t count) = 0;
  // What ranks have written before it, all ranks see after it.
  virtual absl::Status Barrier() = 0;
};

}  // namespace baton::parallel
