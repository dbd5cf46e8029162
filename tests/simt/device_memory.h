#pragma once

// The emulated device's memory: full of 0xFF when fresh, an unmapped page behind every allocation,
// and, where the CPU has protection keys, out of the host's reach outside copies and kernels. So a
// forgotten copy faults, as it does on a device.

#include <cstddef>
#include <vector>

namespace baton::simt {

// Thread-compatible: the fake runtime holds its lock.
class DeviceMemory {
 public:
  static DeviceMemory& Get();

  // Null when the host has no memory left. Aligned to 256 bytes; the end is as close to the
  // unmapped page as that allows.
  void* Allocate(size_t size);
  // False when `address` is not the start of an allocation.
  bool Free(void* address);
  // Whether the range lies in one allocation.
  bool Contains(const void* address, size_t size) const;
  size_t bytes_in_use() const { return bytes_in_use_; }
  // Whether the host is really kept out.
  bool guarded() const { return protection_key_ > 0; }

  // While one lives, this OS thread may touch device memory.
  class Access {
   public:
    Access();
    ~Access();
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;
  };

 private:
  struct Allocation {
    char* address;
    size_t size;
    char* mapping;
    size_t mapped;
  };

  DeviceMemory();

  std::vector<Allocation> allocations_;
  size_t bytes_in_use_ = 0;
  int protection_key_ = -1;
};

}  // namespace baton::simt
