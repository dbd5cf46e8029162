#include "engine/ops/cpu/thread_pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
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

ThreadPool::ThreadPool(int num_threads, bool pin) {
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

bool ThreadPool::SpinWhileEqual(const std::atomic<uint32_t>& value, uint32_t old) {
  const uint64_t start = __rdtsc();
  while (value.load(std::memory_order_acquire) == old) {
    if (__rdtsc() - start > kSpinCycles) return false;
    _mm_pause();
  }
  return true;
}

void ThreadPool::Run(Job job, const void* context) {
  job_ = job;
  context_ = context;
  remaining_.store(static_cast<uint32_t>(workers_.size()), std::memory_order_relaxed);
  epoch_.fetch_add(
      1);  // sequentially consistent: a worker either sees it or is counted in sleepers_
  if (sleepers_.load() > 0) FutexWakeAll(&epoch_);
  job(context, 0);
  uint32_t left = remaining_.load(std::memory_order_acquire);
  while (left != 0 && SpinWhileEqual(remaining_, left))
    left = remaining_.load(std::memory_order_acquire);
  if (left == 0) return;
  caller_sleeps_.store(true);
  while ((left = remaining_.load()) != 0) FutexWait(&remaining_, left);
  caller_sleeps_.store(false);
}

void ThreadPool::WorkerLoop(int thread, bool pin) {
  if (pin) PinToCpu(thread);
  const ScopedFlushDenormals flush;
  uint32_t seen = 0;
  while (true) {
    if (!SpinWhileEqual(epoch_, seen)) {
      sleepers_.fetch_add(1);
      while (epoch_.load() == seen) FutexWait(&epoch_, seen);
      sleepers_.fetch_sub(1);
    }
    seen = epoch_.load();
    if (stop_.load()) return;
    job_(context_, thread);
    if (remaining_.fetch_sub(1) == 1 && caller_sleeps_.load()) FutexWakeAll(&remaining_);
  }
}

}  // namespace baton::ops::cpu
