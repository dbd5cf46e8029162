#pragma once

// A rank of a tensor-parallel pair whose ranks compute on two devices: the memory they show each
// other, and the all-reduce over it.

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/ops/cuda/device_buffer.h"
#include "engine/ops/cuda/kernels.h"
#include "engine/parallel/tp_group.h"

namespace baton::ops::cuda {

// Each rank makes the same calls in the same order, on its own thread, with its device the current
// one. Owns this rank's share of the memory.
class DeviceGroup {
 public:
  // Errors: INVALID_ARGUMENT unless there are two ranks; FAILED_PRECONDITION when the devices do
  // not reach each other's memory; those of the group.
  static absl::StatusOr<std::unique_ptr<DeviceGroup>> Join(parallel::TpGroup* group,
                                                           int device,
                                                           cudaStream_t stream);

  // Room for parts of up to `tokens` rows of `width`.
  absl::Status Reserve(int tokens, int width);

  // Before the first operation of a pass: what a pass that was called off has left is cleared away.
  // A pass has an even number of reductions (two a layer): so the first one of the next does not
  // write where the other rank may still read the last one's part.
  absl::Status BeginPass(cudaStream_t stream);
  // The operations of a pass are issued from the first on: again, or to be captured.
  void RestartPass() { num_reductions_ = 0; }
  // This rank cannot go on: neither waits for the other any more. Until the next BeginPass, results
  // mean nothing.
  void CallOff();

  // Where this rank's part of the next sum goes, f32 [tokens][width].
  float* part() const { return PartOf(rank_); }
  // residual += the sum of the parts, and what AllReduceNorm adds to that. Takes residual, weight,
  // out and sizes from `params`, fills in the rest.
  absl::Status Reduce(AllReduceNormParams params, cudaStream_t stream);

  int rank() const { return rank_; }
  absl::Status Barrier() { return group_.Barrier(); }

 private:
  explicit DeviceGroup(parallel::TpGroup* group) : group_(*group), rank_(group->rank()) {}
  // all[r] = `own` of rank r.
  template <typename T>
  absl::Status Exchange(T own, T (&all)[2]);
  absl::Status OpenPeer(int device);
  float* PartOf(int rank) const { return parts_[rank] + num_reductions_ % 2 * part_size_; }

  parallel::TpGroup& group_;
  const int rank_;
  DeviceBuffer signals_, parts_memory_;
  DeviceBuffer called_off_;        // pinned: one word, this rank's kernels look at it
  uint32_t* all_signals_[2] = {};  // by rank
  uint32_t* all_called_off_[2] = {};
  float* parts_[2] = {};         // two places each
  size_t part_size_ = 0;         // floats of a place
  uint64_t num_reductions_ = 0;  // of this pass
};

}  // namespace baton::ops::cuda
