#include "engine/runtime/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "gtest/gtest.h"

namespace baton::runtime {
namespace {

std::vector<float> RandomLogits(int count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(count);
  for (float& logit : logits) logit = normal(random);
  return logits;
}

SampledToken MustSample(const SamplingParams& params,
                        std::vector<float> logits,
                        uint32_t choice = 0,
                        uint32_t position = 0,
                        uint32_t output_tokens = 0,
                        const TokenCounts& counts = {}) {
  Sampler sampler(logits.size(), logits.size());
  absl::StatusOr<SampledToken> token =
      sampler.Sample(params, choice, position, output_tokens, counts, absl::MakeSpan(logits));
  EXPECT_TRUE(token.ok()) << token.status();
  return token.ok() ? *token : SampledToken{};
}

SamplingParams Greedy() {
  SamplingParams params;
  params.temperature = 0;
  return params;
}

TEST(SamplerTest, GreedyTiesGoToTheLowestId) {
  EXPECT_EQ(MustSample(Greedy(), {1, 4, 2, 4, 4}).id, 1u);
}

TEST(SamplerTest, PaddingRowsAreNeverDrawn) {
  Sampler sampler(6, 3);
  SamplingParams params;
  for (const float temperature : {0.0f, 1.0f}) {
    params.temperature = temperature;
    for (uint32_t position = 0; position < 100; ++position) {
      std::vector<float> logits = {1, 2, 3, 50, 60, 70};
      absl::StatusOr<SampledToken> token =
          sampler.Sample(params, 0, position, 0, {}, absl::MakeSpan(logits));
      ASSERT_TRUE(token.ok());
      EXPECT_LT(token->id, 3u);
    }
  }
}

// Case 5.1
TEST(SamplerTest, SmallTemperaturesEqualGreedyWhereTheMarginIsWide) {
  std::vector<float> logits = RandomLogits(1000, 1);
  logits[617] = 40;
  for (const float temperature : {1e-3f, 1e-4f, 1e-5f, 1e-9f, 1e-38f, 0.0f}) {
    SamplingParams params;
    params.temperature = temperature;
    for (uint32_t position = 0; position < 20; ++position) {
      EXPECT_EQ(MustSample(params, logits, 0, position).id, 617u) << temperature;
    }
  }
}

// Case 5.1
TEST(SamplerTest, SmallTemperaturesPickTheBestOfRandomLogits) {
  for (const float temperature : {1e-3f, 1e-4f, 1e-5f, 1e-9f, 1e-38f}) {
    SamplingParams params;
    params.temperature = temperature;
    std::set<uint32_t> ids;
    for (uint32_t i = 0; i < 20; ++i) {
      const std::vector<float> logits = RandomLogits(200, i);
      const SampledToken token = MustSample(params, logits);
      EXPECT_GT(logits[token.id], *std::max_element(logits.begin(), logits.end()) - 41 * 1e-3f);
      ids.insert(token.id);
    }
    EXPECT_GT(ids.size(), 10u);
  }
}

TEST(SamplerTest, ExtremeLogitsStayFinite) {
  constexpr float kMax = std::numeric_limits<float>::max();
  SamplingParams params;
  params.temperature = 1e-5f;
  params.repetition_penalty = 1e-30f;
  TokenCounts counts;
  counts.AddPrompt({0, 1, 2});
  EXPECT_EQ(MustSample(params, {kMax, -kMax, 0}, 0, 0, 0, counts).id, 0u);
}

// Case 5.2: the values the sampler itself gives a meaning to.
TEST(SamplerTest, TopPZeroIsGreedyAndTopKZeroMinusOneOrBeyondTheVocabularyIsOff) {
  const std::vector<float> logits = {1, 2, 3, 2.5, 0};
  SamplingParams params;
  params.top_p = 0;
  for (uint32_t position = 0; position < 50; ++position)
    EXPECT_EQ(MustSample(params, logits, 0, position).id, 2u);
  params.top_p = 1;
  for (uint32_t position = 0; position < 50; ++position) {
    params.top_k = 0;
    const uint32_t plain = MustSample(params, logits, 0, position).id;
    for (const int32_t top_k : {-1, 5, 10}) {
      params.top_k = top_k;
      EXPECT_EQ(MustSample(params, logits, 0, position).id, plain);
    }
  }
}

TEST(SamplerTest, TopKOneAndTinyTopPAndMinPOneAreGreedy) {
  const std::vector<float> logits = {1, 3, 3, 2.5, 0};
  for (uint32_t position = 0; position < 50; ++position) {
    SamplingParams top_k, top_p, min_p;
    top_k.top_k = 1;
    top_p.top_p = 1e-6f;
    min_p.min_p = 1;
    EXPECT_EQ(MustSample(top_k, logits, 0, position).id, 1u);
    EXPECT_EQ(MustSample(top_p, logits, 0, position).id, 1u);
    const uint32_t id = MustSample(min_p, logits, 0, position).id;
    EXPECT_TRUE(id == 1 || id == 2);
  }
}

TEST(SamplerTest, TopKKeepsTheLowestIdsOfEqualLogits) {
  SamplingParams params;
  params.top_k = 3;
  std::set<uint32_t> ids;
  for (uint32_t position = 0; position < 500; ++position) {
    ids.insert(MustSample(params, {1, 0, 1, 1, 1, 0, 1}, 0, position).id);
  }
  EXPECT_EQ(ids, (std::set<uint32_t>{0, 2, 3}));
}

TEST(SamplerTest, TopPOverAFlatVocabularyKeepsTheLowestIdsUpToTheMass) {
  SamplingParams params;
  params.top_p = 0.5f;
  uint32_t highest = 0;
  for (uint32_t position = 0; position < 2000; ++position) {
    highest = std::max(highest, MustSample(params, std::vector<float>(400, 1.0f), 0, position).id);
  }
  EXPECT_LT(highest, 200u);
  EXPECT_GT(highest, 180u);
}

// Case 5.3
TEST(SamplerTest, NonFiniteLogitsAreInternal) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  Sampler sampler(40, 30);
  for (const float bad : {std::nanf(""), kInf, -kInf}) {
    for (const int at : {0, 17, 39}) {
      std::vector<float> logits(40, 1.0f);
      logits[at] = bad;
      absl::StatusOr<SampledToken> token =
          sampler.Sample(Greedy(), 0, 0, 0, {}, absl::MakeSpan(logits));
      EXPECT_EQ(token.status().code(), absl::StatusCode::kInternal);
      EXPECT_EQ(token.status().message(), "logits: not finite");
    }
  }
}

// Case 6.1
TEST(SamplerTest, TheDrawDependsOnlyOnSeedChoiceAndPosition) {
  const std::vector<float> logits = RandomLogits(500, 3);
  SamplingParams params;
  params.seed = 42;
  std::vector<uint32_t> alone;
  for (uint32_t position = 0; position < 64; ++position) {
    alone.push_back(MustSample(params, logits, 0, position).id);
  }
  // The same sampler, other requests in between, positions in another order.
  Sampler sampler(500, 500);
  SamplingParams other;
  for (uint32_t i = 0; i < 64; ++i) {
    const uint32_t position = 63 - i;
    std::vector<float> noise = RandomLogits(500, 100 + i);
    other.seed = 1000 + i;
    ASSERT_TRUE(sampler.Sample(other, 1, position, 3, {}, absl::MakeSpan(noise)).ok());
    std::vector<float> scratch = logits;
    absl::StatusOr<SampledToken> token =
        sampler.Sample(params, 0, position, 7, {}, absl::MakeSpan(scratch));
    ASSERT_TRUE(token.ok());
    EXPECT_EQ(token->id, alone[position]);
  }
}

// Case 6.1: a filter that keeps the winner does not change who wins.
TEST(SamplerTest, FiltersDoNotShiftTheNoise) {
  const std::vector<float> logits = RandomLogits(500, 5);
  SamplingParams plain, filtered;
  filtered.top_k = 100;
  int equal = 0;
  for (uint32_t position = 0; position < 200; ++position) {
    equal +=
        MustSample(plain, logits, 0, position).id == MustSample(filtered, logits, 0, position).id;
  }
  EXPECT_GT(equal, 180);
}

// Case 6.2
TEST(SamplerTest, ChoicesDifferAndRepeatExactly) {
  const std::vector<float> logits = RandomLogits(500, 4);
  SamplingParams params;
  params.seed = 7;
  params.n = 4;
  const auto answers = [&](SamplingParams with) {
    std::vector<std::vector<uint32_t>> choices(with.n);
    for (uint32_t choice = 0; choice < with.n; ++choice) {
      for (uint32_t position = 0; position < 16; ++position) {
        choices[choice].push_back(MustSample(with, logits, choice, position).id);
      }
    }
    return choices;
  };
  const auto first = answers(params);
  EXPECT_EQ(std::set(first.begin(), first.end()).size(), 4u);
  EXPECT_EQ(answers(params), first);
  params.temperature = 0;
  const auto greedy = answers(params);
  EXPECT_EQ(std::set(greedy.begin(), greedy.end()).size(), 1u);
}

// A choice that is resumed by itself draws what it would have drawn among the others.
TEST(SamplerTest, FirstChoiceNumbersTheChoicesOfAPart) {
  SamplingParams params;
  params.temperature = 1;
  params.seed = 9;
  const std::vector<float> logits(50, 0.0f);
  std::vector<uint32_t> all, parts;
  for (uint32_t choice = 0; choice < 8; ++choice) {
    params.first_choice = 0;
    all.push_back(MustSample(params, logits, choice, 7).id);
    params.first_choice = choice;
    parts.push_back(MustSample(params, logits, 0, 7).id);
  }
  EXPECT_EQ(all, parts);
}

TEST(SamplerTest, MinTokensKeepsStopTokensOutUntilItIsReached) {
  SamplingParams params = Greedy();
  params.min_tokens = 3;
  params.stop_token_ids = {1, 2};
  for (uint32_t output = 0; output < 3; ++output)
    EXPECT_EQ(MustSample(params, {1, 9, 8, 2}, 0, 0, output).id, 3u);
  EXPECT_EQ(MustSample(params, {1, 9, 8, 2}, 0, 0, 3).id, 1u);
}

TEST(SamplerTest, MinTokensWithoutAnyOtherTokenIsInvalid) {
  SamplingParams params;
  params.min_tokens = 1;
  params.stop_token_ids = {0, 1};
  Sampler sampler(2, 2);
  std::vector<float> logits = {1, 2};
  EXPECT_EQ(sampler.Sample(params, 0, 0, 0, {}, absl::MakeSpan(logits)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(SamplerTest, LogitBiasOutsideTheVocabularyIsInvalid) {
  SamplingParams params;
  params.logit_bias = {{3, 1.0f}};
  Sampler sampler(4, 3);
  std::vector<float> logits = {1, 2, 3, 4};
  EXPECT_EQ(sampler.Sample(params, 0, 0, 0, {}, absl::MakeSpan(logits)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(SamplerTest, PenaltiesActOnWhatTheyAreDocumentedFor) {
  TokenCounts counts;
  counts.AddPrompt({0});
  counts.AddOutput(1);
  counts.AddOutput(1);
  SamplingParams repetition = Greedy(), presence = Greedy(), frequency = Greedy();
  repetition.repetition_penalty = 2;  // prompt and output
  EXPECT_EQ(MustSample(repetition, {4, 3.9f, 2.1f}, 0, 0, 0, counts).id, 2u);
  EXPECT_EQ(MustSample(repetition, {-1, -1.1f, -1.9f}, 0, 0, 0, counts).id, 2u);
  presence.presence_penalty = 1;  // output only
  EXPECT_EQ(MustSample(presence, {4, 4.5f, 3.8f}, 0, 0, 0, counts).id, 0u);
  frequency.frequency_penalty = 1;  // output only, times its count
  EXPECT_EQ(MustSample(frequency, {1, 4.5f, 2.6f}, 0, 0, 0, counts).id, 2u);
}

TEST(SamplerTest, RemoveOutputTakesBackAnAddition) {
  TokenCounts counts;
  counts.AddPrompt({5});
  counts.AddOutput(5);
  counts.AddOutput(6);
  counts.RemoveOutput(5);
  counts.RemoveOutput(6);
  ASSERT_EQ(counts.counts().size(), 1u);
  EXPECT_TRUE(counts.counts().at(5).in_prompt);
  EXPECT_EQ(counts.counts().at(5).output, 0);
}

// Case 7.1
TEST(SamplerTest, LogprobsAreTheRawLogSoftmaxAndGreedyIsTheFirstAlternative) {
  for (uint32_t seed = 0; seed < 8; ++seed) {
    const std::vector<float> logits = RandomLogits(300, seed);
    double sum = 0;
    for (const float logit : logits) sum += std::exp(double{logit});
    SamplingParams params = Greedy();
    params.logprobs = 3;
    const SampledToken token = MustSample(params, logits);
    ASSERT_TRUE(token.has_logprob);
    ASSERT_EQ(token.top.size(), 3u);
    EXPECT_EQ(token.top[0].first, token.id);
    EXPECT_EQ(token.top[0].second, token.logprob);
    for (const auto& [id, logprob] : token.top)
      EXPECT_NEAR(logprob, logits[id] - std::log(sum), 1e-5);
    EXPECT_GE(token.top[0].second, token.top[1].second);
    EXPECT_GE(token.top[1].second, token.top[2].second);
  }
}

// Case 7.1: values are of the model, whatever the request did to the distribution.
TEST(SamplerTest, LogprobsIgnoreBiasPenaltiesMasksAndTemperature) {
  const std::vector<float> logits = {1, 2, 3, 0};
  const double log_sum = std::log(std::exp(1.0) + std::exp(2.0) + std::exp(3.0) + 1);
  TokenCounts counts;
  counts.AddOutput(3);
  SamplingParams params = Greedy();
  params.logprobs = 0;
  params.logit_bias = {{3, 50.0f}};
  params.presence_penalty = 1;
  params.min_tokens = 1;
  params.stop_token_ids = {2};
  const SampledToken token = MustSample(params, logits, 0, 0, 0, counts);
  EXPECT_EQ(token.id, 3u);
  EXPECT_TRUE(token.top.empty());
  EXPECT_NEAR(token.logprob, 0 - log_sum, 1e-6);
}

TEST(SamplerTest, TopAlternativesBreakTiesById) {
  SamplingParams params = Greedy();
  params.logprobs = 3;
  const SampledToken token = MustSample(params, {1, 2, 1, 2, 1});
  ASSERT_EQ(token.top.size(), 3u);
  EXPECT_EQ(token.top[0].first, 1u);
  EXPECT_EQ(token.top[1].first, 3u);
  EXPECT_EQ(token.top[2].first, 0u);
}

TEST(GumbelNoiseTest, HasTheMomentsOfAStandardGumbel) {
  constexpr int kCount = 200'000;
  double sum = 0, squares = 0;
  for (int i = 0; i < kCount; ++i) {
    const double noise = GumbelNoise(i / 1000, i % 3, i % 1000, i % 77);
    sum += noise;
    squares += noise * noise;
  }
  const double mean = sum / kCount;
  const double variance = squares / kCount - mean * mean;
  constexpr double kEulerGamma = 0.5772156649, kVariance = 1.6449340668;
  // Five standard errors: sqrt(var / n), and sqrt((kurtosis - 1) / n) * var with kurtosis 5.4.
  EXPECT_NEAR(mean, kEulerGamma, 5 * std::sqrt(kVariance / kCount));
  EXPECT_NEAR(variance, kVariance, 5 * kVariance * std::sqrt(4.4 / kCount));
}

TEST(GumbelNoiseTest, EveryPartOfTheKeyMatters) {
  const double base = GumbelNoise(1, 2, 3, 4);
  EXPECT_NE(base, GumbelNoise(2, 2, 3, 4));
  EXPECT_NE(base, GumbelNoise(1, 3, 3, 4));
  EXPECT_NE(base, GumbelNoise(1, 2, 4, 4));
  EXPECT_NE(base, GumbelNoise(1, 2, 3, 5));
  EXPECT_NE(GumbelNoise(0, 1, 0, 0), GumbelNoise(0, 0, 1, 0));
  EXPECT_EQ(base, GumbelNoise(1, 2, 3, 4));
}

}  // namespace
}  // namespace baton::runtime
