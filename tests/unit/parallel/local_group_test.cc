#include "engine/parallel/local_group.h"

#include <cstring>
#include <vector>

#include "engine/parallel/rank_threads.h"
#include "gtest/gtest.h"

namespace baton::parallel {
namespace {

TEST(LocalGroupTest, SumsInTheOrderOfRanksOnEveryRank) {
  constexpr int kRanks = 3;
  LocalGroup group(kRanks);
  RankThreads threads(kRanks);
  // In floats (1e8 + -1e8) + 1 is 1, every other order is 0.
  const std::vector<float> parts[kRanks] = {{1e8f, 1.0f}, {-1e8f, 2.0f}, {1.0f, 4.0f}};
  std::vector<float> sums[kRanks];
  threads.Run([&](int rank) {
    sums[rank].resize(2);
    EXPECT_TRUE(group.end(rank).AllReduceSum(parts[rank].data(), sums[rank].data(), 2).ok());
  });
  for (const std::vector<float>& sum : sums) EXPECT_EQ(sum, (std::vector<float>{1.0f, 7.0f}));
}

TEST(LocalGroupTest, GathersByRank) {
  LocalGroup group(2);
  RankThreads threads(2);
  const std::vector<uint32_t> parts[2] = {{1, 2, 3}, {4, 5, 6}};
  std::vector<uint32_t> all[2];
  threads.Run([&](int rank) {
    all[rank].resize(6);
    EXPECT_TRUE(group.end(rank).AllGather(parts[rank].data(), all[rank].data(), 3).ok());
  });
  for (const auto& got : all) EXPECT_EQ(got, (std::vector<uint32_t>{1, 2, 3, 4, 5, 6}));
}

// Each rank writes its buffer again as soon as a call has returned: had another rank still been
// reading it, its sum would be wrong (and the thread sanitizer would say so).
TEST(LocalGroupTest, BuffersAreFreeWhenACallReturns) {
  constexpr int kRounds = 2000;
  LocalGroup group(2);
  RankThreads threads(2);
  int wrong[2] = {0, 0};
  threads.Run([&](int rank) {
    float part[4], sum[4];
    for (int round = 0; round < kRounds; ++round) {
      for (int i = 0; i < 4; ++i) part[i] = static_cast<float>(round * (rank + 1) + i);
      ASSERT_TRUE(group.end(rank).AllReduceSum(part, sum, 4).ok());
      for (int i = 0; i < 4; ++i) wrong[rank] += sum[i] != static_cast<float>(3 * round + 2 * i);
    }
  });
  EXPECT_EQ(wrong[0] + wrong[1], 0);
}

TEST(LocalGroupTest, BarrierShowsWhatOthersWrote) {
  LocalGroup group(2);
  RankThreads threads(2);
  int values[2] = {0, 0};
  threads.Run([&](int rank) {
    for (int round = 1; round <= 500; ++round) {
      values[rank] = round;
      ASSERT_TRUE(group.end(rank).Barrier().ok());
      EXPECT_EQ(values[1 - rank], round);
      ASSERT_TRUE(group.end(rank).Barrier().ok());
    }
  });
}

TEST(LocalGroupTest, AbortFreesThoseWhoWaitAndLasts) {
  LocalGroup group(2);
  RankThreads threads(2);
  absl::Status waited, later;
  threads.Run([&](int rank) {
    if (rank == 0) {
      waited = group.end(0).Barrier();
    } else {
      group.Abort(absl::InternalError("rank 1 is broken"));
      group.Abort(absl::InternalError("said later"));
      later = group.end(1).Barrier();
    }
  });
  EXPECT_EQ(waited, absl::InternalError("rank 1 is broken"));
  EXPECT_EQ(later, absl::InternalError("rank 1 is broken"));
}

TEST(LocalGroupTest, ResetMakesAnAbortedGroupWhole) {
  LocalGroup group(2);
  RankThreads threads(2);
  for (int attempt = 0; attempt < 100; ++attempt) {
    threads.Run([&](int rank) {
      if (rank == 0) {
        EXPECT_FALSE(group.end(0).Barrier().ok());
      } else {
        group.Abort(absl::InternalError("no"));
      }
    });
    group.Reset();
    float sums[2];
    threads.Run([&](int rank) {
      const float part = 1.5f;
      EXPECT_TRUE(group.end(rank).AllReduceSum(&part, &sums[rank], 1).ok());
    });
    EXPECT_EQ(sums[0], 3.0f);
    EXPECT_EQ(sums[1], 3.0f);
  }
}

TEST(LocalGroupTest, OneRankNeverWaits) {
  LocalGroup group(1);
  const float part[2] = {1, 2};
  float sum[2] = {0, 0};
  EXPECT_TRUE(group.end(0).AllReduceSum(part, sum, 2).ok());
  EXPECT_EQ(std::memcmp(part, sum, sizeof(part)), 0);
  EXPECT_TRUE(group.end(0).Barrier().ok());
}

TEST(RankThreadsTest, RunsEachRankOnceAndReturnsWhenAllHave) {
  RankThreads threads(3);
  EXPECT_EQ(threads.num_ranks(), 3);
  std::vector<int> counts(3, 0);
  for (int i = 0; i < 200; ++i) threads.Run([&](int rank) { ++counts[rank]; });
  EXPECT_EQ(counts, (std::vector<int>{200, 200, 200}));
}

}  // namespace
}  // namespace baton::parallel
