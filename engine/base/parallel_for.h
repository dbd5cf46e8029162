#pragma once

// Splits a loop over the cores. For loading, where threads may be made; never in a step.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace baton::base {

// Calls body(i) once for every i in [0, count), from several threads, and returns when all are
// done. `body` must be safe to call at the same time for different i.
inline void ParallelFor(int64_t count, const std::function<void(int64_t)>& body) {
  const int64_t num_threads = std::min<int64_t>(count, std::thread::hardware_concurrency());
  if (num_threads <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) body(i);
  };
  std::vector<std::thread> threads;
  for (int64_t t = 1; t < num_threads; ++t) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace baton::base
