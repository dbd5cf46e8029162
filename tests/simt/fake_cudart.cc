#include "tests/simt/fake_cudart.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tests/simt/device_memory.h"
#include "tests/simt/msan.h"
#include "tests/simt/simt.h"

// What the runtime's opaque handles point to.
struct CUevent_st {
  int device = 0;
  uint64_t recorded = 0;   // number of the last record issued
  uint64_t completed = 0;  // number of the last record that has run
  std::chrono::steady_clock::time_point completed_at;
};

struct CUstream_st {
  struct Operation {
    std::function<cudaError_t()> run;
    // Waits: may run when this event has completed this record.
    CUevent_st* event = nullptr;
    uint64_t record = 0;
    // Peer work: may be left behind when this has said so.
    std::function<bool()> advance;
  };
  int device = 0;
  std::deque<Operation> queue;
  // Between cudaStreamBeginCapture and cudaStreamEndCapture operations go here instead.
  bool capturing = false, capture_invalid = false;
  std::vector<Operation> captured;
};

struct CUgraph_st {
  std::vector<CUstream_st::Operation> nodes;
};
struct CUgraphExec_st {
  std::vector<CUstream_st::Operation> nodes;
};

namespace baton::simt {
namespace {

RuntimeConfig ConfigFromEnvironment() {
  RuntimeConfig config;
  if (const char* seed = std::getenv("BATON_EMULATED_STREAMS")) {
    config.lazy = true;
    config.seed = std::strtoull(seed, nullptr, 10);
  }
  if (const char* number = std::getenv("BATON_EMULATED_DEVICE"))
    config.device_number = static_cast<uint8_t>(std::atoi(number));
  if (const char* devices = std::getenv("BATON_EMULATED_DEVICES"))
    config.num_devices = std::atoi(devices);
  if (const char* peers = std::getenv("BATON_EMULATED_PEERS"))
    config.peer_access = std::atoi(peers) != 0;
  if (const char* vmm = std::getenv("BATON_EMULATED_VMM")) config.vmm = std::atoi(vmm) != 0;
  return config;
}

// The stream that this thread captures into, by cudaStreamCaptureModeThreadLocal.
thread_local CUstream_st* captures_here = nullptr;
thread_local int current_device = 0;
thread_local bool has_thread_context = false;

// What all devices share.
struct Process {
  RuntimeConfig config = ConfigFromEnvironment();
  RuntimeStats stats;
  std::mutex mutex;  // of the rest
  std::set<void*> pinned;
};

Process& TheProcess() {
  static Process* process = new Process;
  return *process;
}

// One device. Devices run at the same time, each on the OS thread that waits for it; the kernels of
// one may wait for those of another.
class Runtime {
 public:
  const RuntimeConfig& config = TheProcess().config;
  std::recursive_mutex mutex;
  cudaError_t sticky = cudaSuccess;
  cudaError_t last = cudaSuccess;
  std::set<CUstream_st*> streams;
  CUstream_st legacy;   // the stream named by null
  std::set<int> peers;  // whose memory its kernels may read

  cudaError_t Note(cudaError_t error) {
    if (error != cudaSuccess) last = error;
    return error;
  }

  CUstream_st* Find(cudaStream_t stream) { return stream == nullptr ? &legacy : stream; }

  cudaError_t Issue(cudaStream_t stream, CUstream_st::Operation operation) {
    if (sticky != cudaSuccess) return Note(sticky);
    CUstream_st* queue = Find(stream);
    if (queue == &legacy && captures_here != nullptr) return RefuseInCapture();
    if (queue->capturing) {
      // Events would make a graph of several branches.
      if (operation.run == nullptr) return RefuseInCapture();
      queue->captured.push_back(std::move(operation));
      return cudaSuccess;
    }
    queue->queue.push_back(std::move(operation));
    if (!config.lazy && captures_here != nullptr) RefuseInCapture();
    if (!config.lazy && captures_here == nullptr) DrainButPeers(queue);
    return Note(sticky);
  }

  // What a thread that captures must not do ends its capture.
  cudaError_t RefuseInCapture() {
    captures_here->capture_invalid = true;
    return Note(cudaErrorStreamCaptureUnsupported);
  }

  // Advances streams, in a random order, until `stream` is empty.
  cudaError_t Drain(CUstream_st* stream) {
    if (captures_here != nullptr) return RefuseInCapture();
    while (!stream->queue.empty() && sticky == cudaSuccess) {
      if (!AdvanceOne()) {
        sticky = cudaErrorLaunchTimeout;  // waits for an event nobody will record, or for a peer
      }
    }
    return Note(sticky);
  }

  cudaError_t DrainAll() {
    if (captures_here != nullptr) return RefuseInCapture();
    DrainButPeers(&legacy);
    for (CUstream_st* stream : streams) DrainButPeers(stream);
    return Note(sticky);
  }

  // As Drain, up to work that a peer has not done his part of.
  void DrainButPeers(CUstream_st* stream) {
    while (!stream->queue.empty() && sticky == cudaSuccess && !WaitsForPeer(*stream)) {
      if (!AdvanceOne()) sticky = cudaErrorLaunchTimeout;
    }
  }

  // Until record `record` of `event` has run.
  cudaError_t DrainTo(CUevent_st* event, uint64_t record) {
    if (captures_here != nullptr) return RefuseInCapture();
    while (event->completed < record && sticky == cudaSuccess) {
      if (!AdvanceOne()) sticky = cudaErrorLaunchTimeout;
    }
    return Note(sticky);
  }

  cudaError_t Query(CUstream_st* stream) {
    if (!stream->queue.empty() && sticky == cudaSuccess) AdvanceOne();
    if (sticky != cudaSuccess) return Note(sticky);
    return stream->queue.empty() ? cudaSuccess : cudaErrorNotReady;
  }

  cudaError_t Query(CUevent_st* event) {
    if (event->completed < event->recorded && sticky == cudaSuccess) AdvanceOne();
    if (sticky != cudaSuccess) return Note(sticky);
    return event->completed >= event->recorded ? cudaSuccess : cudaErrorNotReady;
  }

 private:
  static bool Runnable(const CUstream_st& stream) {
    if (stream.queue.empty()) return false;
    const CUstream_st::Operation& front = stream.queue.front();
    if (front.advance) {
      const DeviceMemory::Access access;
      return front.advance();
    }
    return front.event == nullptr || front.event->completed >= front.record;
  }

  // Its next operation is peer work that is not done.
  static bool WaitsForPeer(const CUstream_st& stream) {
    return stream.queue.front().advance && !Runnable(stream);
  }

  bool AdvanceOne() {
    std::vector<CUstream_st*> runnable;
    if (Runnable(legacy)) runnable.push_back(&legacy);
    for (CUstream_st* stream : streams) {
      if (Runnable(*stream)) runnable.push_back(stream);
    }
    if (runnable.empty()) return false;
    random_ = random_ * 6364136223846793005ull + config.seed * 2 + 1;
    CUstream_st* chosen = runnable[(random_ >> 33) % runnable.size()];
    CUstream_st::Operation operation = std::move(chosen->queue.front());
    chosen->queue.pop_front();
    if (operation.run) {
      const DeviceMemory::Access access;
      const cudaError_t error = operation.run();
      if (error != cudaSuccess) sticky = error;
    }
    return true;
  }

  uint64_t random_ = 1;
};

Runtime& RuntimeOf(int device) {
  static Runtime* runtimes = [] {
    auto* all = new Runtime[kMaxDevices];
    for (int i = 0; i < kMaxDevices; ++i) all[i].legacy.device = i;
    return all;
  }();
  return runtimes[device];
}

// The device of this thread, or of a stream or an event.
struct Locked {
  Locked() : Locked(current_device) {}
  explicit Locked(cudaStream_t stream)
      : Locked(stream != nullptr ? stream->device : current_device) {}
  explicit Locked(int device) : runtime(RuntimeOf(device)) {}

  Runtime& runtime;
  std::lock_guard<std::recursive_mutex> lock{runtime.mutex};
};

// A pinned block keeps its size in front of itself.
constexpr size_t kPinnedHeader = 256;

bool IsPinned(const void* address) {
  Process& process = TheProcess();
  const std::lock_guard<std::mutex> lock(process.mutex);
  const auto after = process.pinned.upper_bound(const_cast<void*>(address));
  if (after == process.pinned.begin()) return false;
  const char* start = static_cast<const char*>(*std::prev(after));
  size_t size;
  std::memcpy(&size, start - kPinnedHeader, sizeof(size));
  return static_cast<const char*>(address) < start + size;
}

bool KindMatches(const void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  if (size == 0 || kind == cudaMemcpyDefault) return true;
  const DeviceMemory& memory = DeviceMemory::Get();
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  return memory.Contains(to, size) == to_device && memory.Contains(from, size) == from_device;
}

void StandStillIfSlow(std::chrono::milliseconds time) {
  if (current_device == TheProcess().config.slow_device) std::this_thread::sleep_for(time);
}

void CountCopy(cudaMemcpyKind kind, size_t size) {
  const std::lock_guard<std::mutex> lock(TheProcess().mutex);
  RuntimeStats& stats = TheProcess().stats;
  stats.copies_to_device += kind == cudaMemcpyHostToDevice ? 1 : 0;
  stats.copies_to_host += kind == cudaMemcpyDeviceToHost ? 1 : 0;
  stats.bytes_to_host += kind == cudaMemcpyDeviceToHost ? size : 0;
}

}  // namespace

RuntimeConfig& GetRuntimeConfig() { return TheProcess().config; }
RuntimeStats& GetRuntimeStats() { return TheProcess().stats; }

void ClearDeviceError() {
  for (int device = 0; device < kMaxDevices; ++device) {
    Locked l(device);
    l.runtime.sticky = l.runtime.last = cudaSuccess;
    l.runtime.legacy.queue.clear();
    for (CUstream_st* stream : l.runtime.streams) stream->queue.clear();
  }
}

cudaError_t QueryStream(cudaStream_t stream) {
  Locked l(stream);
  return l.runtime.Query(l.runtime.Find(stream));
}

std::recursive_mutex& RuntimeMutex() { return RuntimeOf(current_device).mutex; }

bool IsDevice(int device) {
  return device >= 0 && device < std::min(GetRuntimeConfig().num_devices, kMaxDevices);
}

bool IsPeer(int device, int peer) {
  Locked l(device);
  return l.runtime.peers.contains(peer);
}

void SetThreadContext(int device) {
  has_thread_context = device >= 0;
  if (has_thread_context) current_device = device;
}
bool HasThreadContext() { return has_thread_context; }
int CurrentDevice() { return current_device; }

cudaError_t EnqueueHostWork(cudaStream_t stream, std::function<cudaError_t()> work) {
  Locked l(stream);
  return l.runtime.Issue(stream, {.run = std::move(work)});
}

cudaError_t EnqueuePeerWork(cudaStream_t stream, std::function<bool()> advance) {
  Locked l;
  return l.runtime.Issue(stream,
                         {.run = [] { return cudaSuccess; }, .advance = std::move(advance)});
}

void LookedAtPeer() { StandStillIfSlow(std::chrono::milliseconds(1)); }

cudaError_t EnqueueLaunch(cudaStream_t stream,
                          const void* kernel,
                          dim3 grid,
                          dim3 block,
                          size_t shared_bytes,
                          cudaError_t (*run)(const void* bound, dim3, dim3, size_t),
                          void (*destroy)(const void* bound),
                          const void* bound) {
  const std::shared_ptr<const void> owner(bound, destroy);
  Locked l(stream);
  if (stream != nullptr && stream->device != current_device)
    return l.runtime.Note(cudaErrorInvalidResourceHandle);
  if (current_device == l.runtime.config.failing_device)
    return l.runtime.Note(cudaErrorLaunchOutOfResources);
  const cudaError_t valid = CheckLaunch(kernel, grid, block, shared_bytes);
  if (valid != cudaSuccess) return l.runtime.Note(valid);
  return l.runtime.Issue(stream,
                         {.run = [=] { return run(owner.get(), grid, block, shared_bytes); }});
}

}  // namespace baton::simt

using baton::simt::CountCopy;
using baton::simt::current_device;
using baton::simt::DeviceMemory;
using baton::simt::IsPinned;
using baton::simt::KindMatches;
using baton::simt::KnowMemory;
using baton::simt::kPinnedHeader;
using baton::simt::Locked;
using baton::simt::StandStillIfSlow;
using baton::simt::TheProcess;

extern "C" {

// ---- Memory
// ---------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** address, size_t size) {
  Locked l;
  if (baton::simt::captures_here != nullptr) return l.runtime.RefuseInCapture();
  DeviceMemory& memory = DeviceMemory::Get();
  const uint64_t left = l.runtime.config.total_bytes - memory.bytes_in_use(current_device);
  *address = size <= left ? memory.Allocate(size, current_device) : nullptr;
  return *address != nullptr ? cudaSuccess : l.runtime.Note(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void* address) {
  Locked l;
  // (It waits for the device.)
  if (l.runtime.DrainAll() == cudaErrorStreamCaptureUnsupported) return l.runtime.last;
  if (address == nullptr || DeviceMemory::Get().Free(address)) return cudaSuccess;
  return l.runtime.Note(cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Locked l;
  *total = l.runtime.config.total_bytes;
  *free = *total - DeviceMemory::Get().bytes_in_use(current_device);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** address, size_t size) {
  Locked l;
  if (baton::simt::captures_here != nullptr) return l.runtime.RefuseInCapture();
  const size_t rounded = (size + 2 * kPinnedHeader - 1) / kPinnedHeader * kPinnedHeader;
  char* memory = static_cast<char*>(std::aligned_alloc(kPinnedHeader, rounded));
  if (memory == nullptr) return l.runtime.Note(cudaErrorMemoryAllocation);
  std::memcpy(memory, &size, sizeof(size));
  std::memset(memory + kPinnedHeader, 0xff, rounded - kPinnedHeader);
  *address = memory + kPinnedHeader;
  const std::lock_guard<std::mutex> lock(TheProcess().mutex);
  TheProcess().pinned.insert(*address);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* address) {
  Locked l;
  if (address == nullptr) return cudaSuccess;
  l.runtime.DrainAll();
  {
    const std::lock_guard<std::mutex> lock(TheProcess().mutex);
    if (TheProcess().pinned.erase(address) == 0) return l.runtime.Note(cudaErrorInvalidValue);
  }
  std::free(static_cast<char*>(address) - kPinnedHeader);
  return cudaSuccess;
}

// As the driver does: pageable host memory is read when the call is made and written before it
// returns; pinned memory whenever the stream gets there.
cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  Locked l(stream);
  if (!KindMatches(to, from, size, kind)) return l.runtime.Note(cudaErrorInvalidValue);
  CountCopy(kind, size);
  const void* host = kind == cudaMemcpyHostToDevice   ? from
                     : kind == cudaMemcpyDeviceToHost ? to
                                                      : nullptr;
  if (host != nullptr && l.runtime.Find(stream)->capturing && !IsPinned(host))
    return l.runtime.RefuseInCapture();
  if (kind == cudaMemcpyHostToDevice && !IsPinned(from)) {
    const char* bytes = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(bytes, bytes + size);
    return l.runtime.Issue(stream, {.run = [=] {
                             std::memcpy(to, staged->data(), staged->size());
                             KnowMemory(to, staged->size());
                             return cudaSuccess;
                           }});
  }
  const cudaError_t issued = l.runtime.Issue(stream, {.run = [=] {
                                               std::memcpy(to, from, size);
                                               if (host != nullptr) KnowMemory(to, size);
                                               return cudaSuccess;
                                             }});
  if (issued != cudaSuccess) return issued;
  if (kind == cudaMemcpyDeviceToHost && !IsPinned(to))
    return l.runtime.Drain(l.runtime.Find(stream));
  return cudaSuccess;
}

// Rows of `width` bytes, `to_pitch` and `from_pitch` apart.
cudaError_t cudaMemcpy2DAsync(void* to,
                              size_t to_pitch,
                              const void* from,
                              size_t from_pitch,
                              size_t width,
                              size_t height,
                              cudaMemcpyKind kind,
                              cudaStream_t stream) {
  for (size_t row = 0; row < height; ++row) {
    const cudaError_t error =
        cudaMemcpyAsync(static_cast<char*>(to) + row * to_pitch,
                        static_cast<const char*>(from) + row * from_pitch, width, kind, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  Locked l;
  const cudaError_t issued = cudaMemcpyAsync(to, from, size, kind, nullptr);
  return issued != cudaSuccess ? issued : l.runtime.Drain(&l.runtime.legacy);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  Locked l(stream);
  if (!DeviceMemory::Get().Contains(to, size)) return l.runtime.Note(cudaErrorInvalidValue);
  return l.runtime.Issue(stream, {.run = [=] {
                           StandStillIfSlow(std::chrono::milliseconds(20));
                           std::memset(to, value, size);
                           return cudaSuccess;
                         }});
}

cudaError_t cudaMemset(void* to, int value, size_t size) {
  return cudaMemsetAsync(to, value, size, nullptr);
}

// ---- Streams and events
// ---------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  Locked l;
  *stream = new CUstream_st{.device = current_device};
  l.runtime.streams.insert(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Locked l(stream);
  l.runtime.Drain(stream);
  l.runtime.streams.erase(stream);
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Locked l(stream);
  ++baton::simt::GetRuntimeStats().waits;
  return l.runtime.Drain(l.runtime.Find(stream));
}

cudaError_t cudaDeviceSynchronize() {
  Locked l;
  return l.runtime.DrainAll();
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st{.device = current_device};
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Locked l(event->device);
  l.runtime.DrainTo(event, event->recorded);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Locked l(stream);
  if (l.runtime.Find(stream)->capturing) return l.runtime.RefuseInCapture();
  if (event->device != l.runtime.Find(stream)->device)
    return l.runtime.Note(cudaErrorInvalidResourceHandle);
  const uint64_t record = ++event->recorded;
  return l.runtime.Issue(stream, {.run = [=] {
                           event->completed = record;
                           event->completed_at = std::chrono::steady_clock::now();
                           return cudaSuccess;
                         }});
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Locked l(stream);
  return l.runtime.Issue(stream, {.run = nullptr, .event = event, .record = event->recorded});
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  Locked l(event->device);
  return l.runtime.Query(event);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Locked l(event->device);
  ++baton::simt::GetRuntimeStats().waits;
  return l.runtime.DrainTo(event, event->recorded);
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  Locked l(start->device);
  for (cudaEvent_t event : {start, end}) {
    if (event->recorded == 0) return l.runtime.Note(cudaErrorInvalidResourceHandle);
    if (event->completed != event->recorded) return cudaErrorNotReady;
  }
  *ms = std::chrono::duration<float, std::milli>(end->completed_at - start->completed_at).count();
  return cudaSuccess;
}

// ---- Graphs: of one stream, and so a row of operations
// ----------------------------------------------------------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Locked l(stream);
  if (!l.runtime.config.graphs || stream == nullptr || mode != cudaStreamCaptureModeThreadLocal)
    return l.runtime.Note(cudaErrorStreamCaptureUnsupported);
  if (stream->capturing || baton::simt::captures_here != nullptr)
    return l.runtime.Note(cudaErrorIllegalState);
  stream->capturing = true;
  stream->capture_invalid = false;
  baton::simt::captures_here = stream;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Locked l(stream);
  *graph = nullptr;
  if (stream == nullptr || !stream->capturing) return l.runtime.Note(cudaErrorIllegalState);
  if (baton::simt::captures_here != stream)
    return l.runtime.Note(cudaErrorStreamCaptureWrongThread);
  baton::simt::captures_here = nullptr;
  stream->capturing = false;
  std::vector<CUstream_st::Operation> nodes = std::exchange(stream->captured, {});
  if (stream->capture_invalid) return l.runtime.Note(cudaErrorStreamCaptureInvalidated);
  *graph = new CUgraph_st{std::move(nodes)};
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraphExec_st{graph->nodes};
  return cudaSuccess;
}

// One node after another, so that other streams get in between.
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  Locked l(stream);
  {
    const std::lock_guard<std::mutex> lock(TheProcess().mutex);
    ++TheProcess().stats.graph_launches;
  }
  for (const CUstream_st::Operation& node : exec->nodes) {
    const cudaError_t error = l.runtime.Issue(stream, node);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}

// ---- Device, errors, functions
// --------------------------------------------------------------------
// (A device is locked while its kernels run, and they may wait for the very thread that calls: what
// only asks or chooses does without the lock.)

cudaError_t cudaGetDeviceCount(int* count) {
  *count = std::min(TheProcess().config.num_devices, baton::simt::kMaxDevices);
  return *count > 0 ? cudaSuccess : Locked().runtime.Note(cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) {
  if (!baton::simt::IsDevice(device)) return Locked().runtime.Note(cudaErrorInvalidDevice);
  baton::simt::SetThreadContext(device);
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (!baton::simt::IsDevice(device) || !baton::simt::IsDevice(peer))
    return Locked().runtime.Note(cudaErrorInvalidDevice);
  *can = device != peer && TheProcess().config.peer_access;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  Locked l;
  if (!baton::simt::IsDevice(peer) || peer == current_device)
    return l.runtime.Note(cudaErrorInvalidDevice);
  if (!l.runtime.config.peer_access) return l.runtime.Note(cudaErrorPeerAccessUnsupported);
  return l.runtime.peers.insert(peer).second ? cudaSuccess
                                             : l.runtime.Note(cudaErrorPeerAccessAlreadyEnabled);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof(*properties));
  std::strcpy(properties->name, "emulated");
  properties->major = 9;
  properties->multiProcessorCount = 4;
  properties->totalGlobalMem = TheProcess().config.total_bytes;
  properties->sharedMemPerBlockOptin = baton::simt::GetConfig().shared_limit;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  std::snprintf(id, static_cast<size_t>(size), "0000:e%x:00.0", device);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  Locked l;
  const cudaError_t error = std::exchange(l.runtime.last, cudaSuccess);
  return error != cudaSuccess ? error : l.runtime.sticky;
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : baton::simt::LastReport().c_str();
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  Locked l;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || static_cast<size_t>(value) > baton::simt::GetConfig().shared_limit)
    return l.runtime.Note(cudaErrorInvalidValue);
  baton::simt::SetDynamicSharedLimit(kernel, static_cast<size_t>(value));
  return cudaSuccess;
}

}  // extern "C"
