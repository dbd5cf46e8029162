#include "engine/ops/cpu/thread_pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>
#include <x86intrin.h>

#include "engine/ops/flush_denormals.h"

namespace baton::ops::cpu {
namespace {

// Longer than the gap between two operations of a step, shorter than a scheduler's time slice:
// about 20 us at 2.5 GHz.
constexpr uint64_t kSpinCycles = 50000;

void FutexWait(std::atomic<uint32_t>* word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nullptr,
          nullptr, 0);
}

void FutexWakeAll(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr,
          nullptr, 0);
}

// True once `value` differs from `old` within the spin limit.
bool SpinWhileEqual(const std::atomic<uint32_t>& value, uint32_t old) {
  const uint64_t start = __rdtsc();
  while (value.load(std::memory_order_acquire) == old) {
    if (__rdtsc() - start > kSpinCycles) return false;
    _mm_pause();
  }
  return true;
}

// A wish: where it fails the thread runs anywhere.
void PinToCpu(int index) {
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0) return;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &usable) || index-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
    return;
  }
}

}  // namespace

int NumUsableCpus() {
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0) return 1;
  return CPU_COUNT(&usable);
}

ThreadPool::ThreadPool(int num_threads, bool pin, std::function<void()> before_join)
    : before_join_(std::move(before_join)) {
  for (int thread = 1; thread < num_threads; ++thread) {
    workers_.emplace_back([this, thread, pin] { WorkerLoop(thread, pin); });
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  epoch_.fetch_add(1);
  FutexWakeAll(&epoch_);
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Run(Job job, const void* context) {
  // No worker is in the last job: it was closed and left.
  job_ = job;
  context_ = context;
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  gate_.store(uint64_t{epoch} << 32, std::memory_order_release);
  // Sequentially consistent: a worker either sees it or is counted in sleepers_.
  epoch_.store(epoch);
  if (sleepers_.load() > 0) FutexWakeAll(&epoch_);
  job(context, 0);
  Close();
}

void ThreadPool::Close() {
  const uint32_t finished = finished_.load(std::memory_order_relaxed);
  const uint64_t gate = gate_.fetch_or(kClosed);
  if ((gate & (kClosed - 1)) == 0) return;
  // finished_ moves exactly once, when the last of them leaves.
  if (SpinWhileEqual(finished_, finished)) return;
  caller_sleeps_.store(
      true);  // sequentially consistent with Leave(): one of the two sees the other
  while (finished_.load() == finished) FutexWait(&finished_, finished);
  caller_sleeps_.store(false);
}

bool ThreadPool::Join(uint32_t epoch) {
  uint64_t gate = gate_.load();
  while (gate >> 32 == epoch && (gate & kClosed) == 0) {
    if (gate_.compare_exchange_weak(gate, gate + 1)) return true;
  }
  return false;
}

void ThreadPool::Leave() {
  const uint64_t gate = gate_.fetch_sub(1) - 1;
  if ((gate & kClosed) == 0 || (gate & (kClosed - 1)) != 0) return;
  finished_.fetch_add(1);
  if (caller_sleeps_.load()) FutexWakeAll(&finished_);
}

uint32_t ThreadPool::WaitForJob(uint32_t seen) {
  if (!SpinWhileEqual(epoch_, seen)) {
    sleepers_.fetch_add(1);
    while (epoch_.load() == seen) FutexWait(&epoch_, seen);
    sleepers_.fetch_sub(1);
  }
  return epoch_.load();
}

void ThreadPool::WorkerLoop(int thread, bool pin) {
  if (pin) PinToCpu(thread);
  const ScopedFlushDenormals flush;
  uint32_t seen = 0;
  while (true) {
    seen = WaitForJob(seen);
    if (stop_.load()) return;
    if (before_join_ != nullptr) before_join_();
    if (!Join(seen)) continue;
    job_(context_, thread);
    Leave();
  }
}

}  // namespace baton::ops::cpu
