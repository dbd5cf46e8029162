#include "tests/simt/device_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace baton::simt {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlignment = 256;

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

void* DeviceMemory::Allocate(size_t size) {
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
  if (guarded()) pkey_mprotect(base, body, PROT_READ | PROT_WRITE, protection_key_);
  allocations_.push_back({address, size, base, body + kPage});
  bytes_in_use_ += size;
  return address;
}

bool DeviceMemory::Free(void* address) {
  const auto found = std::find_if(allocations_.begin(), allocations_.end(),
                                  [&](const Allocation& a) { return a.address == address; });
  if (found == allocations_.end()) return false;
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(found->mapping, found->mapped);
#endif
  munmap(found->mapping, found->mapped);
  bytes_in_use_ -= found->size;
  allocations_.erase(found);
  return true;
}

bool DeviceMemory::Contains(const void* address, size_t size) const {
  const char* begin = static_cast<const char*>(address);
  return std::any_of(allocations_.begin(), allocations_.end(), [&](const Allocation& a) {
    return begin >= a.address && begin <= a.address + a.size &&
           size <= static_cast<size_t>(a.address + a.size - begin);
  });
}

DeviceMemory::Access::Access() {
  if (access_depth++ == 0 && Get().guarded()) pkey_set(Get().protection_key_, 0);
}

DeviceMemory::Access::~Access() {
  if (--access_depth == 0 && Get().guarded()) pkey_set(Get().protection_key_, PKEY_DISABLE_ACCESS);
}

}  // namespace baton::simt
