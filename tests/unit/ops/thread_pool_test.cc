#include "engine/ops/cpu/thread_pool.h"

#include <atomic>
#include <memory>
#include <vector>

#include "gtest/gtest.h"

namespace baton::ops::cpu {
namespace {

TEST(ThreadPool, EveryPieceRunsExactlyOnce) {
  for (const int num_threads : {1, 2, 5}) {
    ThreadPool pool(num_threads, false);
    for (const int count : {0, 1, 7, 100}) {
      std::vector<std::atomic<int>> runs(count);
      pool.ParallelFor(count, 3, [&](int begin, int end, int thread) {
        ASSERT_LE(end - begin, num_threads == 1 ? count : 3);
        ASSERT_LT(thread, num_threads);
        for (int i = begin; i < end; ++i) runs[i].fetch_add(1);
      });
      for (const std::atomic<int>& n : runs) EXPECT_EQ(n.load(), 1);
    }
  }
}

// Many more threads than cores, many short jobs: waits must end in the futex, not spin for ever.
TEST(ThreadPool, ManyPoolsShareFewCores) {
  std::vector<std::unique_ptr<ThreadPool>> pools;
  for (int i = 0; i < 8; ++i) pools.push_back(std::make_unique<ThreadPool>(4, i % 2 == 0));
  std::atomic<int> sum{0};
  for (int round = 0; round < 50; ++round) {
    for (const auto& pool : pools)
      pool->ParallelFor(8, 1, [&](int begin, int end, int) { sum.fetch_add(end - begin); });
  }
  EXPECT_EQ(sum.load(), 50 * 8 * 8);
}

TEST(ThreadPool, StopsWhileWorkersSleep) {
  for (int i = 0; i < 20; ++i) ThreadPool pool(3, false);
}

}  // namespace
}  // namespace baton::ops::cpu
