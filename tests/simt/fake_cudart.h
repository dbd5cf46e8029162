#pragma once

// A stand-in for libcudart, linked instead of it: device memory of device_memory.h, kernels run by
// the engine. Streams are queues. Lazy ones do nothing until somebody must wait for them, and then
// take turns in a random order, so that a forgotten synchronisation shows. A graph keeps its
// operations as they were captured and goes into a stream operation by operation. What must not be
// done while a thread captures (a wait, an allocation, pageable memory) is refused and ends the
// capture. An error of a kernel sticks, as on the device.

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <mutex>

#include "tests/simt/device_memory.h"

namespace baton::simt {

// A program's first values of `lazy` and `seed` come from the environment:
// BATON_EMULATED_STREAMS=SEED makes streams lazy, BATON_EMULATED_DEVICES=N says how many devices
// there are, BATON_EMULATED_PEERS=0 that they do not reach each other.
struct RuntimeConfig {
  bool lazy = false;    // else every operation runs when it is issued
  uint64_t seed = 1;    // of the order in which lazy streams advance
  int num_devices = 1;  // at most kMaxDevices
  uint64_t total_bytes = uint64_t{8} << 30;
  int failing_device = -1;  // refuses every launch
  int slow_device = -1;     // stands still after each look at a word of a peer's, and in a memset
  bool graphs = true;       // else streams cannot be captured
  // Of the first device; the next ones count on. BATON_EMULATED_DEVICE sets it.
  uint8_t device_number = 0;
  bool peer_access = true;  // between devices
  // Memory that file descriptors name; BATON_EMULATED_VMM=0: legacy handles only.
  bool vmm = true;
};
RuntimeConfig& GetRuntimeConfig();

struct RuntimeStats {
  uint64_t graph_launches = 0;
  uint64_t copies_to_device = 0, copies_to_host = 0;  // issued
  uint64_t bytes_to_host = 0;
  uint64_t waits = 0;  // of the host for streams and events
};
RuntimeStats& GetRuntimeStats();

// Puts work that is no kernel of ours into a stream: a library's. It may touch device memory.
cudaError_t EnqueueHostWork(cudaStream_t stream, std::function<cudaError_t()> work);

// ... that goes on as long as somebody outside of this device does his part. `advance` is asked
// again and again once the stream has come to it: true, it has ended (and it goes on saying so).
// Waiting for such a stream is an error (cudaErrorLaunchTimeout), as it may never end; waiting for
// the device leaves it out.
cudaError_t EnqueuePeerWork(cudaStream_t stream, std::function<bool()> advance);

// Runs one operation, of any stream, if `stream` is not idle; then whether it is: cudaSuccess, or
// cudaErrorNotReady. So who only asks again and again sees it end.
cudaError_t QueryStream(cudaStream_t stream);

// What the fake runtime and the fake driver hold while they use this thread's device.
std::recursive_mutex& RuntimeMutex();

bool IsDevice(int device);
// Whether kernels of `device` may read memory of `peer`. (They could anyway: all is the host's.)
bool IsPeer(int device, int peer);

// Which device this thread has chosen, as most calls of the driver want it; -1: none. The runtime
// takes the last one then, or the first.
void SetThreadContext(int device);
bool HasThreadContext();
int CurrentDevice();

// Forgets a sticky error; for tests of faulty kernels.
void ClearDeviceError();

}  // namespace baton::simt
