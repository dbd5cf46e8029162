#include "engine/ops/cuda/device_group.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "engine/ops/cuda/cuda_device.h"

namespace baton::ops::cuda {

absl::StatusOr<std::unique_ptr<DeviceGroup>> DeviceGroup::Join(parallel::TpGroup* group,
                                                               int device,
                                                               cudaStream_t stream) {
  if (group->size() != 2)
    return absl::InvalidArgumentError(absl::StrCat("cuda: tp=", group->size(), ": want 2"));
  std::unique_ptr<DeviceGroup> joined(new DeviceGroup(group));
  BATON_RETURN_IF_ERROR(joined->OpenPeer(device));
  constexpr size_t kBytes = kReduceSignals * sizeof(uint32_t);
  BATON_ASSIGN_OR_RETURN(joined->signals_, DeviceBuffer::Allocate(kBytes));
  BATON_ASSIGN_OR_RETURN(joined->called_off_, DeviceBuffer::AllocatePinned(sizeof(uint32_t)));
  *joined->called_off_.as<uint32_t>() = 0;
  BATON_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(joined->signals_.data(), 0, kBytes, stream), "signals"));
  BATON_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream), "signals"));
  // (No rank signals before the other's are zero: this is where they meet.)
  BATON_RETURN_IF_ERROR(joined->Exchange(joined->signals_.as<uint32_t>(), joined->all_signals_));
  BATON_RETURN_IF_ERROR(
      joined->Exchange(joined->called_off_.as<uint32_t>(), joined->all_called_off_));
  return joined;
}

template <typename T>
absl::Status DeviceGroup::Exchange(T own, T (&all)[2]) {
  constexpr size_t kWords = (sizeof(T) + sizeof(uint32_t) - 1) / sizeof(uint32_t);
  uint32_t mine[kWords] = {}, everybodys[2 * kWords];
  std::memcpy(mine, &own, sizeof(T));
  BATON_RETURN_IF_ERROR(group_.AllGather(mine, everybodys, kWords));
  for (int rank = 0; rank < 2; ++rank)
    std::memcpy(&all[rank], everybodys + rank * kWords, sizeof(T));
  return absl::OkStatus();
}

absl::Status DeviceGroup::OpenPeer(int device) {
  int devices[2];
  BATON_RETURN_IF_ERROR(Exchange(device, devices));
  const int peer = devices[1 - rank_];
  BATON_RETURN_IF_ERROR(CheckPeerAccess(device, peer));
  const cudaError_t enabled = cudaDeviceEnablePeerAccess(peer, 0);
  if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // as it should be
    return absl::OkStatus();
  }
  return CudaStatus(enabled, absl::StrCat("access to device ", peer));
}

absl::Status DeviceGroup::Reserve(int tokens, int width) {
  constexpr size_t kAlignment = 64;  // floats
  const size_t size =
      (static_cast<size_t>(tokens) * width + kAlignment - 1) / kAlignment * kAlignment;
  if (size > part_size_) {
    BATON_ASSIGN_OR_RETURN(parts_memory_, DeviceBuffer::Allocate(2 * size * sizeof(float)));
    part_size_ = size;
  }
  return Exchange(parts_memory_.as<float>(), parts_);
}

absl::Status DeviceGroup::BeginPass(cudaStream_t stream) {
  RestartPass();
  // (Both ranks find the same: between passes nobody calls off, and each clears its own word.)
  uint32_t* called_off = all_called_off_[rank_];
  if (__atomic_load_n(called_off, __ATOMIC_ACQUIRE) == 0) return absl::OkStatus();
  BATON_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream), "signals"));
  // The peer's kernels write here too. A word that one of them left behind would count as one of a
  // later round, so nothing is cleared before the last of them has ended.
  BATON_RETURN_IF_ERROR(Barrier());
  BATON_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(signals_.data(), 0, signals_.size(), stream), "signals"));
  BATON_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream), "signals"));
  __atomic_store_n(called_off, 0, __ATOMIC_RELEASE);
  return Barrier();  // and nobody writes here before it is cleared
}

void DeviceGroup::CallOff() {
  for (uint32_t* word : all_called_off_) __atomic_store_n(word, 1, __ATOMIC_RELEASE);
}

absl::Status DeviceGroup::Reduce(AllReduceNormParams params, cudaStream_t stream) {
  for (int rank = 0; rank < 2; ++rank) params.parts[rank] = PartOf(rank);
  params.signals = all_signals_[rank_];
  params.peer_signals = all_signals_[1 - rank_];
  params.called_off = all_called_off_[rank_];
  ++num_reductions_;
  return CudaStatus(AllReduceNorm(params, stream), "all-reduce");
}

}  // namespace baton::ops::cuda
