// A draft model whose rounds, and the step that verifies them, follow one another on the device:
// the answers are those of plain decoding, and the host looks at the drafts once, when all is done.

#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "decode_worker/model_drafter.h"
#include "engine/base/metrics.h"
#include "tests/support/decode_driver.h"
#include "tests/support/drawing_runner.h"

namespace baton::decode {
namespace {

using base::CounterId;
using runtime::EngineRequest;
using testing::DecodeDriver;
using testing::DrawingRunner;
using testing::FakePrompt;
using testing::FakeRequest;
using testing::Output;

constexpr int kSequences = 8;

class DraftChainTest : public ::testing::Test {
 protected:
  // Costs nothing that drafts would not bring.
  std::unique_ptr<ModelDrafter> MakeDrafter(int blocks = 128) {
    auto runner = std::make_unique<DrawingRunner>(blocks);
    draft_runner_ = runner.get();
    ModelDrafterOptions options;
    options.max_batch = kSequences;
    options.max_catch_up = 512;
    options.num_tokens = testing::kFakeVocab;
    auto drafter = std::make_unique<ModelDrafter>(options, std::move(runner),
                                                  StepCost({{1, 1e-5}}, 0, 0), WorkerMetrics());
    if (use_chain_) EXPECT_TRUE(drafter->UseDrawChain().ok());
    return drafter;
  }
  worker::WorkerMetrics WorkerMetrics() { return worker::WorkerMetrics(metrics_.get()); }

  std::vector<Output> Run(const std::vector<EngineRequest>& requests,
                          DrawingRunner* target,
                          std::unique_ptr<ModelDrafter> drafter) {
    DecodeLoopOptions options;
    options.scheduler.chunk_tokens = 128;
    options.scheduler.max_batch = kSequences;
    options.speculation.max_drafts = drafter == nullptr ? 0 : 5;
    options.speculation.ngram = false;
    options.model_fingerprint = "fake";
    DecodeDriver driver(options, *target, *tokenizer_, WorkerMetrics());
    ModelDrafter* drafts = drafter.get();
    if (drafter != nullptr) driver.loop().AddDrafter(std::move(drafter));
    const std::vector<Output> outputs = driver.Run(requests);
    if (drafts == nullptr) return outputs;
    EXPECT_EQ(drafts->memory()->pool().counts().active, 0);
    drafts->memory()->pool().CheckInvariants();
    in_chains_ = draft_runner_->rows_in_chains;
    draft_rows_on_device_ = draft_runner_->rows_on_device;
    chains_finished_ = draft_runner_->chains_finished;
    return outputs;
  }
  std::vector<Output> Plain(const std::vector<EngineRequest>& requests) {
    DrawingRunner target(128);
    return Run(requests, &target, nullptr);
  }

  static std::vector<EngineRequest> Requests() {
    std::vector<EngineRequest> requests;
    for (int i = 0; i < 10; ++i) {
      requests.push_back(FakeRequest(FakePrompt(20 + 17 * i, i), 30 + 3 * i));
      requests[i].params.temperature = i % 3 == 0 ? 0.0f : 0.9f;
      requests[i].params.seed = 40 + static_cast<uint64_t>(i);
      if (i % 4 == 1) requests[i].params.top_p = 0.8f;
      if (i % 3 == 1) requests[i].params.stop_token_ids = {1, 4, 9};
      if (i % 5 == 2) requests[i].params.logit_bias = {{2, 4.0f}, {7, -50.0f}};
      if (i % 4 == 3) requests[i].params.min_tokens = 12;
    }
    return requests;
  }

  const std::unique_ptr<text::Tokenizer> tokenizer_ = testing::FakeTokenizer();
  const std::unique_ptr<base::Metrics> metrics_ =
      base::Metrics::Create(base::Role::kDecode, "fake");
  DrawingRunner* draft_runner_ = nullptr;
  bool use_chain_ = true;
  int in_chains_ = 0, draft_rows_on_device_ = 0, chains_finished_ = 0;
};

TEST_F(DraftChainTest, AnswersAreThoseOfPlainDecodingHoweverOftenDraftsAreWrong) {
  const std::vector<EngineRequest> requests = Requests();
  const std::vector<Output> want = Plain(requests);
  for (const uint32_t wrong_every : {0u, 1u, 2u, 5u}) {
    DrawingRunner target(128);
    std::unique_ptr<ModelDrafter> drafter = MakeDrafter();
    if (wrong_every > 0)
      draft_runner_->wrong = [=](uint32_t position) { return position % wrong_every == 0; };
    EXPECT_EQ(Run(requests, &target, std::move(drafter)), want) << wrong_every;
    EXPECT_GT(in_chains_, 50) << wrong_every;
    EXPECT_EQ(draft_rows_on_device_, 0) << wrong_every;
    EXPECT_EQ(chains_finished_, target.steps_from_chains) << wrong_every;
  }
}

// Right drafts are all accepted, and the host waits once for several tokens of each.
TEST_F(DraftChainTest, TheHostWaitsOnceForAllRoundsAndTheirVerification) {
  const std::vector<EngineRequest> requests = {FakeRequest(FakePrompt(40, 1), 60)};
  const std::vector<Output> want = Plain(requests);
  DrawingRunner target(128);
  EXPECT_EQ(Run(requests, &target, MakeDrafter()), want);
  const double proposed = metrics_->counter(CounterId::kSpecDecodeDraftTokens).value();
  EXPECT_EQ(metrics_->counter(CounterId::kSpecDecodeAcceptedTokens).value(), proposed);
  EXPECT_EQ(in_chains_, proposed);
  EXPECT_LT(chains_finished_, 20);
  EXPECT_GT(proposed / chains_finished_, 3);
}

// A verifying step that cannot take them from there has them brought to the host first.
TEST_F(DraftChainTest, ATargetThatReadsNoChainsGetsTokens) {
  const std::vector<EngineRequest> requests = Requests();
  const std::vector<Output> want = Plain(requests);
  DrawingRunner target(128);
  target.reads_chains = false;
  EXPECT_EQ(Run(requests, &target, MakeDrafter()), want);
  EXPECT_GT(in_chains_, 50);
  EXPECT_GT(chains_finished_, 0);
  EXPECT_EQ(target.steps_from_chains, 0);
}

// Counts of tokens are the host's: as long as such a request runs, rounds are waited for.
TEST_F(DraftChainTest, PenaltiesNeedTheHostInEachRound) {
  std::vector<EngineRequest> requests = Requests();
  for (EngineRequest& request : requests) request.params.presence_penalty = 1.5f;
  const std::vector<Output> want = Plain(requests);
  DrawingRunner target(128);
  EXPECT_EQ(Run(requests, &target, MakeDrafter()), want);
  EXPECT_EQ(in_chains_, 0);
  EXPECT_GT(draft_rows_on_device_, 50);
  // And those that penalise nothing have their chains when the others are gone.
  for (size_t i = 1; i < requests.size(); ++i) requests[i].params.presence_penalty = 0;
  DrawingRunner again(128);
  const std::vector<Output> want_mixed = Plain(requests);
  EXPECT_EQ(Run(requests, &again, MakeDrafter()), want_mixed);
  EXPECT_GT(in_chains_, 0);
  EXPECT_GT(draft_rows_on_device_, 0);
}

TEST_F(DraftChainTest, AFaultOfTheDraftModelEndsNoRequest) {
  const std::vector<EngineRequest> requests = Requests();
  const std::vector<Output> want = Plain(requests);
  const auto run = [&](auto break_it) {
    DrawingRunner target(128);
    std::unique_ptr<ModelDrafter> drafter = MakeDrafter();
    break_it(draft_runner_);
    EXPECT_EQ(Run(requests, &target, std::move(drafter)), want);
  };
  run([](DrawingRunner* runner) { runner->nan_token = 3; });
  run([](DrawingRunner* runner) { runner->step_status = absl::InternalError("draft"); });
  // Nobody knows what a lost chain has drawn, so none of it is taken for right, by luck neither.
  const double accepted = metrics_->counter(CounterId::kSpecDecodeAcceptedTokens).value();
  run([](DrawingRunner* runner) { runner->chain->finish_status = absl::InternalError("chain"); });
  EXPECT_EQ(metrics_->counter(CounterId::kSpecDecodeAcceptedTokens).value(), accepted);
}

// A pool of blocks that is too small for all: some go without drafts for a while.
TEST_F(DraftChainTest, AFullCacheOfDraftsIsNotTheAnswersFault) {
  const std::vector<EngineRequest> requests = Requests();
  const std::vector<Output> want = Plain(requests);
  DrawingRunner target(128);
  EXPECT_EQ(Run(requests, &target, MakeDrafter(7)), want);
  EXPECT_GT(in_chains_, 0);
}

}  // namespace
}  // namespace baton::decode
