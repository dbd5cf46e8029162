#pragma once

// The emulated devices' memory: full of 0xFF when fresh, an unmapped page behind every allocation,
// and, where the CPU has protection keys, out of the host's reach outside copies and kernels. So a
// forgotten copy faults, as it does on a device.

#include <array>
#include <cstddef>
#include <mutex>
#include <vector>

namespace baton::simt {

inline constexpr int kMaxDevices = 8;

// Thread-safe.
class DeviceMemory {
 public:
  static DeviceMemory& Get();

  // Null when the host has no memory left. Aligned to 256 bytes; the end is as close to the
  // unmapped page as that allows.
  void* Allocate(size_t size, int device = 0);
  // False when `address` is not the start of an allocation.
  bool Free(void* address);

  // Memory that other processes can map: a memfd, full of 0xFF when fresh. -1: none left. `bytes`
  // is a multiple of a page.
  int CreateShared(size_t bytes);
  // The size of what CreateShared or ShareAllocation gave, here or in another process; 0 for any
  // other descriptor.
  static size_t SharedBytes(int fd);
  // Addresses, and nothing behind them. Null: none left.
  void* Reserve(size_t bytes);
  void Unreserve(void* address, size_t bytes);
  // Puts shared memory behind reserved addresses, and takes it away. Without SetAccess nobody may
  // touch it.
  bool Map(void* address, size_t bytes, int fd, int device = 0);
  bool SetAccess(void* address, size_t bytes);
  bool Unmap(void* address, size_t bytes);
  // Makes an allocation that Allocate gave one that other processes can map; -1: it is none. The
  // descriptor stays the allocation's, `offset` is where it begins in it.
  int ShareAllocation(const void* address, size_t* offset);

  // The allocation or mapping that holds this address, and its device.
  bool Find(const void* address, void** start, size_t* bytes, int* device = nullptr) const;
  // Whether the range lies in one allocation.
  bool Contains(const void* address, size_t size) const;
  // Shared memory that was created here for a device, or given back.
  void Count(int device, ptrdiff_t bytes);
  size_t bytes_in_use() const;  // of all devices
  size_t bytes_in_use(int device) const;
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
    int device = 0;
    bool is_mapping = false;  // by Map
    int fd = -1;              // since ShareAllocation
  };

  DeviceMemory();

  mutable std::mutex mutex_;  // of the next two
  std::vector<Allocation> allocations_;
  std::array<size_t, kMaxDevices> bytes_in_use_{};
  int protection_key_ = -1;
};

}  // namespace baton::simt
