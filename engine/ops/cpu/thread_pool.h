#pragma once

// Worker threads of the CPU backend: fork and join around each operation.

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace baton::ops::cpu {

// Runs one function on all threads at once, the caller's among them. Waiting is a short, bounded
// spin, then a futex, so that many processes may share few cores. The caller never waits for a
// worker that has not begun: what a worker does not take (its core is busy with another process, or
// it is still waking up), the caller does itself. Engine thread only (one caller at a time).
class ThreadPool {
 public:
  // `num_threads` counts the caller.
  // `pin`: worker i stays on the i-th CPU that the process may use; the caller is not moved.
  // `before_join`: for tests, a worker calls it each time before it takes part in a job.
  ThreadPool(int num_threads, bool pin, std::function<void()> before_join = nullptr);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // f(begin, end, thread) over pieces of at most `grain` of [0, count), taken by whichever thread
  // is free.
  template <typename F>
  void ParallelFor(int count, int grain, const F& f) {
    if (count <= grain || workers_.empty()) {
      if (count > 0) f(0, count, 0);
      return;
    }
    next_.store(0, std::memory_order_relaxed);
    const auto body = [&](int thread) {
      while (true) {
        const int begin = next_.fetch_add(grain, std::memory_order_relaxed);
        if (begin >= count) return;
        f(begin, count - begin < grain ? count : begin + grain, thread);
      }
    };
    using Body = decltype(body);
    Run([](const void* context, int thread) { (*static_cast<const Body*>(context))(thread); },
        &body);
  }

 private:
  using Job = void (*)(const void* context, int thread);

  // `job` returns when nothing is left to take.
  void Run(Job job, const void* context);
  // Ends the job for workers that have not joined it, and waits for those that have.
  void Close();
  void WorkerLoop(int thread, bool pin);
  // Returns the number of the next job, after waiting for it.
  uint32_t WaitForJob(uint32_t seen);
  // Counts this thread in, unless job number `epoch` is closed.
  bool Join(uint32_t epoch);
  void Leave();

  const std::function<void()> before_join_;
  std::vector<std::thread> workers_;
  Job job_ = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> epoch_{0};  // counts jobs; workers wait for it to move
  std::atomic<uint32_t> sleepers_{0};           // workers in the futex
  std::atomic<bool> stop_{false};
  // Number of the job (high half); kClosed; workers in it.
  static constexpr uint64_t kClosed = uint64_t{1} << 31;
  alignas(64) std::atomic<uint64_t> gate_{kClosed};
  std::atomic<uint32_t> finished_{0};  // moves when the last worker leaves a closed job
  std::atomic<bool> caller_sleeps_{false};
  alignas(64) std::atomic<int> next_{0};
};

// CPUs that this process may run on.
int NumUsableCpus();

}  // namespace baton::ops::cpu
