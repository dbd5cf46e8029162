// Whether the loop gives up drafts that do not pay, by what whole cycles take, and tries them
// again.

#include "decode_worker/speculator.h"

#include <memory>
#include <string>

#include "gtest/gtest.h"

#include "tests/support/fake_runner.h"

namespace baton::decode {
namespace {

// All drafts are right; each round has this price.
class PricedDrafter : public Drafter {
 public:
  explicit PricedDrafter(double seconds) : seconds_(seconds) {}
  DraftOffer Offer(const Drafting& drafting) override { return {drafting.limit, 0.9f}; }
  void Draft(absl::Span<Drafting* const>) override {}
  void OnVerified(const Drafting&, int) override {}
  void Forget(uint64_t) override {}
  double RoundSeconds(const StepLoad&) const override { return seconds_; }

 private:
  const double seconds_;
};

class SpeculatorTest : public ::testing::Test {
 protected:
  explicit SpeculatorTest(double price = 0.001) : speculator_({4, 64, false}, 1, {}) {
    speculator_.set_cost(StepCost({{1, 0.1}, {16, 0.11}}, 0, 0));
    speculator_.AddDrafter(std::make_unique<PricedDrafter>(price));
  }

  // One cycle, which takes this many times as long as its parts with drafts and without. Whether
  // there were drafts. `cut`: none was left of those that had been planned.
  bool Cycle(double with_drafts, double without, bool cut = false) {
    speculator_.Begin();
    speculator_.Add(sequence_, &answer_);
    speculator_.Plan({});
    if (cut) speculator_.drafting(0).count = 0;
    const int drafts = speculator_.drafting(0).count;
    StepLoad load;
    load.Add(1 + drafts, sequence_.num_tokens());
    const double step = StepCost({{1, 0.1}, {16, 0.11}}, 0, 0).Seconds(load);
    speculator_.OnVerified(0, drafts);
    speculator_.OnStep(load, step);
    speculator_.OnCycle((step + 0.001 * drafts) * (drafts > 0 ? with_drafts : without));
    return drafts > 0;
  }
  int CyclesWithDrafts(int cycles, double with_drafts, double without) {
    int count = 0;
    for (int i = 0; i < cycles; ++i) count += Cycle(with_drafts, without) ? 1 : 0;
    return count;
  }

  const runtime::EngineRequest request_ = testing::FakeRequest(testing::FakePrompt(64, 1), 4000);
  const std::unique_ptr<text::Tokenizer> tokenizer_ = testing::FakeTokenizer();
  const kv::BlockHasher hasher_{"model", kv::KvFormat::kF32, ""};
  runtime::Sequence sequence_{request_.prompt_ids, hasher_, 0};
  runtime::Answer answer_{request_, 0, *tokenizer_, 8192};
  Speculator speculator_;
};

TEST_F(SpeculatorTest, DraftsAsLongAsCyclesTakeWhatTheirPartsDo) {
  EXPECT_EQ(CyclesWithDrafts(500, 1.0, 1.0), 500);
}

TEST_F(SpeculatorTest, WhatMakesAllCyclesSlowIsNotTheDraftsFault) {
  CyclesWithDrafts(100, 1.0, 1.0);
  // A few without drafts tell that it is not.
  EXPECT_GT(CyclesWithDrafts(500, 5.0, 5.0), 480);
}

TEST_F(SpeculatorTest, DraftsThatLoseAreGivenUpAndTriedNowAndThen) {
  // Four times the tokens in six times the time.
  EXPECT_LT(CyclesWithDrafts(200, 6.0, 1.0), 60);
  const int later = CyclesWithDrafts(4000, 6.0, 1.0);
  EXPECT_GT(later, 0);
  EXPECT_LT(later, 400);
  // It was the machine, and that is over.
  CyclesWithDrafts(4000, 1.0, 1.0);
  EXPECT_EQ(CyclesWithDrafts(100, 1.0, 1.0), 100);
}

TEST_F(SpeculatorTest, OneVerySlowCycleSaysNothing) {
  CyclesWithDrafts(100, 1.0, 1.0);
  EXPECT_TRUE(Cycle(1000.0, 1.0));
  EXPECT_EQ(CyclesWithDrafts(100, 1.0, 1.0), 100);
}

TEST_F(SpeculatorTest, APlanThatWasCutIsNotWhatTheCycleTook) {
  for (int i = 0; i < 500; ++i) Cycle(1.0, 9.0, true);
  // Had those counted as cycles with drafts, drafts would be given up now.
  EXPECT_EQ(CyclesWithDrafts(100, 1.0, 1.0), 100);
}

}  // namespace
}  // namespace baton::decode
