// Where a step's tokens are drawn, and that it makes no difference.

#include "engine/runtime/step_sampler.h"

#include <atomic>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

#include "engine/runtime/answer.h"
#include "tests/support/drawing_runner.h"

namespace baton::runtime {
namespace {

using testing::DrawingRunner;
using testing::FakePrompt;
using testing::FakeRequest;
using testing::kFakeVocab;

class StepSamplerTest : public ::testing::Test {
 protected:
  // A step over prompts, the last token's logits of each.
  absl::Status Step(StepSampler* sampler, const std::vector<std::vector<uint32_t>>& prompts) {
    std::vector<std::vector<kv::BlockId>> tables(prompts.size());
    std::vector<int> rows(prompts.size());
    std::vector<StepSequence> parts;
    for (size_t i = 0; i < prompts.size(); ++i) {
      tables[i] = {static_cast<kv::BlockId>(i)};
      rows[i] = static_cast<int>(prompts[i].size()) - 1;
      parts.push_back({prompts[i], 0, tables[i], absl::MakeConstSpan(&rows[i], 1)});
    }
    return sampler->Step(parts, nullptr, nullptr);
  }
  // One step for one site, on the device if `runner` draws.
  absl::StatusOr<SampledToken> DrawOne(ModelRunner& runner, const SamplingParams& params) {
    StepSampler sampler(runner, kFakeVocab);
    const DrawSite site = {params, 0, 10, 0, counts_};
    sampler.Begin();
    sampler.Add(site);
    const absl::Status status = Step(&sampler, {FakePrompt(10, 1)});
    if (!status.ok()) return status;
    was_on_device_ = sampler.on_device();
    return sampler.Draw(0, site);
  }

  TokenCounts counts_;
  DrawingRunner device_{8};
  testing::FakeRunner host_{8};
  bool was_on_device_ = false;
};

TEST_F(StepSamplerTest, DeviceAndHostDrawTheSame) {
  for (int i = 0; i < 200; ++i) {
    SamplingParams params;
    params.temperature = i % 3 == 0 ? 0.0f : 1.5f;
    params.top_k = i % 4 == 0 ? 5 : 0;
    params.top_p = i % 5 == 0 ? 0.5f : 1.0f;
    params.min_p = i % 7 == 0 ? 0.1f : 0.0f;
    params.seed = i;
    params.first_choice = i % 2;
    params.logprobs = i % 6 - 1;
    params.repetition_penalty = i % 8 == 0 ? 1.5f : 1.0f;
    params.logit_bias = {{static_cast<uint32_t>(i % kFakeVocab), 3.0f}};
    params.stop_token_ids = {static_cast<uint32_t>(i * 7 % kFakeVocab)};
    params.min_tokens = i % 2;
    counts_.AddOutput(i % 11);
    const auto want = DrawOne(host_, params);
    EXPECT_FALSE(was_on_device_);
    const auto got = DrawOne(device_, params);
    EXPECT_TRUE(was_on_device_);
    ASSERT_TRUE(got.ok() && want.ok());
    EXPECT_EQ(got->id, want->id) << i;
    EXPECT_EQ(got->has_logprob, want->has_logprob);
    EXPECT_NEAR(got->logprob, want->logprob, 1e-5);
    ASSERT_EQ(got->top.size(), want->top.size());
    for (size_t k = 0; k < got->top.size(); ++k) {
      EXPECT_EQ(got->top[k].first, want->top[k].first);
      EXPECT_NEAR(got->top[k].second, want->top[k].second, 1e-5);
    }
  }
  EXPECT_EQ(device_.rows_on_host, 0);
  EXPECT_EQ(device_.rows_on_device, 200);
}

TEST_F(StepSamplerTest, BothRefuseTheSameInTheSameOrder) {
  const auto expect_both = [&](const SamplingParams& params, const absl::Status& want) {
    EXPECT_EQ(DrawOne(host_, params).status(), want);
    EXPECT_EQ(DrawOne(device_, params).status(), want);
    EXPECT_TRUE(was_on_device_);
  };
  SamplingParams bias, masked;
  bias.logit_bias = {{kFakeVocab, 1.0f}};
  masked.min_tokens = 1;
  for (uint32_t id = 0; id < kFakeVocab; ++id) masked.stop_token_ids.push_back(id);
  expect_both(bias, absl::InvalidArgumentError("logit_bias: token_id=26 vocabulary=26"));
  expect_both(masked, absl::InvalidArgumentError("min_tokens: every token is a stop token"));
  device_.nan_token = host_.nan_token = FakePrompt(10, 1).back();
  for (const SamplingParams& params : {bias, masked, SamplingParams()})
    expect_both(params, absl::InternalError("logits: not finite"));
}

TEST_F(StepSamplerTest, ABadRowSpoilsNoOther) {
  SamplingParams bad, good;
  bad.logit_bias = {{kFakeVocab + 5, 1.0f}};
  const DrawSite bad_site = {bad, 0, 10, 0, counts_}, good_site = {good, 0, 10, 0, counts_};
  StepSampler sampler(device_, kFakeVocab);
  sampler.Begin();
  sampler.Add(bad_site);
  sampler.Add(good_site);
  ASSERT_TRUE(Step(&sampler, {FakePrompt(10, 2), FakePrompt(10, 1)}).ok());
  EXPECT_FALSE(sampler.Draw(0, bad_site).ok());
  const auto token = sampler.Draw(1, good_site);
  ASSERT_TRUE(token.ok());
  EXPECT_EQ(token->id, DrawOne(host_, good)->id);
}

// A step that the backend cannot draw whole: what it says is what the host draws.
TEST_F(StepSamplerTest, FallsBackToTheHostForWholeSteps) {
  SamplingParams params, many;
  params.presence_penalty = 0.5f;
  many.logprobs = ops::kMaxLogprobs + 1;
  for (uint32_t id = 0; id < 6; ++id) counts_.AddOutput(id);
  const DrawSite site = {params, 0, 10, 0, counts_};
  const auto on_device = [&](ops::DrawLimits limits, auto add) {
    DrawingRunner runner(8, limits);
    StepSampler sampler(runner, kFakeVocab);
    sampler.Begin();
    add(&sampler);
    std::vector<std::vector<uint32_t>> prompts;
    for (int row = 0; row < sampler.num_rows(); ++row) prompts.push_back(FakePrompt(10, 1));
    EXPECT_TRUE(Step(&sampler, prompts).ok());
    EXPECT_EQ(runner.rows_on_device, sampler.on_device() ? sampler.num_rows() : 0);
    EXPECT_EQ(runner.rows_on_host, sampler.on_device() ? 0 : sampler.num_rows());
    EXPECT_EQ(sampler.Draw(0, site)->id, DrawOne(host_, params)->id);
    return sampler.on_device();
  };
  const auto two = [&](StepSampler* sampler) {
    sampler->Add(site);
    sampler->Add(site);
  };
  EXPECT_TRUE(on_device({2, 12}, two));
  EXPECT_FALSE(on_device({1, 12}, two)) << "rows";
  EXPECT_FALSE(on_device({2, 11}, two)) << "edits";
  EXPECT_FALSE(on_device({0, 0}, two)) << "a backend that draws nothing";
  const DrawSite with_many = {many, 0, 10, 0, counts_};
  const auto logprobs = [&](StepSampler* sampler) {
    sampler->Add(site);
    sampler->Add(with_many);
  };
  EXPECT_FALSE(on_device({2, 12}, logprobs)) << "alternatives";
  const auto drafts = [&](StepSampler* sampler) {
    sampler->Add(site);
    sampler->Add(with_many, RowUse::kDraft);
  };
  EXPECT_TRUE(on_device({2, 12}, drafts)) << "drafts have none";
  const auto shared = [&](StepSampler* sampler) {
    sampler->Add(site);
    sampler->AddShared();
  };
  EXPECT_FALSE(on_device({2, 12}, shared)) << "a row of several choices";
}

// What is left of one step is not there in the next.
TEST_F(StepSamplerTest, TheNextStepIsOnTheDeviceAgain) {
  StepSampler sampler(device_, kFakeVocab);
  sampler.Begin();
  sampler.AddShared();
  ASSERT_TRUE(Step(&sampler, {FakePrompt(10, 1)}).ok());
  EXPECT_FALSE(sampler.on_device());
  SamplingParams params;
  const DrawSite site = {params, 0, 10, 0, counts_};
  sampler.Begin();
  sampler.Add(site);
  ASSERT_TRUE(Step(&sampler, {FakePrompt(10, 1)}).ok());
  EXPECT_TRUE(sampler.on_device());
  EXPECT_EQ(sampler.Draw(0, site)->id, DrawOne(host_, params)->id);
}

TEST_F(StepSamplerTest, ChoicesOfASharedRowDoNotSeeEachOthersEdits) {
  SamplingParams biased, plain;
  biased.temperature = plain.temperature = 0;
  const uint32_t best = DrawOne(host_, plain)->id, other = (best + 1) % kFakeVocab;
  biased.logit_bias = {{other, 1000.0f}};
  StepSampler sampler(device_, kFakeVocab);
  sampler.Begin();
  sampler.AddShared();
  ASSERT_TRUE(Step(&sampler, {FakePrompt(10, 1)}).ok());
  EXPECT_EQ(sampler.Draw(0, {biased, 0, 10, 0, counts_})->id, other);
  EXPECT_EQ(sampler.Draw(0, {plain, 1, 10, 0, counts_})->id, best);
}

TEST_F(StepSamplerTest, AStepWithoutRowsDrawsNothing) {
  StepSampler sampler(device_, kFakeVocab);
  sampler.Begin();
  const std::vector<uint32_t> prompt = FakePrompt(10, 1);
  const std::vector<kv::BlockId> table = {0};
  const StepSequence part = {prompt, 0, table, {}};
  EXPECT_TRUE(sampler.Step(absl::MakeConstSpan(&part, 1), nullptr, nullptr).ok());
  EXPECT_EQ(sampler.num_rows(), 0);
  EXPECT_EQ(device_.rows_on_device + device_.rows_on_host, 0);
}

// The rows behind drafts are drawn as if the drafts were said, and the answer forgets them again.
TEST_F(StepSamplerTest, RowsBehindDraftsCountTheDrafts) {
  const std::unique_ptr<text::Tokenizer> tokenizer = testing::FakeTokenizer();
  EngineRequest request = FakeRequest(FakePrompt(10, 1), 20);
  request.params.presence_penalty = 100;  // never twice the same
  request.params.frequency_penalty = 1;
  request.params.min_tokens = 2;
  const uint32_t best = DrawOne(host_, request.params)->id;
  request.params.stop_token_ids = {best};
  StepSampler sampler(device_, kFakeVocab);
  // All rows of the step have the same logits.
  const std::vector<std::vector<uint32_t>> prompts(4, FakePrompt(10, 1));
  Answer answer(request, 0, *tokenizer, 100);
  std::vector<uint32_t> drafts, want;
  {  // on the host, where the drafts are really there
    StepSampler on_host(host_, kFakeVocab);
    Answer reference(request, 0, *tokenizer, 100);
    on_host.Begin();
    for (int row = 0; row < 4; ++row) on_host.Add({request.params, 0, 0, 0, counts_});
    ASSERT_TRUE(Step(&on_host, prompts).ok());
    for (int row = 0; row < 4 && !reference.finished(); ++row)
      want.push_back(reference.Draw(&on_host, row)->id);
  }
  ASSERT_EQ(want.size(), 3u) << "min_tokens is over at the third";
  EXPECT_EQ(want[2], best);
  drafts = {want[0], want[1], 5};
  sampler.Begin();
  answer.Ask(&sampler, drafts);
  EXPECT_EQ(sampler.num_rows(), 4);
  ASSERT_TRUE(Step(&sampler, prompts).ok());
  ASSERT_TRUE(sampler.on_device());
  std::vector<uint32_t> got;
  for (int row = 0; row < 4 && !answer.finished(); ++row)
    got.push_back(answer.Draw(&sampler, row)->id);
  EXPECT_EQ(got, want);
}

// Many tokens, and threads to draw from them.
class WideRunner : public testing::FakeRunner {
 public:
  static constexpr int kVocab = 40000;
  explicit WideRunner(int num_threads) : FakeRunner(8), num_threads_(num_threads) {
    config_ = FakeRunner::config();
    config_.vocab = kVocab;
  }
  const model::ModelConfig& config() const override { return config_; }
  absl::Status Step(absl::Span<const StepSequence> sequences,
                    LayerObserver*,
                    absl::Span<float>* logits,
                    StepTimings*) override {
    logits_.clear();
    for (const StepSequence& sequence : sequences) {
      for (const int row : sequence.logit_rows) {
        for (uint32_t id = 0; id < kVocab; ++id)
          logits_.push_back(testing::FakeLogit(sequence.tokens[row], id));
      }
    }
    if (nan_row >= 0) logits_[static_cast<size_t>(nan_row) * kVocab + 7] = NAN;
    *logits = absl::MakeSpan(logits_);
    return absl::OkStatus();
  }
  int host_threads() const override { return num_threads_; }
  void ForEach(int count, absl::FunctionRef<void(int index, int thread)> f) override {
    ++for_each_calls;
    std::atomic<int> next{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < num_threads_; ++thread) {
      threads.emplace_back([&, thread] {
        for (int i = next++; i < count; i = next++) f(i, thread);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  int for_each_calls = 0;
  int nan_row = -1;

 private:
  model::ModelConfig config_;
  const int num_threads_;
  std::vector<float> logits_;
};

TEST_F(StepSamplerTest, RowsDrawnAheadOnSeveralThreadsAreWhatTheyAreOneByOne) {
  std::vector<SamplingParams> params(6);
  for (int i = 0; i < 6; ++i) {
    params[i].temperature = i == 2 ? 0.0f : 1.0f;
    params[i].top_p = i == 3 ? 0.7f : 1.0f;
    params[i].seed = 20 + i;
    params[i].logprobs = i == 4 ? 3 : -1;
  }
  params[1].presence_penalty = 1;
  params[5].logit_bias = {{WideRunner::kVocab, 1.0f}};  // refused
  counts_.AddOutput(5);
  // Row 0 is a draft's, row 3 comes behind drafts and row 4 is everybody's.
  const auto run = [&](WideRunner* runner, bool ahead) {
    StepSampler sampler(*runner, WideRunner::kVocab);
    std::vector<std::string> seen;
    for (int step = 0; step < 2; ++step) {
      sampler.Begin();
      std::vector<std::vector<uint32_t>> prompts;
      const auto site = [&](int row) {
        return DrawSite{params[row], 0, static_cast<uint32_t>(10 + step), 1, counts_};
      };
      for (int row = 0; row < 6; ++row) {
        prompts.push_back(FakePrompt(10, row + 6 * step));
        if (row == 4) {
          sampler.AddShared();
        } else {
          sampler.Add(site(row), row == 0   ? RowUse::kDraft
                                 : row == 3 ? RowUse::kBehindDrafts
                                            : RowUse::kToken);
        }
      }
      EXPECT_TRUE(Step(&sampler, prompts).ok());
      if (ahead) sampler.DrawAhead();
      const auto draft = sampler.DrawId(0, site(0));
      seen.push_back(draft.ok() ? absl::StrCat(*draft) : draft.status().ToString());
      for (const int row : {1, 2, 3, 4, 4, 5}) {
        const auto token = sampler.Draw(row, site(row));
        seen.push_back(token.ok()
                           ? absl::StrCat(token->id, " ", token->logprob, " ", token->top.size())
                           : token.status().ToString());
      }
    }
    return seen;
  };
  for (const int nan_row : {-1, 0, 2}) {
    WideRunner one(1), several(3);
    one.nan_row = several.nan_row = nan_row;
    const std::vector<std::string> want = run(&one, true);
    EXPECT_EQ(one.for_each_calls, 0);
    EXPECT_EQ(run(&several, false), want);
    EXPECT_EQ(several.for_each_calls, 0);
    EXPECT_EQ(run(&several, true), want);
    EXPECT_EQ(several.for_each_calls, 2);
  }
}

}  // namespace
}  // namespace baton::runtime
