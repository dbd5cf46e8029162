#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tests/simt/engine_state.h"
#include "tests/simt/msan.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace baton::simt {

SharedArena::SharedArena() {
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  base_ = static_cast<char*>(memory);
}

void SharedArena::Clear() {
  used_ = bytes_taken_ = 0;
  red_zones_.clear();
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(base_, kBytes);
#endif
}

void* SharedArena::Take(size_t bytes, size_t alignment) {
  const size_t begin = (used_ + kRedZone + alignment - 1) / alignment * alignment;
  const size_t end = begin + bytes;
  if (end + kRedZone > kBytes)
    Fail(Site::current(), "more than %zu bytes of shared memory", kBytes);
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(base_ + begin, bytes);
  std::memset(base_ + begin, 0xff, bytes);
#else
  const size_t fresh = used_ == 0 ? 0 : used_ + kRedZone;  // what lies behind the last red zone
  std::memset(base_ + fresh, 0xff, end + kRedZone - fresh);
#endif
  ForgetMemory(base_ + begin, bytes);
  red_zones_.push_back({begin - kRedZone, begin});
  red_zones_.push_back({end, end + kRedZone});
  used_ = end;
  bytes_taken_ += bytes;
  return base_ + begin;
}

bool SharedArena::RedZonesIntact() const {
#if defined(__SANITIZE_ADDRESS__)
  return true;
#else
  for (const Range& zone : red_zones_) {
    for (size_t i = zone.begin; i < zone.end; ++i) {
      if (base_[i] != static_cast<char>(0xff)) return false;
    }
  }
  return true;
#endif
}

}  // namespace baton::simt
