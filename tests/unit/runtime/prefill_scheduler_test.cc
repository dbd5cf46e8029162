#include "engine/runtime/prefill_scheduler.h"

#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace baton::runtime {
namespace {

using kv::kBlockTokens;

class PrefillSchedulerTest : public ::testing::Test {
 protected:
  Sequence* Add(int tokens, uint32_t seed) {
    std::vector<uint32_t> ids;
    for (int i = 0; i < tokens; ++i) ids.push_back(seed * 1000 + i);
    sequences_.push_back(std::make_unique<Sequence>(ids, hasher_, sequences_.size()));
    scheduler_.Enqueue(sequences_.back().get());
    return sequences_.back().get();
  }
  // Runs one step; the tokens of each chunk.
  std::vector<int> Step(int budget, int max_sequences = 8, int keep_available = 0) {
    scheduler_.Plan(budget, max_sequences, keep_available, &chunks_);
    std::vector<int> sizes;
    for (const PrefillChunk& chunk : chunks_) {
      sizes.push_back(chunk.num_tokens);
      EXPECT_EQ(chunk.last, chunk.num_tokens == chunk.sequence->num_pending());
      scheduler_.Finish(chunk);
    }
    return sizes;
  }

  const kv::BlockHasher hasher_{"model", kv::KvFormat::kF32, ""};
  KvMemory memory_{16};
  PrefillScheduler scheduler_{&memory_};
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::vector<PrefillChunk> chunks_;
};

TEST_F(PrefillSchedulerTest, ChunksEndOnBlockBordersButThePromptsEnd) {
  Add(200, 1);
  EXPECT_EQ(Step(130), (std::vector<int>{128}));
  EXPECT_EQ(Step(130), (std::vector<int>{72}));
  EXPECT_TRUE(scheduler_.empty());
  // 130 tokens fit in one step of 130, though 130 is no multiple of 64.
  Add(130, 2);
  EXPECT_EQ(Step(130), (std::vector<int>{130}));
}

TEST_F(PrefillSchedulerTest, SeveralPromptsShareTheBudgetShortestFirst) {
  Add(300, 1);
  Add(100, 2);
  Add(101, 3);
  // 312 - 100 - 101 leaves 111: one whole block of the longest.
  EXPECT_EQ(Step(312), (std::vector<int>{100, 101, 64}));
  EXPECT_EQ(Step(312), (std::vector<int>{236}));
}

TEST_F(PrefillSchedulerTest, OfEqualPromptsTheEarlierComesFirst) {
  Sequence* first = Add(100, 1);
  Add(100, 2);
  scheduler_.Plan(100, 8, 0, &chunks_);
  ASSERT_EQ(chunks_.size(), 1u);
  EXPECT_EQ(chunks_[0].sequence, first);
}

// Short prompts keep coming and fill every step: the long one is passed until twice its length has
// been computed for them, then it gets half of each step.
TEST_F(PrefillSchedulerTest, AgeingBringsALongPromptForward) {
  Sequence* longest = Add(512, 1);
  int others = 0;
  for (int round = 0; longest->num_computed == 0; ++round) {
    ASSERT_LT(round, 20);
    Sequence* other = Add(128, 100 + round);
    for (const int tokens : Step(128)) others += tokens;
    if (other->num_pending() == 0) memory_.Release(other);
  }
  EXPECT_GE(others, 2 * (512 - 128));
  EXPECT_LE(others, 2 * 512 + 2 * 128);
  EXPECT_EQ(longest->num_computed, 64);
}

TEST_F(PrefillSchedulerTest, ALongPromptThatComesFirstLeavesHalfOfAStep) {
  Sequence* longest = Add(600, 1);
  longest->priority = 1;
  Add(100, 2);
  EXPECT_EQ(Step(256), (std::vector<int>{128, 100}));
  // Alone it takes all, and what others leave.
  EXPECT_EQ(Step(256), (std::vector<int>{256}));
  Add(10, 3);
  EXPECT_EQ(Step(192), (std::vector<int>{128, 10}));
}

TEST_F(PrefillSchedulerTest, PriorityIsWorthAHeadStart) {
  Sequence* urgent = Add(500, 1);
  urgent->priority = 1;
  Add(10, 2);
  Sequence* unimportant = Add(5, 3);
  unimportant->priority = -1;
  scheduler_.Plan(128, 1, 0, &chunks_);
  EXPECT_EQ(chunks_[0].sequence, urgent);
  scheduler_.Remove(urgent);
  scheduler_.Plan(128, 1, 0, &chunks_);
  EXPECT_NE(chunks_[0].sequence, unimportant);
  memory_.Release(urgent);
  // No priority outweighs every length: what is beyond the limit counts as the limit.
  urgent->priority = 1 << 30;
  scheduler_.Enqueue(urgent);
  scheduler_.Plan(128, 1, 0, &chunks_);
  EXPECT_EQ(chunks_[0].sequence, urgent);
}

TEST_F(PrefillSchedulerTest, SequencesPerStepAreLimited) {
  for (int i = 0; i < 3; ++i) Add(10, i);
  EXPECT_EQ(Step(512, 2).size(), 2u);
  EXPECT_EQ(Step(512, 2).size(), 1u);
}

TEST_F(PrefillSchedulerTest, NobodyIsAdmittedPastTheOneThatWaitsForBlocks) {
  Sequence* first = Add(12 * kBlockTokens, 1);
  EXPECT_EQ(Step(64).size(), 1u);
  // Of 4 free blocks one is left alone. Both of these want more or as much, the shorter comes
  // first.
  Sequence* shorter = Add(4 * kBlockTokens, 2);
  shorter->priority = 1;
  Add(3 * kBlockTokens, 3);
  scheduler_.Plan(2048, 8, /*keep_available=*/1, &chunks_);
  EXPECT_EQ(chunks_.size(), 1u);
  EXPECT_EQ(chunks_[0].sequence, first);
  EXPECT_EQ(scheduler_.num_waiting(), 2);
  EXPECT_TRUE(scheduler_.Remove(first));
  memory_.Release(first);
  EXPECT_EQ(Step(2048, 8, 1), (std::vector<int>{4 * kBlockTokens, 3 * kBlockTokens}));
}

TEST_F(PrefillSchedulerTest, BlocksKeptForOthersAreNotTaken) {
  Add(10 * kBlockTokens, 1);
  EXPECT_TRUE(Step(2048, 8, /*keep_available=*/7).empty());
  EXPECT_EQ(memory_.pool().counts().free, 16);
  EXPECT_EQ(Step(2048, 8, /*keep_available=*/6).size(), 1u);
}

TEST_F(PrefillSchedulerTest, CachedBeginningIsSkippedAndCountsNoBlocksTwice) {
  Sequence* first = Add(10 * kBlockTokens + 1, 1);
  Step(2048);
  memory_.Release(first);
  EXPECT_EQ(memory_.pool().counts().cached, 10);
  // The same prompt needs one block only, however few are free.
  Sequence* again = Add(10 * kBlockTokens + 1, 1);
  EXPECT_EQ(Step(2048), (std::vector<int>{1}));
  EXPECT_EQ(again->num_cached, 10 * kBlockTokens);
  memory_.Release(again);
  memory_.pool().CheckInvariants();
}

TEST_F(PrefillSchedulerTest, MatchedBlocksThatNobodyUsedAreNotCountedAsRoom) {
  Sequence* cached = Add(10 * kBlockTokens, 1);
  Step(2048);
  memory_.Release(cached);
  // Free 6, cached 10. The prompt takes 10 cached blocks and needs 7 more: only 6 are left.
  std::vector<uint32_t> ids = cached->tokens;
  for (int i = 0; i < 7 * kBlockTokens; ++i) ids.push_back(9000 + i);
  sequences_.push_back(std::make_unique<Sequence>(ids, hasher_, sequences_.size()));
  scheduler_.Enqueue(sequences_.back().get());
  EXPECT_TRUE(Step(4096).empty());
  EXPECT_EQ(memory_.pool().counts().active, 0);
  EXPECT_EQ(memory_.pool().counts().cached, 10);
}

TEST_F(PrefillSchedulerTest, UrgentOnesComeFirstInOrderOfArrival) {
  Sequence* first = Add(40, 1);
  Sequence* second = Add(30, 2);
  Add(20, 3);
  for (Sequence* preempted : {second, first}) {
    scheduler_.Remove(preempted);
    scheduler_.Enqueue(preempted, /*urgent=*/true);
  }
  EXPECT_EQ(Step(512), (std::vector<int>{40, 30, 20}));
}

TEST_F(PrefillSchedulerTest, QueueTokensAreWhatIsNotComputed) {
  Add(100, 1);
  Add(50, 2);
  EXPECT_EQ(scheduler_.queue_tokens(), 150);
  Step(64);
  EXPECT_EQ(scheduler_.queue_tokens(), 100);
}

// Whatever comes, in whatever order it leaves: budgets hold, chunks end on borders, nobody waits
// longer than ageing allows, and no block is lost.
TEST_F(PrefillSchedulerTest, RandomTrafficKeepsEveryPromise) {
  std::mt19937 random(5);
  KvMemory memory(40);
  PrefillScheduler scheduler(&memory);
  struct Waiting {
    Sequence* sequence;
    int64_t came;  // tokens computed by then
    int length;
  };
  std::vector<Waiting> queue;
  int64_t computed = 0;
  for (int step = 0; step < 3000; ++step) {
    if (random() % 3 != 0 && queue.size() < 30) {
      std::vector<uint32_t> ids(1 + random() % (random() % 4 == 0 ? 1500 : 150), step);
      ids[0] = 100000 + step;
      sequences_.push_back(std::make_unique<Sequence>(ids, hasher_, step));
      sequences_.back()->priority = static_cast<int>(random() % 3) - 1;
      scheduler.Enqueue(sequences_.back().get());
      queue.push_back({sequences_.back().get(), computed, static_cast<int>(ids.size())});
    }
    if (!queue.empty() && random() % 40 == 0) {  // cancelled
      const size_t victim = random() % queue.size();
      EXPECT_TRUE(scheduler.Remove(queue[victim].sequence));
      memory.Release(queue[victim].sequence);
      queue.erase(queue.begin() + victim);
    }
    const int budget = 64 + static_cast<int>(random() % 400);
    scheduler.Plan(budget, 4, 0, &chunks_);
    EXPECT_LE(chunks_.size(), 4u);
    EXPECT_EQ(chunks_.empty(), queue.empty()) << "work is left lying";
    int tokens = 0;
    for (const PrefillChunk& chunk : chunks_) {
      tokens += chunk.num_tokens;
      ASSERT_GT(chunk.num_tokens, 0);
      const int end = chunk.sequence->num_computed + chunk.num_tokens;
      EXPECT_EQ(chunk.last, end == chunk.sequence->num_tokens());
      EXPECT_TRUE(chunk.last || end % kBlockTokens == 0);
    }
    EXPECT_LE(tokens, budget);
    computed += tokens;
    for (const PrefillChunk& chunk : chunks_) {
      scheduler.Finish(chunk);
      if (!chunk.last) continue;
      memory.Release(chunk.sequence);
      std::erase_if(queue, [&](const Waiting& w) { return w.sequence == chunk.sequence; });
    }
    for (const Waiting& waiting : queue) {
      // Twice its length and its handicap, then its own tokens at half of each step, behind at most
      // 30 others.
      const int64_t bound =
          2 * (waiting.length + 2 * PrefillScheduler::kPriorityTokens) + 30 * 1500;
      EXPECT_LE(computed - waiting.came, bound);
    }
    memory.pool().CheckInvariants();
  }
}

}  // namespace
}  // namespace baton::runtime
