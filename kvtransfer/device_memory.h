#pragma once

// How memory of a device is described to another process, opened there, and written by copies that
// the device makes on its own.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "engine/base/cuda_memory.h"
#include "kvtransfer/frame.h"
#include "kvtransfer/socket.h"

namespace baton::kvtransfer {

// What DeviceMemoryFrame says of [data, data + size), and the descriptor that goes with it
// (invalid: a legacy handle does without). By descriptor where the memory allows, else by a legacy
// handle, which names the whole allocation and opens only in another process of the same PID
// namespace. Errors: FAILED_PRECONDITION when it is no memory of a device or cannot be shared.
struct ExportedMemory {
  DeviceMemoryEntry entry;
  UniqueFd descriptor;
};
absl::StatusOr<ExportedMemory> ExportMemory(const void* data, size_t size);

// Another process's memory, opened for one device of ours. Closed with it. Thread-compatible.
class ImportedMemory {
 public:
  // `need` bytes at least. Errors: FAILED_PRECONDITION naming the device when it is not visible
  // here or cannot be reached from ours, or when the driver refuses the handle; INVALID_ARGUMENT
  // when the description contradicts itself.
  static absl::StatusOr<ImportedMemory> Open(const base::CudaDevice& device,
                                             const DeviceMemoryEntry& entry,
                                             const UniqueFd* descriptor,
                                             size_t need);

  ImportedMemory() = default;
  ImportedMemory(ImportedMemory&& other) noexcept { *this = std::move(other); }
  ImportedMemory& operator=(ImportedMemory&& other) noexcept;
  ~ImportedMemory();

  uint8_t* data() const { return data_; }

 private:
  base::CudaMapping mapping_;                 // by descriptor
  const base::CudaDriver* driver_ = nullptr;  // legacy
  base::CuPointer opened_ = 0;                // legacy
  uint8_t* data_ = nullptr;
};

// Copies between places of device memory, in order, on a stream of its own. One thread at a time.
class DeviceCopier {
 public:
  // On the device that `data` lies on. Errors: FAILED_PRECONDITION when that is none.
  static absl::StatusOr<DeviceCopier> Create(const void* data);

  DeviceCopier(DeviceCopier&& other) noexcept;
  DeviceCopier& operator=(DeviceCopier&&) = delete;
  ~DeviceCopier();

  const base::CudaDevice& device() const { return device_; }
  base::CuStream* stream() const { return stream_; }

  // As transfer_plan.h's. Returns when the copies are under way.
  absl::Status CopyRanges(const uint8_t* from_base,
                          absl::Span<const ByteRange> from,
                          uint8_t* to_base,
                          absl::Span<const ByteRange> to);
  // Whether all of them have ended.
  absl::StatusOr<bool> Idle();
  absl::Status Wait();
  // XXH3-64 of the bytes of `ranges`, in order. Waits for the device.
  absl::StatusOr<uint64_t> ChecksumOf(const uint8_t* base, absl::Span<const ByteRange> ranges);

 private:
  explicit DeviceCopier(base::CudaDevice device) : device_(std::move(device)) {}

  base::CudaDevice device_;
  base::CuStream* stream_ = nullptr;
};

// "GPU-...", as the vendor's tools print it.
std::string UuidName(absl::Span<const uint8_t> uuid);

}  // namespace baton::kvtransfer
