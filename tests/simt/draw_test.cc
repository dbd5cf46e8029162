// Tokens drawn on the emulated device, as a part of the step: what runtime::Sampler draws from the
// very same logits, and those logits do not come to the host.

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/runtime/answer.h"
#include "engine/runtime/model_runner.h"
#include "engine/runtime/step_sampler.h"
#include "gtest/gtest.h"
#include "tests/simt/fake_cudart.h"
#include "tests/simt/simt.h"

namespace baton::simt {
namespace {

using runtime::Answer;
using runtime::EngineRequest;
using runtime::ModelRunner;
using runtime::ModelRunnerOptions;
using runtime::SampledToken;
using runtime::StepSampler;

// Small, as a thousand threads draw from each row.
constexpr char kModel[] = "random-qwen3-gqa2-tied";
constexpr int kNumTokens = 250;  // of 256; the rest is as good as padding
constexpr int kRequests = 4;

std::string ModelPath(const std::string& name) {
  return absl::StrCat(BATON_SOURCE_DIR, "/tests/data/models/", name);
}

ModelRunnerOptions Options() {
  ModelRunnerOptions options;
  options.model_path = ModelPath(kModel);
  options.backend = "cuda";
  options.weight_dtype = "bf16";
  options.max_model_len = 256;
  options.max_step_tokens = 300;
  options.max_logit_rows = 32;
  options.num_blocks = 24;
  return options;
}

// Draws nothing itself: its steps are another's.
class OnlyLogits : public ModelRunner {
 public:
  explicit OnlyLogits(ModelRunner* runner) : runner_(*runner) {}
  absl::Status Step(absl::Span<const runtime::StepSequence> sequences,
                    runtime::LayerObserver* observer,
                    absl::Span<float>* logits,
                    runtime::StepTimings* timings) override {
    return runner_.Step(sequences, observer, logits, timings);
  }
  const model::ModelConfig& config() const override { return runner_.config(); }
  const model::Checkpoint& checkpoint() const override { return runner_.checkpoint(); }
  const kv::KvLayout& layout() const override { return runner_.layout(); }
  base::Buffer& kv_pool() override { return runner_.kv_pool(); }
  int max_model_len() const override { return runner_.max_model_len(); }
  ops::WeightDtype weight_dtype() const override { return runner_.weight_dtype(); }
  std::string kv_scales_fingerprint() const override { return runner_.kv_scales_fingerprint(); }
  std::string device() const override { return runner_.device(); }
  void CopyBlock(kv::BlockId from, kv::BlockId to) override { runner_.CopyBlock(from, to); }

 private:
  ModelRunner& runner_;
};

EngineRequest Request(int index) {
  EngineRequest request;
  for (int i = 0; i < 20 + 9 * index; ++i)
    request.prompt_ids.push_back(static_cast<uint32_t>((i * 37 + 11 * index) % kNumTokens));
  request.params.max_tokens = 100;
  request.params.seed = 5 + index;
  return request;
}

// All that can be asked for, in one step.
std::vector<EngineRequest> AllKinds() {
  std::vector<EngineRequest> requests;
  for (int i = 0; i < kRequests; ++i) requests.push_back(Request(i));
  requests[0].params.temperature = 0;
  requests[0].params.logprobs = 3;
  requests[1].params.temperature = 0.8f;
  requests[1].params.top_p = 0.9f;
  requests[1].params.top_k = 50;
  requests[1].params.repetition_penalty = 1.3f;
  requests[1].params.presence_penalty = 0.5f;
  requests[1].params.frequency_penalty = 0.2f;
  requests[2].params.logit_bias = {{3, 5.0f}, {9, -100.0f}, {17, 2.0f}};
  requests[2].params.min_p = 0.02f;
  requests[2].params.logprobs = 0;
  requests[3].params.temperature = 1.5f;
  requests[3].params.min_tokens = 3;
  requests[3].params.first_choice = 2;
  for (uint32_t id = 0; id < kNumTokens; id += 2) requests[3].params.stop_token_ids.push_back(id);
  return requests;
}

// The same, but for the draws themselves, which take the emulator long.
std::vector<EngineRequest> AllKindsGreedy() {
  std::vector<EngineRequest> requests = AllKinds();
  for (EngineRequest& request : requests) request.params.temperature = 0;
  return requests;
}

// Runs requests together: a step over all prompts, then steps of one token and `drafts` drafts
// each. Drafts are right at even places of the answer.
class Batch {
 public:
  Batch(ModelRunner* runner, const std::vector<EngineRequest>& requests)
      : requests_(requests), sampler_(*runner, kNumTokens) {
    tokenizer_ = *text::Tokenizer::LoadHuggingFace(ModelPath("chain"));
    for (size_t i = 0; i < requests_.size(); ++i) {
      answers_.emplace_back(requests_[i], 0, *tokenizer_, 256);
      tokens_.push_back(requests_[i].prompt_ids);
      for (int block = 0; block < 4; ++block)
        blocks_[i].push_back(static_cast<kv::BlockId>(4 * i + block));
    }
  }

  // `next`: what the answers go on with, where drafts are wanted.
  void Step(int num_drafts,
            const std::vector<std::vector<uint32_t>>& next = {},
            runtime::LayerObserver* observer = nullptr) {
    std::vector<std::vector<uint32_t>> inputs(answers_.size());
    std::vector<std::vector<int>> rows(answers_.size());
    std::vector<runtime::StepSequence> parts;
    std::vector<size_t> who;
    sampler_.Begin();
    for (size_t i = 0; i < answers_.size(); ++i) {
      if (answers_[i].finished()) continue;
      inputs[i].assign(tokens_[i].begin() + computed_[i], tokens_[i].end());
      std::vector<uint32_t> drafts;
      for (int k = 0; k < num_drafts; ++k) {
        const size_t at = answers_[i].num_output() + k;
        const uint32_t right = at < next[i].size() ? next[i][at] : 0;
        drafts.push_back(at % 3 == 2 ? (right + 1) % kNumTokens : right);
      }
      for (int row = 0; row <= num_drafts; ++row)
        rows[i].push_back(static_cast<int>(inputs[i].size()) - 1 + row);
      inputs[i].insert(inputs[i].end(), drafts.begin(), drafts.end());
      answers_[i].Ask(&sampler_, drafts);
      parts.push_back({inputs[i], computed_[i], blocks_[i], rows[i]});
      who.push_back(i);
    }
    const absl::Status status = sampler_.Step(parts, observer, nullptr);
    ASSERT_TRUE(status.ok()) << status;
    on_device = sampler_.on_device();
    num_rows = sampler_.num_rows();
    int first_row = 0;
    for (const size_t i : who) {
      computed_[i] = static_cast<int>(tokens_[i].size());
      for (int k = 0; k <= num_drafts && !answers_[i].finished(); ++k) {
        const auto token = answers_[i].Draw(&sampler_, first_row + k);
        ASSERT_TRUE(token.ok()) << token.status();
        drawn.push_back(*token);
        tokens_[i].push_back(token->id);
        const size_t input = inputs[i].size() - num_drafts + k;
        if (k == num_drafts || inputs[i][input] != token->id) break;
        if (!answers_[i].finished()) ++computed_[i];
      }
      first_row += num_drafts + 1;
    }
  }
  std::vector<std::vector<uint32_t>> outputs() const {
    std::vector<std::vector<uint32_t>> ids;
    for (size_t i = 0; i < tokens_.size(); ++i)
      ids.emplace_back(tokens_[i].begin() + requests_[i].prompt_tokens(), tokens_[i].end());
    return ids;
  }

  std::vector<SampledToken> drawn;
  bool on_device = false;
  int num_rows = 0;

 private:
  const std::vector<EngineRequest> requests_;
  std::unique_ptr<text::Tokenizer> tokenizer_;
  StepSampler sampler_;
  std::vector<Answer> answers_;
  std::vector<std::vector<uint32_t>> tokens_;
  int computed_[kRequests] = {};
  std::vector<kv::BlockId> blocks_[kRequests];
};

class DrawOnTheDevice : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    GetRuntimeConfig().lazy = true;
    GetConfig().order = Order::kDescending;
    ModelRunnerOptions options = Options();
    options.backend_options.enforce_eager = GetParam();
    absl::StatusOr<std::unique_ptr<ModelRunner>> runner = ModelRunner::Create(options);
    ASSERT_TRUE(runner.ok()) << runner.status();
    runner_ = *std::move(runner);
  }
  void TearDown() override {
    runner_.reset();
    GetRuntimeConfig() = RuntimeConfig();
    GetConfig() = Config();
  }

  std::unique_ptr<ModelRunner> runner_;
};

void ExpectSameDraws(const std::vector<SampledToken>& got, const std::vector<SampledToken>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].id, want[i].id) << i;
    EXPECT_EQ(got[i].has_logprob, want[i].has_logprob);
    EXPECT_NEAR(got[i].logprob, want[i].logprob, 1e-4);
    ASSERT_EQ(got[i].top.size(), want[i].top.size());
    for (size_t k = 0; k < got[i].top.size(); ++k)
      EXPECT_EQ(got[i].top[k].first, want[i].top[k].first);
  }
}

TEST(Draws, AreWhatTheSamplerDrawsFromTheSameLogits) {
  GetRuntimeConfig().lazy = true;
  const auto runner = ModelRunner::Create(Options());
  ASSERT_TRUE(runner.ok()) << runner.status();
  OnlyLogits only_logits(runner->get());
  Batch host(&only_logits, AllKinds()), device(runner->get(), AllKinds());
  for (Batch* batch : {&host, &device}) {
    for (int step = 0; step < 5; ++step) batch->Step(0);
  }
  EXPECT_FALSE(host.on_device);
  EXPECT_TRUE(device.on_device);
  ExpectSameDraws(device.drawn, host.drawn);
  // And as verified drafts, right and wrong ones: the same answers in fewer steps. (Steps of other
  // shapes, whose logits need not be the same bits; here they decide the same.)
  Batch verified(runner->get(), AllKinds());
  verified.Step(0);
  for (int step = 0; step < 2; ++step) verified.Step(3, host.outputs());
  const auto want = host.outputs(), got = verified.outputs();
  for (size_t i = 0; i < want.size(); ++i) {
    const size_t count = std::min(want[i].size(), got[i].size());
    EXPECT_GE(count, i == 3 ? 3u : 5u) << i;  // that one may have stopped
    EXPECT_EQ(std::vector<uint32_t>(got[i].begin(), got[i].begin() + count),
              std::vector<uint32_t>(want[i].begin(), want[i].begin() + count))
        << i;
  }
  GetRuntimeConfig() = RuntimeConfig();
}

// One copy brings a step's inputs, one takes its tokens back.
TEST_P(DrawOnTheDevice, NoLogitsComeToTheHost) {
  Batch batch(runner_.get(), AllKindsGreedy());
  batch.Step(0);
  const std::vector<std::vector<uint32_t>> anything(kRequests, std::vector<uint32_t>(30, 4));
  for (const int drafts : {0, 0, 1}) {
    GetRuntimeStats() = RuntimeStats();
    batch.Step(drafts, anything);
    EXPECT_EQ(GetRuntimeStats().copies_to_device, 1u);
    EXPECT_EQ(GetRuntimeStats().copies_to_host, 1u);
    EXPECT_EQ(GetRuntimeStats().bytes_to_host, batch.num_rows * sizeof(ops::SampleResult));
  }
  OnlyLogits only_logits(runner_.get());
  Batch host(&only_logits, AllKindsGreedy());
  GetRuntimeStats() = RuntimeStats();
  host.Step(0);
  EXPECT_EQ(GetRuntimeStats().bytes_to_host, kRequests * runner_->config().vocab * sizeof(float));
}

// A prefill worker's step, whose layers are handed over while it runs.
TEST_P(DrawOnTheDevice, OfAStepThatIsLookedAtLayerByLayer) {
  struct Observer : runtime::LayerObserver {
    void OnLayerDone(int layer) override { ++layers; }
    int layers = 0;
  } observer;
  Batch whole(runner_.get(), AllKindsGreedy()), observed(runner_.get(), AllKindsGreedy());
  whole.Step(0);
  GetRuntimeStats() = RuntimeStats();
  observed.Step(0, {}, &observer);
  EXPECT_EQ(observer.layers, runner_->layout().num_layers);
  EXPECT_TRUE(observed.on_device);
  EXPECT_EQ(GetRuntimeStats().bytes_to_host, kRequests * sizeof(ops::SampleResult));
  ExpectSameDraws(observed.drawn, whole.drawn);
}

INSTANTIATE_TEST_SUITE_P(GraphsOrNot, DrawOnTheDevice, testing::Bool());

// Steps with draws and without share their graphs.
TEST(DrawGraphs, StepsWithLogitsUseThemToo) {
  GetRuntimeConfig().lazy = true;
  const auto runner = ModelRunner::Create(Options());
  ASSERT_TRUE(runner.ok()) << runner.status();
  OnlyLogits only_logits(runner->get());
  Batch device(runner->get(), AllKindsGreedy()), host(&only_logits, AllKindsGreedy());
  device.Step(0);
  host.Step(0);
  for (int step = 0; step < 2; ++step) device.Step(0);
  GetRuntimeStats() = RuntimeStats();
  for (int step = 0; step < 2; ++step) host.Step(0);
  EXPECT_EQ(GetRuntimeStats().graph_launches, 2u);
  EXPECT_GT(GetRuntimeStats().bytes_to_host, 0u);
  ExpectSameDraws(device.drawn, host.drawn);
  GetRuntimeConfig() = RuntimeConfig();
}

// Many edits, so that what follows the pass in its one copy moves.
TEST(DrawGraphs, EditsGrowUnderTheSameGraph) {
  GetRuntimeConfig().lazy = true;
  const auto runner = ModelRunner::Create(Options());
  ASSERT_TRUE(runner.ok()) << runner.status();
  std::vector<EngineRequest> requests = AllKindsGreedy();
  for (EngineRequest& request : requests) {
    for (uint32_t id = 0; id < kNumTokens; ++id)
      request.params.logit_bias.emplace_back(id, static_cast<float>(id % 7));
  }
  OnlyLogits only_logits(runner->get());
  Batch device(runner->get(), requests), host(&only_logits, requests),
      few(runner->get(), AllKindsGreedy());
  for (int step = 0; step < 4; ++step) {
    host.Step(0);
    few.Step(0);
    device.Step(0);
  }
  EXPECT_TRUE(device.on_device);
  ExpectSameDraws(device.drawn, host.drawn);
  GetRuntimeConfig() = RuntimeConfig();
}

TEST(DrawErrors, WhatDoesNotFitIsRefusedBeforeAnythingRuns) {
  ModelRunnerOptions options = Options();
  options.max_logit_rows = 2;
  const auto made = ModelRunner::Create(options);
  ASSERT_TRUE(made.ok()) << made.status();
  ModelRunner& runner = **made;
  EXPECT_EQ(runner.draw_limits().rows, 2);
  const std::vector<uint32_t> tokens = {1, 2, 3};
  const std::vector<kv::BlockId> blocks = {1};
  const std::vector<int> logit_rows = {1, 2};
  std::vector<ops::SampleRow> rows(2);
  std::vector<ops::TokenEdit> edits(3);
  std::vector<ops::SampleResult> results(2);
  const auto message = [&] {
    ops::Draws draws;
    draws.rows = rows;
    draws.edits = edits;
    draws.num_tokens = kNumTokens;
    draws.results = absl::MakeSpan(results);
    const absl::Status status =
        runner.StepAndDraw({{tokens, 0, blocks, logit_rows}}, nullptr, draws, nullptr);
    EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_EQ(message(), "");
  rows.resize(1);
  EXPECT_EQ(message(), "draws: rows=1 want=2");
  rows.resize(3);
  EXPECT_EQ(message(), "draws: rows=3 max=2");
  rows.resize(2);
  results.resize(1);
  EXPECT_EQ(message(), "draws: results=1 want=2");
  results.resize(2);
  rows[1].first_edit = 2;
  rows[1].num_edits = 2;
  EXPECT_EQ(message(), "draws: num_edits=2 max=1");
  rows[1].first_edit = 4;
  EXPECT_EQ(message(), "draws: first_edit=4 max=3");
  rows[1] = {};
  rows[1].num_logprobs = ops::kMaxLogprobs + 1;
  EXPECT_EQ(message(), "draws: logprobs=33 max=32");
  rows[1] = {};
  edits[2].id = kNumTokens;
  EXPECT_EQ(message(), "draws: edit=250 max=249");
  edits.resize(runner.draw_limits().edits + 1);
  edits[2].id = 0;
  EXPECT_EQ(message(),
            absl::StrCat("draws: edits=", edits.size(), " max=", runner.draw_limits().edits));
  edits.clear();
  EXPECT_EQ(message(), "");
}

TEST(DrawErrors, ABackendThatDrawsNothingSaysSo) {
  ModelRunnerOptions options = Options();
  options.backend = "cpu";
  const auto runner = ModelRunner::Create(options);
  ASSERT_TRUE(runner.ok()) << runner.status();
  EXPECT_EQ((*runner)->draw_limits().rows, 0);
  EXPECT_EQ((*runner)->StepAndDraw({}, nullptr, {}, nullptr).code(),
            absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace baton::simt
