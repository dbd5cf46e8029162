#pragma once

// Runs CUDA kernels on the CPU, from their own source, to test them where there is no GPU.
//
// Every CUDA thread of a block is a fiber. It runs until it meets a collective (a barrier, a
// shuffle, an mma), then another takes over; the last to arrive does the exchange for all. Blocks
// run one after another. Kernels include engine/ops/cuda/gpu.h, which under a host compiler leads
// to cuda_names.h and so to here.
//
// What it catches: a barrier or shuffle that part of its threads miss or meet elsewhere (a report,
// not a hang); reading what was never written (shared and device memory start as 0xFF: NaN in f32,
// f16, bf16 and e4m3, -1 as an index); reading an asynchronous copy before its wait; results that
// depend on the schedule (run all three); and, in sanitizer builds, every access out of bounds, to
// a misaligned address, or racing with another (a shuffle orders no memory, as on the device;
// words between devices order what gpu.h says), and every decision on what nobody has written.
// What it does not model: time, occupancy, registers, bank conflicts other than ldmatrix's,
// coalescing, a missing __threadfence, the accumulation order inside a tensor core, approximate
// intrinsics, blocks that wait for a later block of their own launch.
//
// OS threads run launches of their own at the same time: two devices, whose kernels may wait for
// one another (YieldToPeer). A launch from inside a kernel is refused.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tests/simt/translated.h"

namespace baton::simt {

inline constexpr int kWarpThreads = 32;
inline constexpr uint32_t kFullWarp = 0xffffffffu;

// The order in which blocks, warps and lanes take their turns.
enum class Order { kAscending, kDescending, kRandom };
inline constexpr Order kOrders[] = {Order::kAscending, Order::kDescending, Order::kRandom};

struct Config {
  Order order = Order::kAscending;
  uint64_t seed = 1;                  // of kRandom
  size_t shared_limit = 227 * 1024;   // bytes a block may use: sm_90
  uint64_t yield_limit = 10'000'000;  // turns given away by __nanosleep before it is a livelock
};

struct Stats {
  uint64_t launches = 0, blocks = 0, threads = 0, collectives = 0, barriers = 0, mma = 0;
  uint64_t ldmatrix = 0, ldmatrix_conflicts = 0;  // rows of one 8x8 matrix in the same 16-byte bank
  uint64_t async_copies = 0;

  void Add(const Stats& other);
};

// Not to be changed while a launch runs.
Config& GetConfig();
// Of all launches that have ended.
Stats& GetStats();
// How often threads have waited for a kernel on another device, also of launches that run.
uint64_t NumPeerWaits();
// What went wrong in the last launch that failed: one line, then the waiting threads of a deadlock.
const std::string& LastReport();

// The source line of a collective, for reports.
#if defined(__cpp_lib_source_location)
using Site = std::source_location;
#else  // clang 14 with GCC's library
class Site {
 public:
  static constexpr Site current(const char* file = __builtin_FILE(),
                                unsigned line = __builtin_LINE()) {
    Site site;
    site.file_ = file;
    site.line_ = line;
    return site;
  }
  constexpr const char* file_name() const { return file_; }
  constexpr unsigned line() const { return line_; }

 private:
  const char* file_ = "";
  unsigned line_ = 0;
};
#endif

// ---- What the running CUDA thread sees ----------------------------------------------------------

struct ThreadView {
  uint3 thread_index{};
  uint32_t lane = 0;
};
// Set by the scheduler; null outside kernels.
extern constinit thread_local ThreadView* current_thread;
extern constinit thread_local uint3 block_index;
extern constinit thread_local dim3 block_dim, grid_dim;

// Ends the launch with a report. Never returns to the thread.
[[noreturn]] void Fail(const Site& site, const char* format, ...)
    __attribute__((format(printf, 2, 3)));

// Waits until all living lanes of `mask` are here with the same operation, then calls `complete`
// once with everybody's argument (by lane). Argument structs live on the lanes' own stacks.
using Completion = void (*)(void* const* arguments, uint32_t participants, const Site& site);
void WarpCollective(const char* operation,
                    uint32_t mask,
                    void* argument,
                    Completion complete,
                    bool orders_memory,
                    const Site& site);

struct BarrierResult {
  int count = 0;  // threads whose predicate was not 0
  bool all = true;
  bool any = false;
};
BarrierResult BlockBarrier(bool predicate, const Site& site);
// `num_threads` includes those that only arrive; they do not wait.
void NamedBarrier(int id, uint32_t num_threads, bool wait, const Site& site);
// Lets another thread run: what a spinning thread must do.
void Yield(const Site& site);
// The same for a thread that waits for a kernel on another device: the OS thread that runs that
// gets time. A minute of it is a deadlock (BATON_SIMT_PEER_SECONDS: so many seconds).
void YieldToPeer(const Site& site);
// After each look at a word that another device writes. Slow devices stand still here
// (fake_cudart.h), so that the other one may run as far ahead as it is allowed to.
void LookedAtPeer();

// One `__shared__` declaration; the same memory for all threads of a block, poisoned anew in each.
struct SharedDeclaration {
  uint64_t block_number = 0;
  void* address = nullptr;
};
void* SharedMemory(SharedDeclaration* declaration, size_t bytes, size_t alignment);
// The launch's dynamic shared memory, aligned to 1024 bytes.
void* DynamicSharedMemory();
bool IsShared(const void* address);
// Where the running block's shared memory begins: what the 32-bit addresses of PTX count from.
extern constinit thread_local char* shared_window;

// ---- Warp and asynchronous operations (warp_ops.cc) ---------------------------------------------

// Replaces `value` (`bytes` <= 16) by that of lane `source`.
void Shuffle(uint32_t mask, void* value, size_t bytes, int source, const Site& site);
uint32_t Ballot(uint32_t mask, bool predicate, const Site& site);
uint32_t MatchAny(uint32_t mask, uint64_t value, const Site& site);
enum class ReduceOp { kAdd, kMin, kMax, kAnd, kOr, kXor };
uint32_t ReduceU32(uint32_t mask, uint32_t value, ReduceOp op, const Site& site);
int32_t ReduceS32(uint32_t mask, int32_t value, ReduceOp op, const Site& site);

enum class MmaType { kBf16, kF16, kE4m3 };
// d = a * b + c of m16n8k16 (kE4m3: m16n8k32), fragments as in the PTX ISA.
void Mma(MmaType type,
         float (&d)[4],
         const uint32_t (&a)[4],
         const uint32_t (&b)[2],
         const float (&c)[4],
         const Site& site);
// `row`: this lane's 16 bytes, already read by the lane itself.
void LdMatrix(uint32_t (&out)[4],
              const uint32_t (&row)[4],
              const void* address,
              bool transpose,
              const Site& site);
// cp.async: the destination reads as 0xFF until the wait, then holds `valid` bytes and zeros. The
// wrappers in cuda_names.h move the bytes, so that the sanitizers see the kernel do it.
void QueueAsyncCopy(
    void* shared, const void* global, uint32_t bytes, uint32_t valid, const Site& site);
void AsyncCommit();
struct AsyncCopyRequest {
  void* to;
  const void* from;
  uint32_t bytes, valid;
};
// The next copy that a wait with `groups_left` groups still in flight must finish; false: no more.
bool NextAsyncCopy(uint32_t groups_left, AsyncCopyRequest* request);

// ---- Launch -------------------------------------------------------------------------------------

// cudaSuccess when the device would take this launch. More than 48 KiB of dynamic shared memory
// must have been asked for with cudaFuncSetAttribute.
cudaError_t CheckLaunch(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes);
void SetDynamicSharedLimit(const void* kernel, size_t bytes);
// Calls `body(arguments)` on every CUDA thread. Errors: cudaErrorLaunchFailure with a report,
// cudaErrorLaunchTimeout for a deadlock or livelock.
cudaError_t RunGrid(dim3 grid,
                    dim3 block,
                    size_t shared_bytes,
                    void (*body)(const void* arguments),
                    const void* arguments);

// Every CUDA thread gets its own copy of the by-value parameters.
template <typename... P>
class BoundKernel {
 public:
  template <typename... A>
  explicit BoundKernel(void (*kernel)(P...), A&&... args)
      : kernel_(kernel), args_(std::forward<A>(args)...) {}
  cudaError_t Run(dim3 grid, dim3 block, size_t shared_bytes) const {
    if (HasTranslated()) return RunFromPtx(grid, block, shared_bytes);
    const auto body = [](const void* self) {
      const auto* bound = static_cast<const BoundKernel*>(self);
      std::apply(bound->kernel_, bound->args_);
    };
    return RunGrid(grid, block, shared_bytes, body, this);
  }

 private:
  cudaError_t RunFromPtx(dim3 grid, dim3 block, size_t shared_bytes) const {
    ParameterBytes bytes;
    std::apply([&](const auto&... values) { (bytes.Append(values), ...); }, args_);
    return RunTranslated(reinterpret_cast<const void*>(kernel_), grid, block, shared_bytes, bytes);
  }

  void (*kernel_)(P...);
  std::tuple<std::decay_t<P>...> args_;
};

// Puts a launch into a stream of the fake runtime (fake_cudart.cc).
cudaError_t EnqueueLaunch(cudaStream_t stream,
                          const void* kernel,
                          dim3 grid,
                          dim3 block,
                          size_t shared_bytes,
                          cudaError_t (*run)(const void* bound, dim3, dim3, size_t),
                          void (*destroy)(const void* bound),
                          const void* bound);

template <typename... P, typename... A>
cudaError_t Launch(void (*kernel)(P...),
                   dim3 grid,
                   dim3 block,
                   size_t shared_bytes,
                   cudaStream_t stream,
                   A&&... args) {
  using Bound = BoundKernel<P...>;
  const auto run = [](const void* bound, dim3 g, dim3 b, size_t bytes) {
    return static_cast<const Bound*>(bound)->Run(g, b, bytes);
  };
  const auto destroy = [](const void* bound) { delete static_cast<const Bound*>(bound); };
  return EnqueueLaunch(stream, reinterpret_cast<const void*>(kernel), grid, block, shared_bytes,
                       run, destroy, new Bound(kernel, std::forward<A>(args)...));
}

}  // namespace baton::simt
