#pragma once

// The part of the CUDA driver that memory shared between processes needs. The library belongs to
// the host it runs on, so it is loaded at run time and declared here: programs are built without
// its headers and start where there is no GPU. Values are those of its ABI; tests/simt compares
// them with cuda.h.

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace baton::base {

using CuResult = int;
using CuDevice = int;
using CuPointer = unsigned long long;  // in device memory
using CuMemory = unsigned long long;   // physical memory, wherever it is mapped
struct CuContext;
struct CuStream;

inline constexpr CuResult kCuSuccess = 0;
inline constexpr CuResult kCuNotReady = 600;
inline constexpr int kCuHandlePosixFd = 1;
inline constexpr int kCuPinned = 1;          // CUmemAllocationType
inline constexpr int kCuLocationDevice = 1;  // CUmemLocationType
inline constexpr int kCuReadWrite = 3;       // CUmemAccess_flags
inline constexpr int kCuGranularityAdvised = 1;
inline constexpr unsigned kCuStreamNonBlocking = 1;
inline constexpr unsigned kCuIpcLazyPeerAccess = 1;
inline constexpr int kCuSupportsVmm = 102;      // CUdevice_attribute
inline constexpr int kCuSupportsPosixFd = 103;  // CUdevice_attribute
inline constexpr int kCuPointerDevice = 9;      // CUpointer_attribute: the device's ordinal

struct CuLocation {
  int type = kCuLocationDevice;
  int id = 0;
};
struct CuMemoryProperties {
  int type = kCuPinned;
  int handle_types = kCuHandlePosixFd;
  CuLocation location;
  void* windows_only = nullptr;
  uint8_t flags[8] = {};
};
struct CuAccess {
  CuLocation location;
  int flags = kCuReadWrite;
};
struct CuUuid {
  std::array<uint8_t, 16> bytes;
};
struct CuIpcHandle {
  std::array<uint8_t, 64> bytes;
};

struct CudaDriver {
  CuResult (*init)(unsigned flags);
  CuResult (*error_name)(CuResult error, const char** name);
  CuResult (*device_count)(int* count);
  CuResult (*device_get)(CuDevice* device, int ordinal);
  CuResult (*device_uuid)(CuUuid* uuid, CuDevice device);
  CuResult (*device_attribute)(int* value, int attribute, CuDevice device);
  CuResult (*can_access_peer)(int* can, CuDevice device, CuDevice peer);
  CuResult (*context_retain)(CuContext** context, CuDevice device);  // the device's primary one
  CuResult (*context_release)(CuDevice device);
  CuResult (*context_set)(CuContext* context);  // of the calling thread
  CuResult (*granularity)(size_t* bytes, const CuMemoryProperties* properties, int option);
  CuResult (*create)(CuMemory* memory,
                     size_t bytes,
                     const CuMemoryProperties* properties,
                     unsigned long long flags);
  CuResult (*release)(CuMemory memory);
  CuResult (*reserve)(
      CuPointer* address, size_t bytes, size_t alignment, CuPointer wish, unsigned long long flags);
  CuResult (*unreserve)(CuPointer address, size_t bytes);
  CuResult (*map)(
      CuPointer address, size_t bytes, size_t offset, CuMemory memory, unsigned long long flags);
  CuResult (*unmap)(CuPointer address, size_t bytes);
  CuResult (*set_access)(CuPointer address, size_t bytes, const CuAccess* access, size_t count);
  CuResult (*export_memory)(void* handle, CuMemory memory, int type, unsigned long long flags);
  CuResult (*import_memory)(CuMemory* memory, void* handle, int type);
  CuResult (*memory_at)(CuMemory* memory, void* address);  // takes a reference
  CuResult (*address_range)(CuPointer* base, size_t* bytes, CuPointer address);
  CuResult (*pointer_attribute)(void* value, int attribute, CuPointer address);
  CuResult (*alloc)(CuPointer* address, size_t bytes);
  CuResult (*free)(CuPointer address);
  CuResult (*ipc_get)(CuIpcHandle* handle, CuPointer address);
  CuResult (*ipc_open)(CuPointer* address, CuIpcHandle handle, unsigned flags);
  CuResult (*ipc_close)(CuPointer address);
  CuResult (*stream_create)(CuStream** stream, unsigned flags);
  CuResult (*stream_destroy)(CuStream* stream);
  CuResult (*stream_query)(CuStream* stream);
  CuResult (*stream_synchronize)(CuStream* stream);
  CuResult (*copy_async)(CuPointer to, CuPointer from, size_t bytes, CuStream* stream);
  CuResult (*copy_to_host)(void* to, CuPointer from, size_t bytes);
  CuResult (*copy_to_device)(CuPointer to, const void* from, size_t bytes);
};

// Loaded and initialised once, kept until the process ends. Thread-safe.
// Errors: UNAVAILABLE when the host has no driver, or one without the calls above.
absl::StatusOr<const CudaDriver*> LoadCudaDriver();

// OK, or INTERNAL "cuda: <what>: CUDA_ERROR_...".
absl::Status CudaDriverStatus(const CudaDriver& driver, CuResult result, absl::string_view what);

}  // namespace baton::base
