#pragma once

// What the engine and the warp operations share: a CUDA thread, and a block's shared memory.

#include <cstdint>
#include <vector>

#include "tests/simt/fiber.h"
#include "tests/simt/simt.h"

namespace baton::simt {

inline constexpr int kNamedBarriers = 16;

enum class ThreadState : uint8_t { kReady, kInWarp, kAtBlockBarrier, kAtNamedBarrier, kDone };

// Asynchronous copies that have been issued and not waited for.
struct AsyncCopies {
  struct Copy {
    void* to;
    const void* from;
    uint32_t bytes, valid, group;
  };
  std::vector<Copy> pending;
  size_t first = 0;
  uint32_t group = 0;

  void Clear() {
    pending.clear();
    first = 0;
    group = 0;
  }
};

struct Thread : ThreadView {
  Fiber fiber;
  uint32_t linear = 0, warp = 0;
  ThreadState state = ThreadState::kDone;
  // The collective it is in.
  const char* operation = "";
  uint32_t mask = 0;
  int barrier = 0;
  void* argument = nullptr;
  Completion complete = nullptr;
  Site site;
  AsyncCopies copies;
};

// The running thread.
Thread* Self();
// Of the launch that runs here.
Stats& RunningStats();

// Shared memory of one block: arrays with red zones around them, poisoned anew for every block.
class SharedArena {
 public:
  SharedArena();
  void Clear();
  // Fresh memory full of 0xFF. Ends the launch when the arena is full.
  void* Take(size_t bytes, size_t alignment);
  char* base() const { return base_; }
  size_t bytes_taken() const { return bytes_taken_; }
  bool Contains(const void* address) const { return address >= base_ && address < base_ + kBytes; }
  // Nothing was written between the arrays. (Under the address sanitizer the write itself faults.)
  bool RedZonesIntact() const;

 private:
  static constexpr size_t kBytes = 512 * 1024;
  static constexpr size_t kRedZone = 64;
  struct Range {
    size_t begin, end;
  };

  char* base_;
  size_t used_ = 0, bytes_taken_ = 0;
  std::vector<Range> red_zones_;
};

}  // namespace baton::simt
