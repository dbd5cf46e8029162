#include "engine/base/cuda_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"

namespace baton::base {

absl::StatusOr<CudaDevice> CudaDevice::Open(int ordinal) {
  CudaDevice opened;
  BATON_ASSIGN_OR_RETURN(opened.driver_, LoadCudaDriver());
  const CudaDriver& driver = *opened.driver_;
  const std::string what = absl::StrCat("device ", ordinal);
  opened.ordinal_ = ordinal;
  BATON_RETURN_IF_ERROR(
      CudaDriverStatus(driver, driver.device_get(&opened.device_, ordinal), what));
  BATON_RETURN_IF_ERROR(
      CudaDriverStatus(driver, driver.device_uuid(&opened.uuid_, opened.device_), what));
  CuContext* context = nullptr;
  BATON_RETURN_IF_ERROR(
      CudaDriverStatus(driver, driver.context_retain(&context, opened.device_), what));
  opened.context_ = context;
  return opened;
}

CudaDevice::CudaDevice(CudaDevice&& other) noexcept
    : driver_(other.driver_),
      context_(std::exchange(other.context_, nullptr)),
      device_(other.device_),
      ordinal_(other.ordinal_),
      uuid_(other.uuid_) {}

CudaDevice& CudaDevice::operator=(CudaDevice&& other) noexcept {
  std::swap(driver_, other.driver_);
  std::swap(context_, other.context_);
  std::swap(device_, other.device_);
  std::swap(ordinal_, other.ordinal_);
  std::swap(uuid_, other.uuid_);
  return *this;
}

CudaDevice::~CudaDevice() {
  if (context_ != nullptr) driver_->context_release(device_);
}

absl::Status CudaDevice::Use() const {
  return CudaDriverStatus(*driver_, driver_->context_set(context_), "context");
}

absl::StatusOr<bool> CudaDevice::ExportsDescriptors() const {
  for (const int attribute : {kCuSupportsVmm, kCuSupportsPosixFd}) {
    int value = 0;
    BATON_RETURN_IF_ERROR(CudaDriverStatus(
        *driver_, driver_->device_attribute(&value, attribute, device_), "attributes"));
    if (value == 0) return false;
  }
  return true;
}

absl::StatusOr<CudaMapping> CudaMapping::Map(const CudaDevice& device,
                                             CuMemory memory,
                                             size_t bytes) {
  const CudaDriver& driver = device.driver();
  CudaMapping mapping;
  mapping.driver_ = &driver;
  mapping.memory_ = memory;
  mapping.bytes_ = bytes;
  BATON_RETURN_IF_ERROR(device.Use());
  BATON_RETURN_IF_ERROR(CudaDriverStatus(driver, driver.reserve(&mapping.address_, bytes, 0, 0, 0),
                                         "reserve addresses"));
  BATON_RETURN_IF_ERROR(CudaDriverStatus(driver, driver.map(mapping.address_, bytes, 0, memory, 0),
                                         "map device memory"));
  mapping.mapped_ = true;
  CuAccess access;
  access.location.id = device.ordinal();
  BATON_RETURN_IF_ERROR(CudaDriverStatus(
      driver, driver.set_access(mapping.address_, bytes, &access, 1), "device memory access"));
  return mapping;
}

CudaMapping::CudaMapping(CudaMapping&& other) noexcept
    : driver_(other.driver_),
      memory_(std::exchange(other.memory_, 0)),
      address_(std::exchange(other.address_, 0)),
      bytes_(std::exchange(other.bytes_, 0)),
      mapped_(std::exchange(other.mapped_, false)) {}

CudaMapping& CudaMapping::operator=(CudaMapping&& other) noexcept {
  std::swap(driver_, other.driver_);
  std::swap(memory_, other.memory_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

void CudaMapping::Release() {
  if (mapped_) driver_->unmap(address_, bytes_);
  if (address_ != 0) driver_->unreserve(address_, bytes_);
  if (memory_ != 0) driver_->release(memory_);
  memory_ = 0;
  address_ = 0;
  mapped_ = false;
}

absl::StatusOr<Buffer> AllocateOnDevice(int ordinal, size_t bytes) {
  BATON_ASSIGN_OR_RETURN(CudaDevice device, CudaDevice::Open(ordinal));
  BATON_RETURN_IF_ERROR(device.Use());
  CuPointer address = 0;
  const absl::Status allocated =
      CudaDriverStatus(device.driver(), device.driver().alloc(&address, bytes),
                       absl::StrCat("device memory bytes=", bytes));
  if (!allocated.ok()) return absl::ResourceExhaustedError(allocated.message());
  auto* owner = new CudaDevice(std::move(device));
  return Buffer::Adopt(reinterpret_cast<uint8_t*>(address), bytes, [owner, address] {
    if (owner->Use().ok()) owner->driver().free(address);
    delete owner;
  });
}

absl::StatusOr<Buffer> AllocateExportable(int ordinal, size_t bytes) {
  struct Owner {
    CudaDevice device;
    CudaMapping mapping;
  };
  BATON_ASSIGN_OR_RETURN(CudaDevice device, CudaDevice::Open(ordinal));
  BATON_ASSIGN_OR_RETURN(const bool can, device.ExportsDescriptors());
  if (!can)
    return absl::UnimplementedError("cuda: the device's memory cannot be shared by descriptor");
  const CudaDriver& driver = device.driver();
  BATON_RETURN_IF_ERROR(device.Use());
  CuMemoryProperties properties;
  properties.location.id = ordinal;
  size_t granule = 0;
  BATON_RETURN_IF_ERROR(CudaDriverStatus(
      driver, driver.granularity(&granule, &properties, kCuGranularityAdvised), "granularity"));
  const size_t rounded = (bytes + granule - 1) / granule * granule;
  CuMemory memory = 0;
  const absl::Status created =
      CudaDriverStatus(driver, driver.create(&memory, rounded, &properties, 0),
                       absl::StrCat("device memory bytes=", rounded));
  if (!created.ok()) return absl::ResourceExhaustedError(created.message());
  BATON_ASSIGN_OR_RETURN(CudaMapping mapping, CudaMapping::Map(device, memory, rounded));
  auto* owner = new Owner{std::move(device), std::move(mapping)};
  return Buffer::Adopt(reinterpret_cast<uint8_t*>(owner->mapping.address()), bytes,
                       [owner] { delete owner; });
}

}  // namespace baton::base
