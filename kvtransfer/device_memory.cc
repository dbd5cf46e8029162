#include "kvtransfer/device_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <xxhash.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/status_macros.h"

namespace baton::kvtransfer {
namespace {

using base::CudaDevice;
using base::CudaDriver;
using base::CudaDriverStatus;
using base::CudaMapping;
using base::CuDevice;
using base::CuMemory;
using base::CuPointer;

CuPointer PointerOf(const void* data) { return reinterpret_cast<CuPointer>(data); }

// The device that `data` lies on.
absl::StatusOr<CudaDevice> DeviceOf(const void* data) {
  BATON_ASSIGN_OR_RETURN(const CudaDriver* driver, base::LoadCudaDriver());
  int ordinal = -1;
  const base::CuResult found =
      driver->pointer_attribute(&ordinal, base::kCuPointerDevice, PointerOf(data));
  if (found != base::kCuSuccess || ordinal < 0)
    return absl::FailedPreconditionError("the memory does not lie on a device");
  return CudaDevice::Open(ordinal);
}

absl::Status Refused(const absl::Status& status) {
  return absl::FailedPreconditionError(status.message());
}

struct VisibleDevice {
  std::string name;
  bool is_wanted = false;
  bool is_reachable = false;  // from ours
};

// Devices that this process sees, the wanted one among them or not.
absl::StatusOr<std::vector<VisibleDevice>> VisibleDevices(const CudaDevice& ours,
                                                          const std::array<uint8_t, 16>& wanted) {
  const CudaDriver& driver = ours.driver();
  int count = 0;
  BATON_RETURN_IF_ERROR(CudaDriverStatus(driver, driver.device_count(&count), "devices"));
  std::vector<VisibleDevice> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CuDevice device = 0;
    base::CuUuid uuid{};
    BATON_RETURN_IF_ERROR(CudaDriverStatus(driver, driver.device_get(&device, ordinal), "devices"));
    BATON_RETURN_IF_ERROR(CudaDriverStatus(driver, driver.device_uuid(&uuid, device), "devices"));
    int can = uuid.bytes == ours.uuid().bytes;
    if (can == 0)
      BATON_RETURN_IF_ERROR(CudaDriverStatus(
          driver, driver.can_access_peer(&can, ours.device(), device), "peer access"));
    devices.push_back({UuidName(uuid.bytes), uuid.bytes == wanted, can != 0});
  }
  return devices;
}

// The memory's device must be one of ours, and ours must reach it.
absl::Status CheckDevice(const CudaDevice& ours, const DeviceMemoryEntry& entry) {
  BATON_ASSIGN_OR_RETURN(const std::vector<VisibleDevice> devices,
                         VisibleDevices(ours, entry.uuid));
  const auto found = std::find_if(devices.begin(), devices.end(),
                                  [](const VisibleDevice& device) { return device.is_wanted; });
  if (found == devices.end()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the decode worker's device ", UuidName(entry.uuid), " is not visible here (visible: ",
        absl::StrJoin(devices, ", ",
                      [](std::string* out, const VisibleDevice& d) { out->append(d.name); }),
        ")"));
  }
  if (found->is_reachable) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("device ", UuidName(ours.uuid().bytes),
                                                    " has no peer access to device ",
                                                    UuidName(entry.uuid), " of the decode worker"));
}

absl::Status CheckEntry(const DeviceMemoryEntry& entry, size_t need) {
  if (entry.offset <= entry.allocation_bytes &&
      entry.size <= entry.allocation_bytes - entry.offset && need <= entry.size)
    return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("device memory: need_bytes=", need,
                                                 " bytes=", entry.size, " offset=", entry.offset,
                                                 " allocation_bytes=", entry.allocation_bytes));
}

// Fills in `exported` from memory that has a descriptor. False: it has none.
absl::StatusOr<bool> ExportDescriptor(const CudaDriver& driver,
                                      CuPointer base,
                                      ExportedMemory* exported) {
  CuMemory memory = 0;
  if (driver.memory_at(&memory, reinterpret_cast<void*>(base)) != base::kCuSuccess) return false;
  int fd = -1;
  const base::CuResult result = driver.export_memory(&fd, memory, base::kCuHandlePosixFd, 0);
  driver.release(memory);
  if (result != base::kCuSuccess)
    return Refused(CudaDriverStatus(driver, result, "export device memory"));
  exported->descriptor = UniqueFd(fd);
  exported->entry.method = DeviceMemoryEntry::kDescriptor;
  return true;
}

}  // namespace

std::string UuidName(absl::Span<const uint8_t> uuid) {
  const std::string hex = absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(uuid.data()), uuid.size()));
  return absl::StrCat("GPU-", hex.substr(0, 8), "-", hex.substr(8, 4), "-", hex.substr(12, 4), "-",
                      hex.substr(16, 4), "-", hex.substr(20));
}

absl::StatusOr<ExportedMemory> ExportMemory(const void* data, size_t size) {
  BATON_ASSIGN_OR_RETURN(const CudaDevice device, DeviceOf(data));
  BATON_RETURN_IF_ERROR(device.Use());
  const CudaDriver& driver = device.driver();
  ExportedMemory exported;
  CuPointer base = 0;
  size_t bytes = 0;
  const base::CuResult found = driver.address_range(&base, &bytes, PointerOf(data));
  if (found != base::kCuSuccess)
    return Refused(CudaDriverStatus(driver, found, "range of device memory"));
  exported.entry.uuid = device.uuid().bytes;
  exported.entry.allocation_bytes = bytes;
  exported.entry.offset = PointerOf(data) - base;
  exported.entry.size = size;
  BATON_ASSIGN_OR_RETURN(const bool by_descriptor, ExportDescriptor(driver, base, &exported));
  if (by_descriptor) return exported;
  base::CuIpcHandle handle{};
  const base::CuResult got = driver.ipc_get(&handle, base);
  if (got != base::kCuSuccess)
    return Refused(CudaDriverStatus(driver, got, "legacy handle of device memory"));
  exported.entry.method = DeviceMemoryEntry::kLegacyHandle;
  exported.entry.handle = handle.bytes;
  return exported;
}

absl::StatusOr<ImportedMemory> ImportedMemory::Open(const CudaDevice& device,
                                                    const DeviceMemoryEntry& entry,
                                                    const UniqueFd* descriptor,
                                                    size_t need) {
  BATON_RETURN_IF_ERROR(CheckEntry(entry, need));
  BATON_RETURN_IF_ERROR(CheckDevice(device, entry));
  BATON_RETURN_IF_ERROR(device.Use());
  const CudaDriver& driver = device.driver();
  ImportedMemory imported;
  if (entry.method == DeviceMemoryEntry::kDescriptor) {
    if (descriptor == nullptr || !descriptor->valid())
      return absl::InvalidArgumentError("device memory: its descriptor has not come along");
    CuMemory memory = 0;
    const base::CuResult result = driver.import_memory(
        &memory, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor->get())),
        base::kCuHandlePosixFd);
    if (result != base::kCuSuccess)
      return Refused(CudaDriverStatus(driver, result, "import device memory"));
    absl::StatusOr<CudaMapping> mapping = CudaMapping::Map(device, memory, entry.allocation_bytes);
    if (!mapping.ok()) return Refused(mapping.status());
    imported.mapping_ = *std::move(mapping);
    imported.data_ = reinterpret_cast<uint8_t*>(imported.mapping_.address()) + entry.offset;
    return imported;
  }
  const base::CuResult result =
      driver.ipc_open(&imported.opened_, {entry.handle}, base::kCuIpcLazyPeerAccess);
  if (result != base::kCuSuccess) {
    imported.opened_ = 0;
    return Refused(CudaDriverStatus(
        driver, result, "open a legacy handle (both workers must share a PID namespace)"));
  }
  imported.driver_ = &driver;
  imported.data_ = reinterpret_cast<uint8_t*>(imported.opened_) + entry.offset;
  return imported;
}

ImportedMemory& ImportedMemory::operator=(ImportedMemory&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(driver_, other.driver_);
  std::swap(opened_, other.opened_);
  std::swap(data_, other.data_);
  return *this;
}

ImportedMemory::~ImportedMemory() {
  if (opened_ != 0) driver_->ipc_close(opened_);
}

absl::StatusOr<DeviceCopier> DeviceCopier::Create(const void* data) {
  BATON_ASSIGN_OR_RETURN(CudaDevice device, DeviceOf(data));
  BATON_RETURN_IF_ERROR(device.Use());
  DeviceCopier copier(std::move(device));
  const CudaDriver& driver = copier.device_.driver();
  BATON_RETURN_IF_ERROR(CudaDriverStatus(
      driver, driver.stream_create(&copier.stream_, base::kCuStreamNonBlocking), "copy stream"));
  return copier;
}

DeviceCopier::DeviceCopier(DeviceCopier&& other) noexcept
    : device_(std::move(other.device_)), stream_(std::exchange(other.stream_, nullptr)) {}

DeviceCopier::~DeviceCopier() {
  if (stream_ == nullptr) return;
  if (device_.Use().ok()) device_.driver().stream_destroy(stream_);
}

absl::Status DeviceCopier::CopyRanges(const uint8_t* from_base,
                                      absl::Span<const ByteRange> from,
                                      uint8_t* to_base,
                                      absl::Span<const ByteRange> to) {
  BATON_RETURN_IF_ERROR(device_.Use());
  const CudaDriver& driver = device_.driver();
  size_t from_done = 0, to_done = 0;  // of the first range of each
  while (!from.empty() && !to.empty()) {
    const size_t size = std::min(from[0].size - from_done, to[0].size - to_done);
    BATON_RETURN_IF_ERROR(CudaDriverStatus(
        driver,
        driver.copy_async(PointerOf(to_base + to[0].offset + to_done),
                          PointerOf(from_base + from[0].offset + from_done), size, stream_),
        "copy to the peer"));
    from_done += size;
    to_done += size;
    if (from_done == from[0].size) {
      from.remove_prefix(1);
      from_done = 0;
    }
    if (to_done == to[0].size) {
      to.remove_prefix(1);
      to_done = 0;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> DeviceCopier::Idle() {
  BATON_RETURN_IF_ERROR(device_.Use());
  const base::CuResult result = device_.driver().stream_query(stream_);
  if (result == base::kCuNotReady) return false;
  BATON_RETURN_IF_ERROR(CudaDriverStatus(device_.driver(), result, "copies to the peer"));
  return true;
}

absl::Status DeviceCopier::Wait() {
  BATON_RETURN_IF_ERROR(device_.Use());
  return CudaDriverStatus(device_.driver(), device_.driver().stream_synchronize(stream_),
                          "copies to the peer");
}

absl::StatusOr<uint64_t> DeviceCopier::ChecksumOf(const uint8_t* base,
                                                  absl::Span<const ByteRange> ranges) {
  BATON_RETURN_IF_ERROR(device_.Use());
  size_t total = 0;
  for (const ByteRange& range : ranges) total += range.size;
  std::vector<uint8_t> bytes(total);
  size_t done = 0;
  for (const ByteRange& range : ranges) {
    BATON_RETURN_IF_ERROR(
        CudaDriverStatus(device_.driver(),
                         device_.driver().copy_to_host(bytes.data() + done,
                                                       PointerOf(base + range.offset), range.size),
                         "read for a checksum"));
    done += range.size;
  }
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace baton::kvtransfer
