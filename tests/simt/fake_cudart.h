#pragma once

// A stand-in for libcudart, linked instead of it: device memory of device_memory.h, kernels run by
// the engine. Streams are queues. Lazy ones do nothing until somebody must wait for them, and then
// take turns in a random order, so that a forgotten synchronisation shows. An error of a kernel
// sticks, as on the device.

#include <cstdint>

namespace baton::simt {

struct RuntimeConfig {
  bool lazy = false;  // else every operation runs when it is issued
  uint64_t seed = 1;  // of the order in which lazy streams advance
  int num_devices = 1;
  uint64_t total_bytes = uint64_t{8} << 30;
};
RuntimeConfig& GetRuntimeConfig();

// Forgets a sticky error; for tests of faulty kernels.
void ClearDeviceError();

}  // namespace baton::simt
