// The drawn tokens follow the documented distribution: chi-square tests against a plain, fully
// sorted implementation of the same steps. All seeds are fixed, so the tests cannot flicker.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "engine/runtime/sampler.h"
#include "gtest/gtest.h"

namespace baton::runtime {
namespace {

constexpr int kSamples = 100'000;

const std::vector<float>& Logits() {
  static const std::vector<float> logits = {2.0f, -1.0f, 0.5f,  3.0f,  0.0f,  1.5f,   -0.5f, 2.5f,
                                            1.0f, -2.0f, 0.25f, 1.75f, 0.75f, -0.25f, 2.25f, 0.1f};
  return logits;
}

// The distribution Sampler promises, by full sorts and plain sums.
std::vector<double> Expected(const SamplingParams& params, const TokenCounts& counts) {
  std::vector<double> logit(Logits().begin(), Logits().end());
  for (const auto& [id, bias] : params.logit_bias) logit[id] += bias;
  for (const auto& [id, count] : counts.counts()) {
    logit[id] = logit[id] > 0 ? logit[id] / params.repetition_penalty
                              : logit[id] * params.repetition_penalty;
    logit[id] -=
        params.frequency_penalty * count.output + params.presence_penalty * (count.output > 0);
  }
  for (double& value : logit) value /= params.temperature;
  std::vector<int> order(logit.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logit[a] > logit[b]; });
  if (params.top_k > 0 && params.top_k < static_cast<int>(order.size())) order.resize(params.top_k);
  const auto total = [&] {
    double sum = 0;
    for (const int id : order) sum += std::exp(logit[id]);
    return sum;
  };
  const double mass = total() * params.top_p;
  double sum = 0;
  size_t keep = 0;
  while (keep < order.size() && (params.top_p >= 1 || sum < mass))
    sum += std::exp(logit[order[keep++]]);
  order.resize(keep);
  std::erase_if(order, [&, best = logit[order[0]]](int id) {
    return std::exp(logit[id] - best) < params.min_p;
  });
  std::vector<double> probability(logit.size(), 0.0);
  const double norm = total();
  for (const int id : order) probability[id] = std::exp(logit[id]) / norm;
  return probability;
}

// Upper 1e-6 quantile of chi-square, by Wilson and Hilferty.
double ChiSquareLimit(int degrees) {
  constexpr double kNormalQuantile = 4.7534;
  const double a = 2.0 / (9.0 * degrees);
  return degrees * std::pow(1 - a + kNormalQuantile * std::sqrt(a), 3);
}

// One token per (seed, position), both varied, so that neither alone carries the randomness.
std::vector<int> Draw(SamplingParams params, const TokenCounts& counts) {
  Sampler sampler(Logits().size(), Logits().size());
  std::vector<int> drawn(Logits().size(), 0);
  for (int i = 0; i < kSamples; ++i) {
    params.seed = i / 100;
    std::vector<float> logits = Logits();
    absl::StatusOr<SampledToken> token =
        sampler.Sample(params, i % 2, i % 100, 0, counts, absl::MakeSpan(logits));
    EXPECT_TRUE(token.ok()) << token.status();
    ++drawn[token->id];
  }
  return drawn;
}

void ExpectFollows(const SamplingParams& params, const TokenCounts& counts = {}) {
  const std::vector<double> expected = Expected(params, counts);
  const std::vector<int> drawn = Draw(params, counts);
  double chi_square = 0;
  int degrees = -1;
  for (size_t id = 0; id < expected.size(); ++id) {
    const double mean = expected[id] * kSamples;
    if (mean == 0) {
      EXPECT_EQ(drawn[id], 0) << "filtered token drawn: id=" << id;
      continue;
    }
    chi_square += (drawn[id] - mean) * (drawn[id] - mean) / mean;
    ++degrees;
  }
  ASSERT_GT(degrees, 0);
  EXPECT_LT(chi_square, ChiSquareLimit(degrees)) << "degrees of freedom: " << degrees;
}

TokenCounts SomeCounts() {
  TokenCounts counts;
  counts.AddPrompt({3, 4, 9});
  for (const uint32_t id : {3, 7, 7, 7, 1}) counts.AddOutput(id);
  return counts;
}

TEST(SamplerDistributionTest, FollowsSoftmaxAtTemperatureOne) { ExpectFollows({}); }

TEST(SamplerDistributionTest, FollowsTemperature) {
  SamplingParams params;
  for (const float temperature : {0.5f, 1.7f}) {
    params.temperature = temperature;
    ExpectFollows(params);
  }
}

TEST(SamplerDistributionTest, FollowsTopK) {
  SamplingParams params;
  params.top_k = 5;
  ExpectFollows(params);
}

TEST(SamplerDistributionTest, FollowsTopP) {
  SamplingParams params;
  for (const float top_p : {0.35f, 0.8f, 0.97f}) {
    params.top_p = top_p;
    ExpectFollows(params);
  }
}

TEST(SamplerDistributionTest, FollowsMinP) {
  SamplingParams params;
  params.min_p = 0.15f;
  ExpectFollows(params);
}

TEST(SamplerDistributionTest, FollowsPenalties) {
  SamplingParams params;
  params.repetition_penalty = 1.3f;
  params.presence_penalty = 0.4f;
  params.frequency_penalty = -0.3f;
  ExpectFollows(params, SomeCounts());
}

TEST(SamplerDistributionTest, FollowsLogitBias) {
  SamplingParams params;
  params.logit_bias = {{3, -2.0f}, {9, 4.5f}, {0, 0.5f}};
  ExpectFollows(params);
}

TEST(SamplerDistributionTest, FollowsAllStepsTogetherInTheDocumentedOrder) {
  SamplingParams params;
  params.temperature = 0.8f;
  params.top_k = 11;
  params.top_p = 0.93f;
  params.min_p = 0.08f;
  params.repetition_penalty = 1.2f;
  params.presence_penalty = 0.2f;
  params.frequency_penalty = 0.1f;
  params.logit_bias = {{10, 1.0f}, {3, -0.5f}};
  ExpectFollows(params, SomeCounts());
}

// A vocabulary large enough for every short cut of the filters, and one token per draw: what a full
// sort with plain sums draws, for peaked, flat and tied logits.
uint32_t DrawnByFullSort(const SamplingParams& params,
                         absl::Span<const float> logits,
                         uint32_t position) {
  std::vector<uint32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return logits[a] > logits[b]; });
  if (params.top_k > 0 && params.top_k < static_cast<int>(order.size())) order.resize(params.top_k);
  const auto weight = [&, best = double{logits[order[0]]}](uint32_t id) {
    return std::exp((logits[id] - best) / params.temperature);
  };
  double total = 0, sum = 0;
  for (const uint32_t id : order) total += weight(id);
  size_t keep = 0;
  while (keep < order.size() && (params.top_p >= 1 || sum < total * params.top_p))
    sum += weight(order[keep++]);
  order.resize(keep);
  uint32_t winner = 0;
  double best_score = -1e300;
  for (const uint32_t id : order) {
    if (weight(id) < params.min_p) continue;
    const double score =
        logits[id] / double{params.temperature} + GumbelNoise(params.seed, 0, position, id);
    if (score > best_score) {
      best_score = score;
      winner = id;
    }
  }
  return winner;
}

TEST(SamplerDistributionTest, LargeVocabulariesDrawWhatAFullSortDraws) {
  constexpr int kVocab = 9000;  // more than 64 * 100, and no multiple of a block
  std::mt19937 random(11);
  Sampler sampler(kVocab, kVocab - 3);
  for (int round = 0; round < 300; ++round) {
    const float spread = std::vector<float>{0.1f, 0.6f, 3.0f, 12.0f}[round % 4];
    std::normal_distribution<float> noise(0, spread);
    std::vector<float> logits(kVocab);
    for (float& logit : logits) logit = noise(random);
    if (round % 3 == 0) {  // ties
      for (float& logit : logits) logit = std::round(logit);
    }
    SamplingParams params;
    params.seed = random();
    params.temperature = std::vector<float>{0.3f, 1.0f, 1.7f}[round % 3];
    params.top_k = std::vector<int32_t>{0, 1, 40, 141, 4000}[round % 5];
    params.top_p = std::vector<float>{1.0f, 0.95f, 0.5f, 0.999f}[round / 4 % 4];
    params.min_p = std::vector<float>{0.0f, 0.02f}[round / 16 % 2];
    const uint32_t want =
        DrawnByFullSort(params, absl::MakeConstSpan(logits).first(kVocab - 3), round);
    const auto got = sampler.Sample(params, 0, round, 0, TokenCounts(), absl::MakeSpan(logits));
    ASSERT_TRUE(got.ok());
    EXPECT_EQ(got->id, want) << "round " << round;
  }
}

}  // namespace
}  // namespace baton::runtime
