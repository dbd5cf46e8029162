#pragma once

// Brings what the host says of a step to the device: one array after another through pinned memory.
// An array that is the same as the last time is not sent again, so a step pays once for all its
// layers.

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/ops/cuda/device_buffer.h"

namespace baton::ops::cuda {

// One array. Engine thread only.
class UploadedArray {
 public:
  // The device's copy of `values`, in the order of `stream`. Errors: RESOURCE_EXHAUSTED when the
  // array has grown and there is no memory.
  template <typename T>
  absl::StatusOr<const T*> Upload(absl::Span<const T> values, cudaStream_t stream) {
    const absl::Status status = UploadBytes(values.data(), values.size() * sizeof(T), stream);
    if (!status.ok()) return status;
    return device_.as<const T>();
  }

 private:
  absl::Status UploadBytes(const void* data, size_t size, cudaStream_t stream);
  absl::Status Grow(size_t size, cudaStream_t stream);

  DeviceBuffer device_, pinned_;
  size_t size_ = 0;  // of what is there; 0: nothing yet
};

// Values that never change (weights of norms, biases, scales, RoPE tables), known by their address
// on the host. Engine thread only.
class DeviceConstants {
 public:
  // The device's copy; made at the first call. Waits for it then.
  absl::StatusOr<const float*> Get(absl::Span<const float> values, cudaStream_t stream);
  // The same, rounded to bf16.
  absl::StatusOr<const void*> GetBf16(absl::Span<const float> values, cudaStream_t stream);

 private:
  struct Entry {
    const float* host;
    size_t count;
    bool bf16;
    DeviceBuffer device;
  };
  absl::StatusOr<const void*> Find(absl::Span<const float> values, bool bf16, cudaStream_t stream);
  std::vector<Entry> entries_;
};

}  // namespace baton::ops::cuda
