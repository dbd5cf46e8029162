// The drawn tokens follow the documented distribution: chi-square tests against a plain, fully
// sorted implementation of the same steps. All seeds are fixed, so the tests cannot flicker.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
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

}  // namespace
}  // namespace baton::runtime
