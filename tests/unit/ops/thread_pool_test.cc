#include "engine/ops/cpu/thread_pool.h"

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
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

// A worker whose core is taken by another process, or that has not woken up yet, costs the caller
// its help and nothing else.
TEST(ThreadPool, CallerDoesTheWorkOfWorkersThatHaveNotBegun) {
  absl::Notification release;
  ThreadPool pool(3, false, [&] { release.WaitForNotification(); });
  for (int job = 0; job < 3; ++job) {
    std::vector<int> done_by(10, -1);
    pool.ParallelFor(10, 1, [&](int begin, int, int thread) { done_by[begin] = thread; });
    EXPECT_THAT(done_by, testing::Each(0));
  }
  release.Notify();
}

// Workers that join late, just as the caller closes the job, either take part in it whole or not at
// all.
TEST(ThreadPool, LateWorkersNeverTouchAClosedJob) {
  ThreadPool pool(4, false, [] { std::this_thread::yield(); });
  for (int job = 0; job < 20000; ++job) {
    std::atomic<int> sum{0};  // gone when the job is over
    pool.ParallelFor(5, 1, [&](int begin, int end, int) { sum.fetch_add(end - begin); });
    ASSERT_EQ(sum.load(), 5);
  }
}

TEST(ThreadPool, StopsWhileWorkersSleep) {
  for (int i = 0; i < 20; ++i) ThreadPool pool(3, false);
}

}  // namespace
}  // namespace baton::ops::cpu
