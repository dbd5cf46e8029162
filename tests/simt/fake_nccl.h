#pragma once

// A stand-in for the part of NCCL that engine/base/nccl_library.h declares, over the emulated
// device: two ranks in one process or two, whose bytes go over a Unix socket. It is as unhelpful as
// the real one may be. Nothing advances but by somebody's asking, calls need to be asked after
// several times, and a peer that has died is never noticed.

#include <cstdint>
#include <string>

namespace baton::simt {

// Guarded by RuntimeMutex() where threads use the library meanwhile.
struct FakeNcclConfig {
  // As ncclGetVersion says; 0: the host has no such library. BATON_EMULATED_NCCL=22809 sets it.
  int version = 0;
  std::string missing;  // a function that it has not
  uint64_t seed = 1;    // of how often must be asked
  bool init_never_ends = false;
  int init_result = 0;   // what joining comes to
  bool hold = false;     // no byte moves as long as this is set
  bool fail = false;     // sends and receives end in an asynchronous error
  bool corrupt = false;  // a bit of everything that is received
  int abort_ms = 0;      // how long an abort takes
};
FakeNcclConfig& GetFakeNcclConfig();

struct FakeNcclStats {
  int communicators = 0;  // that live
  int aborted = 0;
  int misuses = 0;  // calls that the real library does not allow
};
FakeNcclStats GetFakeNcclStats();

}  // namespace baton::simt
