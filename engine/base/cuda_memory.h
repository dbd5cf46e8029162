#pragma once

// Device memory that other processes can map: physical memory of its own, mapped here, which a file
// descriptor names. The descriptor crosses container and PID namespaces over a Unix socket; what
// cudaMalloc gives has only legacy handles, which do not.

#include <cstddef>

#include "absl/status/statusor.h"
#include "engine/base/buffer.h"
#include "engine/base/cuda_driver.h"

namespace baton::base {

// The primary context of a device, held while this lives. Thread-compatible; threads that use its
// memory or streams say Use() first.
class CudaDevice {
 public:
  // Errors: UNAVAILABLE without a driver; INTERNAL.
  static absl::StatusOr<CudaDevice> Open(int ordinal);

  CudaDevice(CudaDevice&& other) noexcept;
  CudaDevice& operator=(CudaDevice&& other) noexcept;
  ~CudaDevice();

  // Makes it the calling thread's.
  absl::Status Use() const;
  const CudaDriver& driver() const { return *driver_; }
  CuDevice device() const { return device_; }
  int ordinal() const { return ordinal_; }
  const CuUuid& uuid() const { return uuid_; }
  // Whether memory can be named by a file descriptor.
  absl::StatusOr<bool> ExportsDescriptors() const;

 private:
  CudaDevice() = default;

  const CudaDriver* driver_ = nullptr;
  CuContext* context_ = nullptr;  // null: moved from
  CuDevice device_ = 0;
  int ordinal_ = 0;
  CuUuid uuid_{};
};

// `bytes`, rounded up, of memory of that device, readable and writable there.
// Errors: RESOURCE_EXHAUSTED; UNAVAILABLE without a driver; UNIMPLEMENTED where the device cannot.
absl::StatusOr<Buffer> AllocateExportable(int ordinal, size_t bytes);

// As cudaMalloc. Errors as above.
absl::StatusOr<Buffer> AllocateOnDevice(int ordinal, size_t bytes);

// Maps physical memory for the use of one device. Owns the mapping and a reference to the memory.
class CudaMapping {
 public:
  // Takes the caller's reference to `memory`, whatever comes of it. `bytes` is all of it.
  static absl::StatusOr<CudaMapping> Map(const CudaDevice& device, CuMemory memory, size_t bytes);

  CudaMapping() = default;
  CudaMapping(CudaMapping&& other) noexcept;
  CudaMapping& operator=(CudaMapping&& other) noexcept;
  ~CudaMapping() { Release(); }

  CuPointer address() const { return address_; }
  size_t bytes() const { return bytes_; }

 private:
  void Release();

  const CudaDriver* driver_ = nullptr;
  CuMemory memory_ = 0;
  CuPointer address_ = 0;  // reserved
  size_t bytes_ = 0;
  bool mapped_ = false;
};

}  // namespace baton::base
