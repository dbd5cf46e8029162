#include "router/fair_queue.h"

#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace baton::router {
namespace {

class FairQueueTest : public testing::Test {
 protected:
  uint64_t Push(const std::string& tenant,
                Priority priority = Priority::kNormal,
                double cost = 1,
                Lane lane = Lane::kShort,
                bool urgent = false) {
    queue_.Push({++last_id_, tenant, priority, lane, cost, urgent});
    return last_id_;
  }
  // The tenants in the order in which they are served.
  std::string Drain(Lane lane = Lane::kShort) {
    std::string order;
    while (const QueueEntry* entry = queue_.Peek(lane)) {
      order += entry->tenant;
      queue_.Pop(lane);
    }
    return order;
  }
  FairQueue queue_;
  uint64_t last_id_ = 0;
};

TEST_F(FairQueueTest, OneTenantIsServedInOrderOfArrival) {
  const uint64_t first = Push("a");
  Push("a");
  EXPECT_EQ(queue_.Peek(Lane::kShort)->id, first);
  EXPECT_EQ(queue_.size(), 2u);
}

TEST_F(FairQueueTest, HigherClassesGoFirstAndUrgentOnesBeforeAll) {
  Push("l", Priority::kLow);
  Push("n");
  Push("h", Priority::kHigh);
  Push("u", Priority::kLow, 1, Lane::kShort, /*urgent=*/true);
  EXPECT_EQ(queue_.size(Priority::kLow), 2u);
  EXPECT_EQ(Drain(), "uhnl");
  EXPECT_TRUE(queue_.empty());
}

TEST_F(FairQueueTest, TenantThatFloodsDelaysItselfOnly) {
  for (int i = 0; i < 6; ++i) Push("a");
  Push("b");
  Push("b");
  EXPECT_EQ(Drain(), "ababaaaa") << "turns, while both wait";
}

TEST_F(FairQueueTest, SharesAreByCostNotByNumber) {
  for (int i = 0; i < 3; ++i) Push("a", Priority::kNormal, 4);
  for (int i = 0; i < 8; ++i) Push("b", Priority::kNormal, 1);
  // a b: then b is 4 behind before a goes again.
  EXPECT_EQ(Drain(), "abbbbabbbba");
}

TEST_F(FairQueueTest, TenantThatWasAwayGetsNoCredit) {
  for (int i = 0; i < 10; ++i) Push("a");
  for (int i = 0; i < 5; ++i) queue_.Pop(Lane::kShort);
  Push("b");
  Push("b");
  Push("b");
  EXPECT_EQ(Drain().substr(0, 5), "babab") << "not bbb";
}

TEST_F(FairQueueTest, LanesAreApart) {
  Push("s");
  Push("l", Priority::kHigh, 100, Lane::kLong);
  EXPECT_EQ(queue_.Peek(Lane::kShort)->tenant, "s");
  EXPECT_EQ(queue_.Peek(Lane::kLong)->tenant, "l");
}

TEST_F(FairQueueTest, CostAheadIsWhatGoesBefore) {
  for (int i = 0; i < 10; ++i) Push("a", Priority::kNormal, 2);
  Push("h", Priority::kHigh, 5);
  EXPECT_DOUBLE_EQ(queue_.CostAhead({99, "a", Priority::kNormal, Lane::kShort, 2}), 25);
  EXPECT_DOUBLE_EQ(queue_.CostAhead({99, "b", Priority::kNormal, Lane::kShort, 2}), 5 + 2)
      << "of the other tenant only its fair share";
  EXPECT_DOUBLE_EQ(queue_.CostAhead({99, "b", Priority::kHigh, Lane::kShort, 2}), 2);
  EXPECT_DOUBLE_EQ(queue_.CostAhead({99, "b", Priority::kNormal, Lane::kLong, 2}), 0);
  EXPECT_DOUBLE_EQ(queue_.cost(), 25);
}

// Property: under any pushes, removals and pops nothing is lost or served twice, classes are
// strict, and two tenants that both wait all the time are served alike to within their largest
// request.
TEST_F(FairQueueTest, ServesEverythingOnceAndFairly) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    FairQueue queue;
    std::set<uint64_t> waiting;
    std::map<std::string, double> served;
    uint64_t id = 0;
    for (const char* tenant : {"a", "b"}) {
      for (int i = 0; i < 300; ++i) {
        queue.Push({++id, tenant, Priority::kNormal, Lane::kShort, 1.0 + random() % 9});
        waiting.insert(id);
      }
    }
    for (int step = 0; step < 300; ++step) {
      if (random() % 4 == 0) {
        const uint64_t gone = 1 + random() % id;
        ASSERT_EQ(queue.Remove(gone), waiting.erase(gone) > 0);
        continue;
      }
      const QueueEntry* entry = queue.Peek(Lane::kShort);
      if (entry == nullptr) break;
      served[entry->tenant] += entry->cost;
      ASSERT_EQ(waiting.erase(entry->id), 1u);
      queue.Pop(Lane::kShort);
      ASSERT_LE(std::abs(served["a"] - served["b"]), 10) << "seed " << seed;
    }
    ASSERT_EQ(queue.size(), waiting.size());
    while (!queue.empty()) queue.Remove(queue.Peek(Lane::kShort)->id);
    EXPECT_NEAR(queue.cost(), 0, 1e-6);
  }
}

}  // namespace
}  // namespace baton::router
