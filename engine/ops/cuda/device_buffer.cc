#include "engine/ops/cuda/device_buffer.h"

#include "absl/strings/str_cat.h"

namespace baton::ops::cuda {

absl::Status CudaStatus(cudaError_t error, absl::string_view what) {
  switch (error) {
    case cudaSuccess:
      return absl::OkStatus();
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(
          absl::StrCat("cuda: ", what, ": ", cudaGetErrorString(error)));
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorInitializationError:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorSystemNotReady:
      return absl::UnavailableError(absl::StrCat("cuda: ", what, ": ", cudaGetErrorString(error)));
    default:
      return absl::InternalError(absl::StrCat("cuda: ", what, ": ", cudaGetErrorString(error)));
  }
}

absl::StatusOr<DeviceBuffer> DeviceBuffer::Allocate(size_t size) {
  if (size == 0) return DeviceBuffer();
  void* data = nullptr;
  const absl::Status status =
      CudaStatus(cudaMalloc(&data, size), absl::StrCat("device memory bytes=", size));
  if (!status.ok()) {
    cudaGetLastError();  // the failure has been told; later calls must not find it
    return status;
  }
  return DeviceBuffer(data, size, false);
}

absl::StatusOr<DeviceBuffer> DeviceBuffer::AllocatePinned(size_t size) {
  if (size == 0) return DeviceBuffer();
  void* data = nullptr;
  const absl::Status status =
      CudaStatus(cudaMallocHost(&data, size), absl::StrCat("pinned memory bytes=", size));
  if (!status.ok()) {
    cudaGetLastError();
    return status;
  }
  return DeviceBuffer(data, size, true);
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ == nullptr) return;
  if (pinned_) {
    cudaFreeHost(data_);
  } else {
    cudaFree(data_);
  }
}

}  // namespace baton::ops::cuda
