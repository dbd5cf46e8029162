#include "decode_worker/decode_scheduler.h"

#include <map>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/fake_runner.h"

namespace baton::decode {
namespace {

using kv::kBlockTokens;
using runtime::PrefillChunk;
using runtime::Sequence;

constexpr int kPoolBlocks = 8;

class DecodeSchedulerTest : public ::testing::Test {
 protected:
  void Make(int swap_blocks) {
    const int64_t block_bytes =
        static_cast<int64_t>(runner_.layout().block_bytes()) * runner_.layout().num_layers;
    absl::StatusOr<SwapSpace> swap = SwapSpace::Create(runner_, swap_blocks * block_bytes);
    ASSERT_TRUE(swap.ok());
    swap_ = std::make_unique<SwapSpace>(*std::move(swap));
    DecodeSchedulerOptions options;
    options.max_batch = 4;
    options.chunk_tokens = 128;
    options.max_prefill_sequences = 2;
    scheduler_ = std::make_unique<DecodeScheduler>(options, &memory_);
    scheduler_->set_swap_space(swap_.get());
  }
  Sequence* NewSequence(int tokens) {
    std::vector<uint32_t> ids(tokens, static_cast<uint32_t>(sequences_.size()));
    sequences_.push_back(std::make_unique<Sequence>(ids, hasher_, sequences_.size()));
    return sequences_.back().get();
  }
  // All but its last token is computed: as after a hand-over.
  Sequence* AddRunning(int tokens) {
    Sequence* sequence = NewSequence(tokens);
    EXPECT_TRUE(memory_.Grow(sequence, tokens - 1).ok());
    sequence->num_computed = tokens - 1;
    // What belongs to whom shows in the first byte of its blocks.
    for (const kv::BlockId block : sequence->blocks) FirstByte(block) = Mark(*sequence);
    scheduler_->AddRunning(sequence);
    return sequence;
  }
  Sequence* AddPrompt(int tokens) {
    Sequence* sequence = NewSequence(tokens);
    scheduler_->AddPrompt(sequence);
    return sequence;
  }
  uint8_t& FirstByte(kv::BlockId block) {
    return runner_.kv_pool().data()[runner_.layout().BlockOffset(1, block)];
  }
  static uint8_t Mark(const Sequence& sequence) { return static_cast<uint8_t>(sequence.order + 1); }

  // Runs the plan: every decoding sequence gets a token, every chunk is computed.
  void FinishPlan() {
    const DecodeScheduler::Plan plan = scheduler_->plan();
    for (Sequence* sequence : plan.decode) {
      FirstByte(sequence->blocks.back()) = Mark(*sequence);
      sequence->tokens.push_back(0);
      scheduler_->FinishDecode(sequence);
    }
    for (const PrefillChunk& chunk : plan.chunks) {
      scheduler_->FinishChunk(chunk);
      if (!chunk.last) continue;
      for (const kv::BlockId block : chunk.sequence->blocks)
        FirstByte(block) = Mark(*chunk.sequence);
      chunk.sequence->tokens.push_back(0);
      scheduler_->AddRunning(chunk.sequence);
    }
  }
  void End(Sequence* sequence) {
    EXPECT_TRUE(scheduler_->Remove(sequence));
    memory_.Release(sequence);
  }

  const kv::BlockHasher hasher_{"model", kv::KvFormat::kF32, ""};
  testing::FakeRunner runner_{kPoolBlocks};
  runtime::KvMemory memory_{kPoolBlocks};
  std::unique_ptr<SwapSpace> swap_;
  std::unique_ptr<DecodeScheduler> scheduler_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
};

TEST_F(DecodeSchedulerTest, EveryRunningSequenceDecodesUpToTheBatch) {
  Make(0);
  for (int i = 0; i < 5; ++i) AddRunning(10);
  EXPECT_EQ(scheduler_->MakePlan().decode.size(), 4u);
  EXPECT_EQ(scheduler_->plan().decode[0], sequences_[0].get());
}

TEST_F(DecodeSchedulerTest, PromptsAreComputedBesideDecoding) {
  Make(0);
  Sequence* running = AddRunning(10);
  Sequence* prompt = AddPrompt(200);
  EXPECT_EQ(scheduler_->MakePlan().decode, std::vector<Sequence*>{running});
  ASSERT_EQ(scheduler_->plan().chunks.size(), 1u);
  EXPECT_EQ(scheduler_->plan().chunks[0].sequence, prompt);
  EXPECT_EQ(scheduler_->plan().chunks[0].num_tokens, 128);
}

TEST_F(DecodeSchedulerTest, APromptLeavesABlockForEveryoneWhoRuns) {
  Make(0);
  AddRunning(64);
  AddRunning(64);
  AddPrompt(5 * kBlockTokens);  // of 6 free blocks 2 are wanted by the others' next tokens
  EXPECT_TRUE(scheduler_->MakePlan().chunks.empty());
}

TEST_F(DecodeSchedulerTest, WithoutSwapTheYoungestIsComputedAgain) {
  Make(0);
  Sequence* old = AddRunning(4 * kBlockTokens + 1);
  Sequence* young = AddRunning(4 * kBlockTokens + 1);
  EXPECT_EQ(scheduler_->MakePlan().decode, std::vector<Sequence*>{old});
  EXPECT_EQ(young->num_computed, 0);
  EXPECT_TRUE(young->blocks.empty());
  EXPECT_EQ(scheduler_->preemptions(), 1);
  EXPECT_EQ(scheduler_->num_preempted_waiting(), 1);
  End(old);
  EXPECT_EQ(scheduler_->MakePlan().chunks[0].sequence, young);
}

TEST_F(DecodeSchedulerTest, WithSwapTheYoungestComesBackWithItsKeysAndValues) {
  Make(8);
  Sequence* old = AddRunning(4 * kBlockTokens + 1);
  Sequence* young = AddRunning(4 * kBlockTokens + 1);
  EXPECT_EQ(scheduler_->MakePlan().decode, std::vector<Sequence*>{old});
  EXPECT_EQ(scheduler_->num_swapped(), 1);
  EXPECT_EQ(scheduler_->num_preempted_waiting(), 1);
  EXPECT_EQ(swap_->num_free(), 4);
  FinishPlan();
  End(old);
  for (int block = 0; block < kPoolBlocks; ++block) FirstByte(block) = 0;
  EXPECT_EQ(scheduler_->MakePlan().decode, std::vector<Sequence*>{young});
  EXPECT_EQ(young->num_computed, 4 * kBlockTokens);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(FirstByte(young->blocks[i]), Mark(*young)) << i;
  EXPECT_EQ(swap_->num_free(), 8);
  EXPECT_EQ(scheduler_->num_preempted_waiting(), 0);
}

TEST_F(DecodeSchedulerTest, NobodyIsLetInBeforeASwappedSequence) {
  Make(8);
  AddRunning(3 * kBlockTokens + 1);
  Sequence* young = AddRunning(5 * kBlockTokens + 1);
  Sequence* prompt = AddPrompt(10);
  scheduler_->MakePlan();
  EXPECT_EQ(scheduler_->num_swapped(), 1);
  EXPECT_TRUE(scheduler_->plan().chunks.empty());  // 4 blocks are free, and it wants one
  End(sequences_[0].get());
  EXPECT_EQ(scheduler_->MakePlan().decode, std::vector<Sequence*>{young});
  EXPECT_EQ(scheduler_->plan().chunks[0].sequence, prompt);
}

TEST_F(DecodeSchedulerTest, AFullSwapSpaceMeansComputingAgain) {
  Make(3);
  Sequence* old = AddRunning(4 * kBlockTokens + 1);
  AddRunning(4 * kBlockTokens + 1);
  EXPECT_EQ(scheduler_->MakePlan().decode, std::vector<Sequence*>{old});
  EXPECT_EQ(scheduler_->num_swapped(), 0);
  EXPECT_EQ(swap_->num_free(), 3);
}

TEST_F(DecodeSchedulerTest, ASwappedSequenceThatEndsGivesItsSlotsBack) {
  Make(8);
  AddRunning(4 * kBlockTokens + 1);
  Sequence* young = AddRunning(4 * kBlockTokens + 1);
  scheduler_->MakePlan();
  End(young);
  EXPECT_EQ(swap_->num_free(), 8);
  EXPECT_EQ(scheduler_->num_swapped(), 0);
}

TEST_F(DecodeSchedulerTest, DraftsTakeFreeBlocksAndNeverTheOthersNextOnes) {
  Make(0);
  Sequence* first = AddRunning(60);
  AddRunning(60);
  scheduler_->MakePlan();
  EXPECT_EQ(scheduler_->GrowForDrafts(first, 4), 4);  // in its block
  EXPECT_EQ(first->blocks.size(), 1u);
  EXPECT_EQ(scheduler_->GrowForDrafts(first, 10), 10);
  EXPECT_EQ(first->blocks.size(), 2u);
  first->tokens.push_back(0);  // all drafts were wrong
  scheduler_->FinishDecode(first);
  EXPECT_EQ(first->blocks.size(), 1u);
  AddRunning(3 * kBlockTokens + 1);
  scheduler_->MakePlan();
  // 2 blocks are left for three sequences: 3 tokens fit in the block there is.
  EXPECT_EQ(scheduler_->GrowForDrafts(first, 10), 3);
  EXPECT_EQ(scheduler_->preemptions(), 0);
}

// Random arrivals, ends, hand-overs and prompts, with and without swap: no step is over its
// budgets, everybody who stays gets on, nobody's blocks are overwritten, nothing is lost.
TEST_F(DecodeSchedulerTest, RandomTrafficNeverHangsNorLosesABlock) {
  for (const int swap_blocks : {0, 4, 20}) {
    Make(swap_blocks);
    std::mt19937 random(swap_blocks + 1);
    std::map<Sequence*, int> left;  // tokens each will still generate
    for (int step = 0; step < 3000; ++step) {
      if (left.size() < 6 && random() % 4 == 0) {
        const int tokens = 1 + static_cast<int>(random() % (3 * kBlockTokens));
        const bool handed_over = random() % 2 == 0 && scheduler_->num_preempted_waiting() == 0 &&
                                 memory_.pool().num_available() > 4 + scheduler_->num_running();
        Sequence* sequence = handed_over ? AddRunning(tokens + 1) : AddPrompt(tokens);
        left[sequence] = 1 + static_cast<int>(random() % (4 * kBlockTokens));
      }
      const DecodeScheduler::Plan& plan = scheduler_->MakePlan();
      EXPECT_EQ(plan.empty(), left.empty()) << "step " << step;
      EXPECT_LE(plan.decode.size(), 4u);
      EXPECT_LE(plan.chunks.size(), 2u);
      int tokens = 0;
      for (const PrefillChunk& chunk : plan.chunks) tokens += chunk.num_tokens;
      EXPECT_LE(tokens, 128);
      for (Sequence* sequence : plan.decode) {
        EXPECT_EQ(sequence->num_pending(), 1);
        ASSERT_GE(sequence->blocks.size() * kBlockTokens, sequence->tokens.size());
        const int full = (sequence->num_tokens() - 1) / kBlockTokens;
        for (int i = 0; i < full; ++i)
          ASSERT_EQ(FirstByte(sequence->blocks[i]), Mark(*sequence)) << "step " << step;
      }
      std::vector<Sequence*> generated = plan.decode;
      for (const PrefillChunk& chunk : plan.chunks) {
        if (chunk.last) generated.push_back(chunk.sequence);
      }
      FinishPlan();
      for (Sequence* sequence : generated) {
        if (--left[sequence] > 0) continue;
        End(sequence);
        left.erase(sequence);
      }
      memory_.pool().CheckInvariants();
    }
    EXPECT_GT(scheduler_->preemptions(), 10);
    for (const auto& [sequence, tokens] : left) End(sequence);
    EXPECT_EQ(memory_.pool().counts().active, 0);
    EXPECT_EQ(swap_->num_free(), swap_blocks);
    memory_.cache().Clear();
  }
}

}  // namespace
}  // namespace baton::decode
