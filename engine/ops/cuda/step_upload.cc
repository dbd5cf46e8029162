#include "engine/ops/cuda/step_upload.h"

#include <algorithm>
#include <utility>

#include "engine/base/bf16.h"
#include "engine/base/status_macros.h"

namespace baton::ops::cuda {

absl::Status UploadedArray::UploadBytes(const void* data, size_t size, cudaStream_t stream) {
  if (size == 0) return absl::OkStatus();
  if (size == size_ && std::memcmp(pinned_.data(), data, size) == 0) return absl::OkStatus();
  // The stream may still be reading what was there.
  BATON_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream), "upload"));
  if (size > device_.size()) BATON_RETURN_IF_ERROR(Grow(size, stream));
  std::memcpy(pinned_.data(), data, size);
  size_ = size;
  return CudaStatus(
      cudaMemcpyAsync(device_.data(), pinned_.data(), size, cudaMemcpyHostToDevice, stream),
      "upload");
}

absl::Status UploadedArray::Grow(size_t size, cudaStream_t stream) {
  constexpr size_t kLeast = 4096;
  const size_t room = std::max(kLeast, size + size / 2);
  size_ = 0;
  BATON_ASSIGN_OR_RETURN(device_, DeviceBuffer::Allocate(room));
  BATON_ASSIGN_OR_RETURN(pinned_, DeviceBuffer::AllocatePinned(room));
  return absl::OkStatus();
}

absl::StatusOr<const void*> DeviceConstants::Find(absl::Span<const float> values,
                                                  bool bf16,
                                                  cudaStream_t stream) {
  for (const Entry& entry : entries_) {
    if (entry.host == values.data() && entry.count == values.size() && entry.bf16 == bf16)
      return entry.device.data();
  }
  std::vector<uint16_t> rounded;
  const void* data = values.data();
  size_t size = values.size() * sizeof(float);
  if (bf16) {
    for (const float value : values) rounded.push_back(base::Bf16FromFloat(value));
    data = rounded.data();
    size = rounded.size() * sizeof(uint16_t);
  }
  Entry entry = {values.data(), values.size(), bf16, DeviceBuffer()};
  BATON_ASSIGN_OR_RETURN(entry.device, DeviceBuffer::Allocate(size));
  BATON_RETURN_IF_ERROR(
      CudaStatus(cudaMemcpyAsync(entry.device.data(), data, size, cudaMemcpyHostToDevice, stream),
                 "constants"));
  BATON_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream), "constants"));
  entries_.push_back(std::move(entry));
  return entries_.back().device.data();
}

absl::StatusOr<const float*> DeviceConstants::Get(absl::Span<const float> values,
                                                  cudaStream_t stream) {
  if (values.empty()) return nullptr;
  BATON_ASSIGN_OR_RETURN(const void* data, Find(values, false, stream));
  return static_cast<const float*>(data);
}

absl::StatusOr<const void*> DeviceConstants::GetBf16(absl::Span<const float> values,
                                                     cudaStream_t stream) {
  if (values.empty()) return nullptr;
  return Find(values, true, stream);
}

}  // namespace baton::ops::cuda
