// Logits equal those of transformers in float32 (tests/golden), on every backend, however the
// tokens are cut into steps.

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "engine/model/model_config.h"
#include "engine/runtime/model_runner.h"
#include "engine/runtime/sampler.h"
#include "gtest/gtest.h"
#include "tests/support/engine_steps.h"
#include "tests/support/logits_golden.h"

namespace baton::testing_support {
namespace {

// Asked for by the product, not derived: f32 sums in another order than PyTorch's differ by about
// 1e-7 * sqrt(terms) * size of the logits (10), 1e-5 here.
constexpr float kMaxDifference = 1e-4f;

using Param = std::tuple<std::string, std::string>;  // backend, golden

class LogitsParityTest : public ::testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    const auto& [backend, name] = GetParam();
    absl::StatusOr<LogitsGolden> golden = ReadLogitsGolden(name);
    ASSERT_TRUE(golden.ok()) << golden.status();
    golden_ = *std::move(golden);
    runtime::ModelRunnerOptions options = SmallOptions(SourcePath(golden_.model));
    options.backend = backend;
    options.weight_dtype = "f32";
    options.kv_dtype = "f32";
    absl::StatusOr<std::unique_ptr<runtime::ModelRunner>> runner =
        runtime::ModelRunner::Create(options);
    ASSERT_TRUE(runner.ok()) << runner.status();
    runner_ = *std::move(runner);
    driver_ = std::make_unique<StepDriver>(*runner_);
    tokens_ = golden_.prompt;
    tokens_.insert(tokens_.end(), golden_.greedy.begin(), golden_.greedy.end() - 1);
  }

  // `logits`: of every token of prompt and answer.
  void ExpectGolden(const std::vector<std::vector<float>>& logits) {
    ASSERT_EQ(logits.size(), tokens_.size());
    float worst = 0;
    for (size_t i = 0; i < golden_.positions.size(); ++i) {
      const std::vector<float>& row = logits[golden_.positions[i]];
      for (int id = 0; id < golden_.vocab; ++id) {
        // Written so that NaN fails.
        const float difference = std::abs(row[id] - golden_.logits[i][id]);
        if (!(difference <= worst)) worst = difference;
      }
    }
    EXPECT_LT(worst, kMaxDifference);
    RecordProperty("max_difference", std::to_string(worst));
    for (size_t i = 0; i < golden_.greedy.size(); ++i) {
      ASSERT_EQ(ArgMax(logits[golden_.prompt.size() - 1 + i]), golden_.greedy[i])
          << "greedy token " << i;
    }
  }

  LogitsGolden golden_;
  std::unique_ptr<runtime::ModelRunner> runner_;
  std::unique_ptr<StepDriver> driver_;
  std::vector<uint32_t> tokens_;
};

TEST_P(LogitsParityTest, WholePrefill) {
  TestSequence sequence;
  ExpectGolden(driver_->Feed(&sequence, tokens_, 512));
}

TEST_P(LogitsParityTest, ChunkedPrefill) {
  const bool slow = std::get<0>(GetParam()) == "ref";
  for (const int chunk : slow ? std::vector<int>{65} : std::vector<int>{7, 63, 64, 65, 100}) {
    SCOPED_TRACE(chunk);
    TestSequence sequence;
    ExpectGolden(driver_->Feed(&sequence, tokens_, chunk));
    driver_->Release(&sequence);
  }
}

TEST_P(LogitsParityTest, TokenByToken) {
  TestSequence sequence;
  ExpectGolden(driver_->Feed(&sequence, tokens_, 1));
}

TEST_P(LogitsParityTest, PrefillThenGreedyDecode) {
  TestSequence sequence;
  std::vector<std::vector<float>> logits = driver_->Feed(&sequence, golden_.prompt, 64);
  for (size_t i = 0; i + 1 < golden_.greedy.size(); ++i) {
    logits.push_back(driver_->Feed(&sequence, {ArgMax(logits.back())}, 1)[0]);
  }
  ExpectGolden(logits);
}

TEST_P(LogitsParityTest, RopeFrequenciesAreThoseOfTransformers) {
  const std::vector<float> inv_freq = model::RopeInvFreq(runner_->config());
  ASSERT_EQ(inv_freq.size(), golden_.inv_freq.size());
  for (size_t i = 0; i < inv_freq.size(); ++i)
    EXPECT_NEAR(inv_freq[i] / golden_.inv_freq[i], 1, 2e-7) << i;
  EXPECT_NEAR(model::RopeAttentionFactor(runner_->config()), golden_.attention_factor, 1e-6);
}

std::string ParamName(const ::testing::TestParamInfo<Param>& info) {
  std::string name = std::get<0>(info.param) + "_" + std::get<1>(info.param);
  for (char& c : name) c = c == '-' ? '_' : c;
  return name;
}

INSTANTIATE_TEST_SUITE_P(Goldens,
                         LogitsParityTest,
                         ::testing::Combine(::testing::Values("ref", "cpu"),
                                            ::testing::ValuesIn(LogitsGoldenNames())),
                         ParamName);

std::unique_ptr<runtime::ModelRunner> F32Runner(const std::string& backend) {
  runtime::ModelRunnerOptions options =
      SmallOptions(SourcePath("tests/data/models/random-qwen3-gqa4-yarn"));
  options.backend = backend;
  options.weight_dtype = "f32";
  options.kv_dtype = "f32";
  absl::StatusOr<std::unique_ptr<runtime::ModelRunner>> runner =
      runtime::ModelRunner::Create(options);
  EXPECT_TRUE(runner.ok()) << runner.status();
  return *std::move(runner);
}

double LogSoftmax(const std::vector<float>& logits, uint32_t id) {
  double sum = 0;
  for (const float logit : logits) sum += std::exp(double{logit});
  return logits[id] - std::log(sum);
}

// Case 7.1
TEST(LogprobsTest, OfEightGreedyTokensEqualASeparatePassOnTheReferencePath) {
  std::unique_ptr<runtime::ModelRunner> cpu = F32Runner("cpu");
  StepDriver driver(*cpu);
  const int vocab = cpu->config().vocab;
  runtime::Sampler sampler(vocab, vocab);
  runtime::SamplingParams params;
  params.temperature = 0;
  params.logprobs = 3;
  std::vector<uint32_t> tokens = RandomTokens(70, vocab, 9);
  std::vector<runtime::SampledToken> answer;
  TestSequence sequence;
  std::vector<float> logits = driver.Feed(&sequence, tokens, 64).back();
  for (uint32_t i = 0; i < 8; ++i) {
    absl::StatusOr<runtime::SampledToken> token =
        sampler.Sample(params, 0, 70 + i, i, {}, absl::MakeSpan(logits));
    ASSERT_TRUE(token.ok()) << token.status();
    answer.push_back(*token);
    tokens.push_back(token->id);
    logits = driver.Feed(&sequence, {token->id}, 1)[0];
  }

  std::unique_ptr<runtime::ModelRunner> ref = F32Runner("ref");
  StepDriver ref_driver(*ref);
  TestSequence whole;
  const std::vector<std::vector<float>> expected = ref_driver.Feed(&whole, tokens, 512);
  for (size_t i = 0; i < answer.size(); ++i) {
    const std::vector<float>& row = expected[69 + i];
    EXPECT_NEAR(answer[i].logprob, LogSoftmax(row, answer[i].id), 1e-4);
    ASSERT_EQ(answer[i].top.size(), 3u);
    EXPECT_EQ(answer[i].top[0].first, answer[i].id);
    EXPECT_EQ(answer[i].id, ArgMax(row));
    for (const auto& [id, logprob] : answer[i].top) {
      EXPECT_NEAR(logprob, LogSoftmax(row, id), 1e-4) << "token " << i << " id " << id;
    }
  }
}

TEST(LogitsGoldenTest, CoverAtLeastEightShapes) { EXPECT_GE(LogitsGoldenNames().size(), 8u); }

}  // namespace
}  // namespace baton::testing_support
