#include "engine/base/cuda_driver.h"

#include <dlfcn.h>

#include <type_traits>

#include "absl/strings/str_cat.h"

namespace baton::base {

// Of programs on the emulated device (tests/simt): where its driver's functions are. Null in
// others.
[[gnu::weak]] void* EmulatedCudaDriverFunction(const char* name);

namespace {

constexpr const char* kDriverLibrary = "libcuda.so.1";

struct LoadedDriver {
  CudaDriver driver{};
  absl::Status status;
};

// Where functions are looked up; null: there is no driver.
void* (*FindLookup(absl::Status* status, void** library))(void*, const char*) {
  if (&EmulatedCudaDriverFunction != nullptr)
    return [](void*, const char* name) { return EmulatedCudaDriverFunction(name); };
  *library = dlopen(kDriverLibrary, RTLD_NOW | RTLD_LOCAL);  // never closed
  if (*library == nullptr) {
    *status = absl::UnavailableError(
        absl::StrCat("cuda: ", kDriverLibrary, " cannot be loaded: ", dlerror()));
    return nullptr;
  }
  return [](void* handle, const char* name) { return dlsym(handle, name); };
}

LoadedDriver LoadDriver() {
  LoadedDriver loaded;
  void* library = nullptr;
  const auto lookup = FindLookup(&loaded.status, &library);
  if (lookup == nullptr) return loaded;
  const auto find = [&](auto* function, const char* name) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(lookup(library, name));
    if (*function == nullptr && loaded.status.ok())
      loaded.status = absl::UnavailableError(absl::StrCat("cuda: the driver has no ", name));
  };
  CudaDriver& d = loaded.driver;
  find(&d.init, "cuInit");
  find(&d.error_name, "cuGetErrorName");
  find(&d.device_count, "cuDeviceGetCount");
  find(&d.device_get, "cuDeviceGet");
  find(&d.device_uuid, "cuDeviceGetUuid_v2");
  find(&d.device_attribute, "cuDeviceGetAttribute");
  find(&d.can_access_peer, "cuDeviceCanAccessPeer");
  find(&d.context_retain, "cuDevicePrimaryCtxRetain");
  find(&d.context_release, "cuDevicePrimaryCtxRelease_v2");
  find(&d.context_set, "cuCtxSetCurrent");
  find(&d.granularity, "cuMemGetAllocationGranularity");
  find(&d.create, "cuMemCreate");
  find(&d.release, "cuMemRelease");
  find(&d.reserve, "cuMemAddressReserve");
  find(&d.unreserve, "cuMemAddressFree");
  find(&d.map, "cuMemMap");
  find(&d.unmap, "cuMemUnmap");
  find(&d.set_access, "cuMemSetAccess");
  find(&d.export_memory, "cuMemExportToShareableHandle");
  find(&d.import_memory, "cuMemImportFromShareableHandle");
  find(&d.memory_at, "cuMemRetainAllocationHandle");
  find(&d.address_range, "cuMemGetAddressRange_v2");
  find(&d.pointer_attribute, "cuPointerGetAttribute");
  find(&d.alloc, "cuMemAlloc_v2");
  find(&d.free, "cuMemFree_v2");
  find(&d.ipc_get, "cuIpcGetMemHandle");
  find(&d.ipc_open, "cuIpcOpenMemHandle_v2");
  find(&d.ipc_close, "cuIpcCloseMemHandle");
  find(&d.stream_create, "cuStreamCreate");
  find(&d.stream_destroy, "cuStreamDestroy_v2");
  find(&d.stream_query, "cuStreamQuery");
  find(&d.stream_synchronize, "cuStreamSynchronize");
  find(&d.copy_async, "cuMemcpyDtoDAsync_v2");
  find(&d.copy_to_host, "cuMemcpyDtoH_v2");
  find(&d.copy_to_device, "cuMemcpyHtoD_v2");
  if (loaded.status.ok() && d.init(0) != kCuSuccess)
    loaded.status = absl::UnavailableError("cuda: the driver finds no device");
  return loaded;
}

}  // namespace

absl::StatusOr<const CudaDriver*> LoadCudaDriver() {
  static const LoadedDriver* const loaded = new LoadedDriver(LoadDriver());
  if (!loaded->status.ok()) return loaded->status;
  return &loaded->driver;
}

absl::Status CudaDriverStatus(const CudaDriver& driver, CuResult result, absl::string_view what) {
  if (result == kCuSuccess) return absl::OkStatus();
  const char* name = nullptr;
  if (driver.error_name(result, &name) != kCuSuccess || name == nullptr) name = "unknown error";
  return absl::InternalError(absl::StrCat("cuda: ", what, ": ", name));
}

}  // namespace baton::base
