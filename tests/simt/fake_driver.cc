// A stand-in for the part of libcuda that engine/base/cuda_driver.h calls, over the same device
// memory and streams as fake_cudart.cc. Other processes map it through memfds: by descriptor as the
// real thing (which crosses namespaces), or by legacy handle, which names a process and is opened
// through /proc (which does not).

#include <cuda.h>
#include <cuda_runtime.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "engine/base/cuda_driver.h"
#include "tests/simt/device_memory.h"
#include "tests/simt/fake_cudart.h"

namespace baton::simt {
namespace {

// engine/base/cuda_driver.h says by itself what cuda.h says.
static_assert(sizeof(base::CuMemoryProperties) == sizeof(CUmemAllocationProp));
static_assert(sizeof(base::CuAccess) == sizeof(CUmemAccessDesc));
static_assert(sizeof(base::CuUuid) == sizeof(CUuuid));
static_assert(sizeof(base::CuIpcHandle) == sizeof(CUipcMemHandle));
static_assert(sizeof(base::CuPointer) == sizeof(CUdeviceptr));
static_assert(sizeof(base::CuMemory) == sizeof(CUmemGenericAllocationHandle));
static_assert(offsetof(base::CuMemoryProperties, location) ==
              offsetof(CUmemAllocationProp, location));
static_assert(base::kCuSuccess == CUDA_SUCCESS && base::kCuNotReady == CUDA_ERROR_NOT_READY);
static_assert(base::kCuHandlePosixFd == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(base::kCuPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(base::kCuLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(base::kCuReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(base::kCuGranularityAdvised == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
static_assert(base::kCuStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(base::kCuIpcLazyPeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
static_assert(base::kCuSupportsVmm == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(base::kCuSupportsPosixFd ==
              CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
static_assert(base::kCuPointerDevice == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);

constexpr size_t kGranule = size_t{2} << 20;

struct Physical {
  int fd = -1;
  size_t bytes = 0;
  int references = 1;    // handles, and mappings
  bool is_ours = false;  // created here, so counted here
  int device = 0;
};

// In a legacy handle.
struct LegacyName {
  int pid;
  int fd;
  size_t offset;
  size_t bytes;
};

struct Driver {
  std::recursive_mutex mutex;
  std::map<CUdeviceptr, Physical*> mappings;  // by their start
  std::map<CUdeviceptr, size_t> reservations;
  std::map<CUdeviceptr, CUdeviceptr> opened;  // legacy: address given out -> start of the mapping
};

Driver& TheDriver() {
  static Driver* driver = new Driver;
  return *driver;
}

// Of this thread's device, and of what the driver keeps for all.
struct DriverLock {
  Driver& driver = TheDriver();
  std::lock_guard<std::recursive_mutex> of_device{RuntimeMutex()};
  std::lock_guard<std::recursive_mutex> of_driver{driver.mutex};
};

void* Address(CUdeviceptr pointer) { return reinterpret_cast<void*>(pointer); }
CUdeviceptr Pointer(void* address) { return reinterpret_cast<CUdeviceptr>(address); }

void Drop(Physical* physical) {
  if (--physical->references > 0) return;
  if (physical->is_ours)
    DeviceMemory::Get().Count(physical->device, -static_cast<ptrdiff_t>(physical->bytes));
  close(physical->fd);
  delete physical;
}

CUresult Of(cudaError_t error) {
  if (error == cudaSuccess) return CUDA_SUCCESS;
  if (error == cudaErrorNotReady) return CUDA_ERROR_NOT_READY;
  return error == cudaErrorInvalidValue ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_LAUNCH_FAILED;
}

CUresult Init(unsigned) {
  return GetRuntimeConfig().num_devices > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult ErrorName(CUresult error, const char** name) {
  switch (error) {
    case CUDA_SUCCESS:
      *name = "CUDA_SUCCESS";
      break;
    case CUDA_ERROR_INVALID_VALUE:
      *name = "CUDA_ERROR_INVALID_VALUE";
      break;
    case CUDA_ERROR_OUT_OF_MEMORY:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      break;
    case CUDA_ERROR_INVALID_CONTEXT:
      *name = "CUDA_ERROR_INVALID_CONTEXT";
      break;
    case CUDA_ERROR_INVALID_DEVICE:
      *name = "CUDA_ERROR_INVALID_DEVICE";
      break;
    default:
      *name = "CUDA_ERROR_LAUNCH_FAILED";
  }
  return CUDA_SUCCESS;
}

CUresult DeviceCount(int* count) {
  cudaGetDeviceCount(count);
  return CUDA_SUCCESS;
}

CUresult DeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return IsDevice(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult DeviceUuid(CUuuid* uuid, CUdevice device) {
  if (!IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::memset(uuid, 0, sizeof(*uuid));
  std::memcpy(uuid->bytes, "emulated", 8);
  uuid->bytes[15] = static_cast<char>(GetRuntimeConfig().device_number + device);
  return CUDA_SUCCESS;
}

CUresult DeviceAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (!IsDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
  const bool memory = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ||
                      attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
  if (!memory) return CUDA_ERROR_INVALID_VALUE;
  *value = GetRuntimeConfig().vmm;
  return CUDA_SUCCESS;
}

CUresult CanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  *can = device != peer && GetRuntimeConfig().peer_access;
  return CUDA_SUCCESS;
}

CUresult ContextRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(static_cast<intptr_t>(device) + 1);
  return IsDevice(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult ContextRelease(CUdevice) { return CUDA_SUCCESS; }

CUresult ContextSet(CUcontext context) {
  SetThreadContext(static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1);
  return CUDA_SUCCESS;
}

CUresult Granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = kGranule;
  return CUDA_SUCCESS;
}

CUresult Create(CUmemGenericAllocationHandle* handle,
                size_t bytes,
                const CUmemAllocationProp* properties,
                unsigned long long) {
  if (bytes == 0 || bytes % kGranule != 0 || !IsDevice(properties->location.id) ||
      properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
    return CUDA_ERROR_INVALID_VALUE;
  if (!GetRuntimeConfig().vmm) return CUDA_ERROR_NOT_SUPPORTED;
  DriverLock l;
  DeviceMemory& memory = DeviceMemory::Get();
  const int device = properties->location.id;
  if (memory.bytes_in_use(device) + bytes > GetRuntimeConfig().total_bytes)
    return CUDA_ERROR_OUT_OF_MEMORY;
  const int fd = memory.CreateShared(bytes);
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  memory.Count(device, static_cast<ptrdiff_t>(bytes));
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(
      new Physical{fd, bytes, 1, /*is_ours=*/true, device});
  return CUDA_SUCCESS;
}

CUresult Release(CUmemGenericAllocationHandle handle) {
  DriverLock l;
  Drop(reinterpret_cast<Physical*>(handle));
  return CUDA_SUCCESS;
}

CUresult Reserve(CUdeviceptr* pointer, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  if (bytes == 0 || bytes % kGranule != 0) return CUDA_ERROR_INVALID_VALUE;
  DriverLock l;
  void* address = DeviceMemory::Get().Reserve(bytes);
  if (address == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *pointer = Pointer(address);
  l.driver.reservations[*pointer] = bytes;
  return CUDA_SUCCESS;
}

CUresult Unreserve(CUdeviceptr pointer, size_t bytes) {
  DriverLock l;
  const auto found = l.driver.reservations.find(pointer);
  if (found == l.driver.reservations.end() || found->second != bytes ||
      l.driver.mappings.contains(pointer))
    return CUDA_ERROR_INVALID_VALUE;
  DeviceMemory::Get().Unreserve(Address(pointer), bytes);
  l.driver.reservations.erase(found);
  return CUDA_SUCCESS;
}

CUresult Map(CUdeviceptr pointer,
             size_t bytes,
             size_t offset,
             CUmemGenericAllocationHandle handle,
             unsigned long long) {
  auto* physical = reinterpret_cast<Physical*>(handle);
  DriverLock l;
  const auto found = l.driver.reservations.find(pointer);
  if (found == l.driver.reservations.end() || found->second != bytes || offset != 0 ||
      physical->bytes != bytes || l.driver.mappings.contains(pointer))
    return CUDA_ERROR_INVALID_VALUE;
  if (!DeviceMemory::Get().Map(Address(pointer), bytes, physical->fd, physical->device))
    return CUDA_ERROR_OUT_OF_MEMORY;
  ++physical->references;
  l.driver.mappings[pointer] = physical;
  return CUDA_SUCCESS;
}

CUresult Unmap(CUdeviceptr pointer, size_t bytes) {
  cudaDeviceSynchronize();
  DriverLock l;
  const auto found = l.driver.mappings.find(pointer);
  if (found == l.driver.mappings.end() || !DeviceMemory::Get().Unmap(Address(pointer), bytes))
    return CUDA_ERROR_INVALID_VALUE;
  Drop(found->second);
  l.driver.mappings.erase(found);
  return CUDA_SUCCESS;
}

CUresult SetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc* access, size_t count) {
  if (count != 1 || !IsDevice(access->location.id) ||
      access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
    return CUDA_ERROR_INVALID_VALUE;
  DriverLock l;
  return DeviceMemory::Get().SetAccess(Address(pointer), bytes) ? CUDA_SUCCESS
                                                                : CUDA_ERROR_INVALID_VALUE;
}

CUresult Export(void* out,
                CUmemGenericAllocationHandle handle,
                CUmemAllocationHandleType type,
                unsigned long long) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  const int fd = fcntl(reinterpret_cast<Physical*>(handle)->fd, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *static_cast<int*>(out) = fd;
  return CUDA_SUCCESS;
}

CUresult Import(CUmemGenericAllocationHandle* handle, void* os, CUmemAllocationHandleType) {
  const int given = static_cast<int>(reinterpret_cast<intptr_t>(os));
  const size_t bytes = DeviceMemory::SharedBytes(given);
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  const int fd = fcntl(given, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Physical{fd, bytes});
  return CUDA_SUCCESS;
}

CUresult MemoryAt(CUmemGenericAllocationHandle* handle, void* address) {
  DriverLock l;
  const auto found = l.driver.mappings.find(Pointer(address));
  if (found == l.driver.mappings.end()) return CUDA_ERROR_INVALID_VALUE;
  ++found->second->references;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(found->second);
  return CUDA_SUCCESS;
}

CUresult AddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
  void* start = nullptr;
  DriverLock l;
  if (!DeviceMemory::Get().Find(Address(pointer), &start, bytes)) return CUDA_ERROR_INVALID_VALUE;
  *base = Pointer(start);
  return CUDA_SUCCESS;
}

CUresult PointerAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  void* start = nullptr;
  size_t bytes = 0;
  int device = 0;
  DriverLock l;
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL ||
      !DeviceMemory::Get().Find(Address(pointer), &start, &bytes, &device))
    return CUDA_ERROR_INVALID_VALUE;
  *static_cast<int*>(value) = device;
  return CUDA_SUCCESS;
}

CUresult Alloc(CUdeviceptr* pointer, size_t bytes) {
  void* address = nullptr;
  if (!HasThreadContext()) return CUDA_ERROR_INVALID_CONTEXT;
  if (cudaMalloc(&address, bytes) != cudaSuccess) return CUDA_ERROR_OUT_OF_MEMORY;
  *pointer = Pointer(address);
  return CUDA_SUCCESS;
}

CUresult Free(CUdeviceptr pointer) { return Of(cudaFree(Address(pointer))); }

CUresult IpcGet(CUipcMemHandle* handle, CUdeviceptr pointer) {
  DriverLock l;
  LegacyName name{getpid(), -1, 0, 0};
  name.fd = DeviceMemory::Get().ShareAllocation(Address(pointer), &name.offset);
  if (name.fd < 0) return CUDA_ERROR_INVALID_VALUE;
  name.bytes = DeviceMemory::SharedBytes(name.fd);
  std::memset(handle, 0, sizeof(*handle));
  std::memcpy(handle, &name, sizeof(name));
  return CUDA_SUCCESS;
}

CUresult IpcOpen(CUdeviceptr* pointer, CUipcMemHandle handle, unsigned flags) {
  if (!HasThreadContext()) return CUDA_ERROR_INVALID_CONTEXT;
  if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
  LegacyName name;
  std::memcpy(&name, &handle, sizeof(name));
  if (name.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;  // as the driver: never one's own
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", name.pid, name.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return CUDA_ERROR_INVALID_CONTEXT;
  const bool known = DeviceMemory::SharedBytes(fd) == name.bytes && name.offset < name.bytes;
  DriverLock l;
  DeviceMemory& memory = DeviceMemory::Get();
  void* address = known ? memory.Reserve(name.bytes) : nullptr;
  const bool mapped = address != nullptr && memory.Map(address, name.bytes, fd) &&
                      memory.SetAccess(address, name.bytes);
  close(fd);
  if (!mapped) return CUDA_ERROR_INVALID_VALUE;
  l.driver.reservations[Pointer(address)] = name.bytes;
  *pointer = Pointer(address) + name.offset;
  l.driver.opened[*pointer] = Pointer(address);
  return CUDA_SUCCESS;
}

CUresult IpcClose(CUdeviceptr pointer) {
  cudaDeviceSynchronize();
  DriverLock l;
  const auto found = l.driver.opened.find(pointer);
  if (found == l.driver.opened.end()) return CUDA_ERROR_INVALID_VALUE;
  const CUdeviceptr start = found->second;
  const size_t bytes = l.driver.reservations[start];
  DeviceMemory::Get().Unmap(Address(start), bytes);
  DeviceMemory::Get().Unreserve(Address(start), bytes);
  l.driver.reservations.erase(start);
  l.driver.opened.erase(found);
  return CUDA_SUCCESS;
}

CUresult StreamCreate(CUstream* stream, unsigned flags) {
  if (!HasThreadContext()) return CUDA_ERROR_INVALID_CONTEXT;
  return Of(cudaStreamCreateWithFlags(stream, flags));
}
CUresult StreamDestroy(CUstream stream) { return Of(cudaStreamDestroy(stream)); }
CUresult StreamQuery(CUstream stream) { return Of(QueryStream(stream)); }
CUresult StreamSynchronize(CUstream stream) { return Of(cudaStreamSynchronize(stream)); }

CUresult Copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if (!HasThreadContext()) return CUDA_ERROR_INVALID_CONTEXT;
  return Of(cudaMemcpyAsync(Address(to), Address(from), bytes, cudaMemcpyDeviceToDevice, stream));
}
CUresult CopyToHost(void* to, CUdeviceptr from, size_t bytes) {
  if (!HasThreadContext()) return CUDA_ERROR_INVALID_CONTEXT;
  return Of(cudaMemcpy(to, Address(from), bytes, cudaMemcpyDeviceToHost));
}
CUresult CopyToDevice(CUdeviceptr to, const void* from, size_t bytes) {
  if (!HasThreadContext()) return CUDA_ERROR_INVALID_CONTEXT;
  return Of(cudaMemcpy(Address(to), from, bytes, cudaMemcpyHostToDevice));
}

// A function under the name the real library exports it by; its type must be the real one's.
template <typename Real>
void* Named(Real* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace
}  // namespace baton::simt

namespace baton::base {

// Null for what the emulated driver has not.
void* EmulatedCudaDriverFunction(const char* name) {
  using simt::Named;
  static const auto* const functions = new std::map<std::string, void*>{
      {"cuInit", Named<decltype(cuInit)>(&simt::Init)},
      {"cuGetErrorName", Named<decltype(cuGetErrorName)>(&simt::ErrorName)},
      {"cuDeviceGetCount", Named<decltype(cuDeviceGetCount)>(&simt::DeviceCount)},
      {"cuDeviceGet", Named<decltype(cuDeviceGet)>(&simt::DeviceGet)},
      {"cuDeviceGetUuid_v2", Named<decltype(cuDeviceGetUuid_v2)>(&simt::DeviceUuid)},
      {"cuDeviceGetAttribute", Named<decltype(cuDeviceGetAttribute)>(&simt::DeviceAttribute)},
      {"cuDeviceCanAccessPeer", Named<decltype(cuDeviceCanAccessPeer)>(&simt::CanAccessPeer)},
      {"cuDevicePrimaryCtxRetain", Named<decltype(cuDevicePrimaryCtxRetain)>(&simt::ContextRetain)},
      {"cuDevicePrimaryCtxRelease_v2",
       Named<decltype(cuDevicePrimaryCtxRelease)>(&simt::ContextRelease)},
      {"cuCtxSetCurrent", Named<decltype(cuCtxSetCurrent)>(&simt::ContextSet)},
      {"cuMemGetAllocationGranularity",
       Named<decltype(cuMemGetAllocationGranularity)>(&simt::Granularity)},
      {"cuMemCreate", Named<decltype(cuMemCreate)>(&simt::Create)},
      {"cuMemRelease", Named<decltype(cuMemRelease)>(&simt::Release)},
      {"cuMemAddressReserve", Named<decltype(cuMemAddressReserve)>(&simt::Reserve)},
      {"cuMemAddressFree", Named<decltype(cuMemAddressFree)>(&simt::Unreserve)},
      {"cuMemMap", Named<decltype(cuMemMap)>(&simt::Map)},
      {"cuMemUnmap", Named<decltype(cuMemUnmap)>(&simt::Unmap)},
      {"cuMemSetAccess", Named<decltype(cuMemSetAccess)>(&simt::SetAccess)},
      {"cuMemExportToShareableHandle",
       Named<decltype(cuMemExportToShareableHandle)>(&simt::Export)},
      {"cuMemImportFromShareableHandle",
       Named<decltype(cuMemImportFromShareableHandle)>(&simt::Import)},
      {"cuMemRetainAllocationHandle",
       Named<decltype(cuMemRetainAllocationHandle)>(&simt::MemoryAt)},
      {"cuMemGetAddressRange_v2", Named<decltype(cuMemGetAddressRange)>(&simt::AddressRange)},
      {"cuPointerGetAttribute", Named<decltype(cuPointerGetAttribute)>(&simt::PointerAttribute)},
      {"cuMemAlloc_v2", Named<decltype(cuMemAlloc)>(&simt::Alloc)},
      {"cuMemFree_v2", Named<decltype(cuMemFree)>(&simt::Free)},
      {"cuIpcGetMemHandle", Named<decltype(cuIpcGetMemHandle)>(&simt::IpcGet)},
      {"cuIpcOpenMemHandle_v2", Named<decltype(cuIpcOpenMemHandle)>(&simt::IpcOpen)},
      {"cuIpcCloseMemHandle", Named<decltype(cuIpcCloseMemHandle)>(&simt::IpcClose)},
      {"cuStreamCreate", Named<decltype(cuStreamCreate)>(&simt::StreamCreate)},
      {"cuStreamDestroy_v2", Named<decltype(cuStreamDestroy)>(&simt::StreamDestroy)},
      {"cuStreamQuery", Named<decltype(cuStreamQuery)>(&simt::StreamQuery)},
      {"cuStreamSynchronize", Named<decltype(cuStreamSynchronize)>(&simt::StreamSynchronize)},
      {"cuMemcpyDtoDAsync_v2", Named<decltype(cuMemcpyDtoDAsync)>(&simt::Copy)},
      {"cuMemcpyDtoH_v2", Named<decltype(cuMemcpyDtoH)>(&simt::CopyToHost)},
      {"cuMemcpyHtoD_v2", Named<decltype(cuMemcpyHtoD)>(&simt::CopyToDevice)},
  };
  const auto found = functions->find(name);
  return found == functions->end() ? nullptr : found->second;
}

}  // namespace baton::base
