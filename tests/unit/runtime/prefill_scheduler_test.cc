#include "engine/runtime/prefill_scheduler.h"

#include <memory>
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

TEST_F(PrefillSchedulerTest, SeveralPromptsShareTheBudgetOldestFirst) {
  Add(100, 1);
  Add(100, 2);
  Add(300, 3);
  // 312 - 100 - 100 leaves 112: one whole block of the third.
  EXPECT_EQ(Step(312), (std::vector<int>{100, 100, 64}));
  EXPECT_EQ(Step(312), (std::vector<int>{236}));
}

TEST_F(PrefillSchedulerTest, SequencesPerStepAreLimited) {
  for (int i = 0; i < 3; ++i) Add(10, i);
  EXPECT_EQ(Step(512, 2).size(), 2u);
  EXPECT_EQ(Step(512, 2).size(), 1u);
}

TEST_F(PrefillSchedulerTest, NobodyPassesTheOneThatWaitsForBlocks) {
  Sequence* first = Add(12 * kBlockTokens, 1);
  EXPECT_EQ(Step(64).size(), 1u);
  Add(8 * kBlockTokens, 2);
  Add(10, 3);
  scheduler_.Plan(2048, 8, 0, &chunks_);
  EXPECT_EQ(chunks_.size(), 1u);
  EXPECT_EQ(scheduler_.num_waiting(), 2);
  EXPECT_TRUE(scheduler_.Remove(first));
  memory_.Release(first);
  EXPECT_EQ(Step(2048), (std::vector<int>{8 * kBlockTokens, 10}));
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

TEST_F(PrefillSchedulerTest, EarlierArrivalsComeFirstHoweverLateTheyAreQueued) {
  Sequence* old = Add(10, 1);
  scheduler_.Remove(old);
  Add(20, 2);
  scheduler_.Enqueue(old);  // as after a preemption
  EXPECT_EQ(Step(512), (std::vector<int>{10, 20}));
}

TEST_F(PrefillSchedulerTest, QueueTokensAreWhatIsNotComputed) {
  Add(100, 1);
  Add(50, 2);
  EXPECT_EQ(scheduler_.queue_tokens(), 150);
  Step(64);
  EXPECT_EQ(scheduler_.queue_tokens(), 86);
}

}  // namespace
}  // namespace baton::runtime
