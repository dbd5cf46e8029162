#pragma once

// Owners of device and pinned memory, and CUDA's errors as Status.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace baton::ops::cuda {

// OK, or what CUDA said: out of memory is RESOURCE_EXHAUSTED, a missing device or driver
// UNAVAILABLE, everything else INTERNAL. `what` says what was tried.
absl::Status CudaStatus(cudaError_t error, absl::string_view what);

// While one lives, a device is this thread's current one.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

// Device memory, or host memory that the device reads and writes by itself. Thread-compatible.
class DeviceBuffer {
 public:
  // Errors: RESOURCE_EXHAUSTED. A size of 0 owns nothing.
  static absl::StatusOr<DeviceBuffer> Allocate(size_t size);
  static absl::StatusOr<DeviceBuffer> AllocatePinned(size_t size);

  DeviceBuffer() = default;
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        pinned_(other.pinned_) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(pinned_, other.pinned_);
    return *this;
  }
  ~DeviceBuffer();

  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t size() const { return size_; }

 private:
  DeviceBuffer(void* data, size_t size, bool pinned) : data_(data), size_(size), pinned_(pinned) {}

  void* data_ = nullptr;
  size_t size_ = 0;
  bool pinned_ = false;
};

}  // namespace baton::ops::cuda
