#include "tests/simt/device_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>

#include "tests/simt/msan.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace baton::simt {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlignment = 256;
constexpr char kSharedName[] = "baton-emulated-device";

// How deep this OS thread is in Access objects.
thread_local int access_depth = 0;

}  // namespace

DeviceMemory::DeviceMemory() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  protection_key_ = pkey_alloc(0, PKEY_DISABLE_ACCESS);
#endif
}

DeviceMemory& DeviceMemory::Get() {
  static DeviceMemory* memory = new DeviceMemory;
  return *memory;
}

void* DeviceMemory::Allocate(size_t size, int device) {
  size = std::max<size_t>(size, 1);
  const size_t body = (size + kPage - 1) / kPage * kPage;
  void* mapping =
      mmap(nullptr, body + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  char* base = static_cast<char*>(mapping);
  mprotect(base + body, kPage, PROT_NONE);
  std::memset(base, 0xff, body);
  char* address = base + (body - size) / kAlignment * kAlignment;
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(base, address - base);
  __asan_poison_memory_region(address + size, base + body - (address + size));
#endif
  ForgetMemory(address, size);
  if (guarded()) pkey_mprotect(base, body, PROT_READ | PROT_WRITE, protection_key_);
  const std::lock_guard<std::mutex> lock(mutex_);
  allocations_.push_back({address, size, base, body + kPage, device});
  bytes_in_use_[device] += size;
  return address;
}

void DeviceMemory::Count(int device, ptrdiff_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bytes_in_use_[device] += static_cast<size_t>(bytes);
}

size_t DeviceMemory::bytes_in_use() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::accumulate(bytes_in_use_.begin(), bytes_in_use_.end(), size_t{0});
}

size_t DeviceMemory::bytes_in_use(int device) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return bytes_in_use_[device];
}

bool DeviceMemory::Free(void* address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(allocations_.begin(), allocations_.end(),
                                  [&](const Allocation& a) { return a.address == address; });
  if (found == allocations_.end()) return false;
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(found->mapping, found->mapped);
#endif
  munmap(found->mapping, found->mapped);
  if (found->fd >= 0) close(found->fd);
  bytes_in_use_[found->device] -= found->size;
  allocations_.erase(found);
  return true;
}

bool DeviceMemory::Contains(const void* address, size_t size) const {
  const char* begin = static_cast<const char*>(address);
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(allocations_.begin(), allocations_.end(), [&](const Allocation& a) {
    return begin >= a.address && begin <= a.address + a.size &&
           size <= static_cast<size_t>(a.address + a.size - begin);
  });
}

int DeviceMemory::CreateShared(size_t bytes) {
  const int fd = memfd_create(kSharedName, MFD_CLOEXEC);
  if (fd < 0) return -1;
  void* fresh = MAP_FAILED;
  if (ftruncate(fd, static_cast<off_t>(bytes)) == 0)
    fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (fresh == MAP_FAILED) {
    close(fd);
    return -1;
  }
  std::memset(fresh, 0xff, bytes);
  munmap(fresh, bytes);
  return fd;
}

size_t DeviceMemory::SharedBytes(int fd) {
  char path[64], name[128] = {};
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  struct stat info;
  if (readlink(path, name, sizeof(name) - 1) < 0 || fstat(fd, &info) != 0) return 0;
  return std::strstr(name, kSharedName) != nullptr ? static_cast<size_t>(info.st_size) : 0;
}

void* DeviceMemory::Reserve(size_t bytes) {
  void* address = mmap(nullptr, bytes + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

void DeviceMemory::Unreserve(void* address, size_t bytes) { munmap(address, bytes + kPage); }

bool DeviceMemory::Map(void* address, size_t bytes, int fd, int device) {
  if (mmap(address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) return false;
  char* start = static_cast<char*>(address);
  const std::lock_guard<std::mutex> lock(mutex_);
  allocations_.push_back({start, bytes, start, bytes, device, /*is_mapping=*/true});
  return true;
}

bool DeviceMemory::SetAccess(void* address, size_t bytes) {
  if (!Contains(address, bytes)) return false;
  constexpr int kBoth = PROT_READ | PROT_WRITE;
  if (guarded()) return pkey_mprotect(address, bytes, kBoth, protection_key_) == 0;
  return mprotect(address, bytes, kBoth) == 0;
}

bool DeviceMemory::Unmap(void* address, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(
      allocations_.begin(), allocations_.end(),
      [&](const Allocation& a) { return a.is_mapping && a.address == address && a.size == bytes; });
  if (found == allocations_.end()) return false;
  allocations_.erase(found);
  return mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
         MAP_FAILED;
}

int DeviceMemory::ShareAllocation(const void* address, size_t* offset) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found =
      std::find_if(allocations_.begin(), allocations_.end(),
                   [&](const Allocation& a) { return !a.is_mapping && a.address == address; });
  if (found == allocations_.end()) return -1;
  *offset = static_cast<size_t>(found->address - found->mapping);
  if (found->fd >= 0) return found->fd;
  const size_t body = found->mapped - kPage;
  const int fd = CreateShared(body);
  if (fd < 0) return -1;
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(found->mapping, body);
#endif
  {
    const Access access;
    void* copy = mmap(nullptr, body, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    std::memcpy(copy, found->mapping, body);
    munmap(copy, body);
  }
  mmap(found->mapping, body, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  if (guarded()) pkey_mprotect(found->mapping, body, PROT_READ | PROT_WRITE, protection_key_);
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(found->mapping, *offset);
  __asan_poison_memory_region(found->address + found->size,
                              found->mapping + body - (found->address + found->size));
#endif
  found->fd = fd;
  return fd;
}

bool DeviceMemory::Find(const void* address, void** start, size_t* bytes, int* device) const {
  const char* place = static_cast<const char*>(address);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Allocation& a : allocations_) {
    if (place < a.address || place >= a.address + a.size) continue;
    *start = a.address;
    *bytes = a.size;
    if (device != nullptr) *device = a.device;
    return true;
  }
  return false;
}

DeviceMemory::Access::Access() {
  if (access_depth++ == 0 && Get().guarded()) pkey_set(Get().protection_key_, 0);
}

DeviceMemory::Access::~Access() {
  if (--access_depth == 0 && Get().guarded()) pkey_set(Get().protection_key_, PKEY_DISABLE_ACCESS);
}

}  // namespace baton::simt
