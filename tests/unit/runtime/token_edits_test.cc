// The edits that a request makes of logits, against the rules of sampler.h written out.

#include "engine/runtime/token_edits.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "engine/runtime/sampler.h"

namespace baton::runtime {
namespace {

constexpr int kVocab = 40;
constexpr int kTokens = 36;  // those behind are padding
constexpr float kMaskedOut = -std::numeric_limits<float>::infinity();

struct Case {
  SamplingParams params;
  uint32_t output_tokens = 0;
  TokenCounts counts;
  std::vector<float> logits;
};

// Steps 1 to 3 of sampler.h, one after another over all logits.
std::vector<float> ByTheRules(const Case& c) {
  std::vector<float> logits = c.logits;
  const SamplingParams& p = c.params;
  for (const auto& [id, bias] : p.logit_bias) logits[id] += bias;
  for (const auto& [id, count] : c.counts.counts()) {
    if (id >= kTokens) continue;
    double logit = logits[id];
    logit = logit > 0 ? logit / p.repetition_penalty : logit * p.repetition_penalty;
    if (count.output > 0) logit -= double{p.frequency_penalty} * count.output + p.presence_penalty;
    logits[id] = static_cast<float>(logit);
  }
  for (const uint32_t id : p.stop_token_ids) {
    if (c.output_tokens < p.min_tokens && id < kTokens) logits[id] = kMaskedOut;
  }
  return logits;
}

std::vector<ops::TokenEdit> EditsOf(const Case& c) {
  std::vector<ops::TokenEdit> edits;
  const absl::Status status =
      AppendTokenEdits(c.params, c.output_tokens, c.counts, kTokens, &edits);
  EXPECT_TRUE(status.ok()) << status;
  return edits;
}

std::vector<float> ByTheEdits(const Case& c) {
  std::vector<float> logits = c.logits;
  std::map<int32_t, int> seen;
  for (const ops::TokenEdit& edit : EditsOf(c)) {
    EXPECT_EQ(++seen[edit.id], 1) << "one edit a token";
    float& logit = logits[edit.id];
    if (edit.has_bias) logit += edit.bias;
    if (edit.penalised) {
      double value = logit;
      value = value > 0 ? value / c.params.repetition_penalty : value * c.params.repetition_penalty;
      if (edit.output_count > 0) {
        value -= double{c.params.frequency_penalty} * edit.output_count + c.params.presence_penalty;
      }
      logit = static_cast<float>(value);
    }
    if (edit.masked) logit = kMaskedOut;
  }
  return logits;
}

Case RandomCase(std::mt19937* random) {
  Case c;
  const auto one_of = [&](std::initializer_list<float> values) {
    return *(values.begin() + (*random)() % values.size());
  };
  c.params.temperature = 0;
  c.params.repetition_penalty = one_of({1.0f, 1.3f, 0.7f});
  c.params.presence_penalty = one_of({0.0f, 0.5f, -0.5f});
  c.params.frequency_penalty = one_of({0.0f, 0.25f});
  c.params.min_tokens = (*random)() % 2 == 0 ? 0 : 8;
  c.output_tokens = (*random)() % 16;
  std::normal_distribution<float> normal(0, 3);
  for (int i = 0; i < kVocab; ++i) c.logits.push_back(normal(*random));
  for (uint32_t id = 0; id < kVocab; ++id) {
    if ((*random)() % 6 == 0 && id < kTokens) c.params.logit_bias.emplace_back(id, normal(*random));
    if ((*random)() % 6 == 0) c.params.stop_token_ids.push_back(id);
    if ((*random)() % 4 == 0) c.counts.AddPrompt({{id}});
    for (size_t n = (*random)() % 8; n > 5; --n) c.counts.AddOutput(id);
  }
  return c;
}

TEST(TokenEdits, AreTheRulesOfTheSampler) {
  std::mt19937 random(11);
  for (int i = 0; i < 300; ++i) {
    Case c = RandomCase(&random);
    const std::vector<float> want = ByTheRules(c);
    EXPECT_EQ(ByTheEdits(c), want);
    // And the sampler draws by them: greedily, the largest of what is left.
    Sampler sampler(kVocab, kTokens);
    const auto drawn =
        sampler.Sample(c.params, 0, 0, c.output_tokens, c.counts, absl::MakeSpan(c.logits));
    ASSERT_TRUE(drawn.ok()) << drawn.status();
    EXPECT_EQ(drawn->id, std::max_element(want.begin(), want.begin() + kTokens) - want.begin());
  }
}

TEST(TokenEdits, AreNoneWhereNothingIsAsked) {
  Case c;
  c.counts.AddPrompt({{1, 2, 3}});
  c.counts.AddOutput(4);
  c.params.stop_token_ids = {5};
  c.params.min_tokens = 3;
  c.output_tokens = 3;
  EXPECT_TRUE(EditsOf(c).empty());
  c.output_tokens = 2;
  ASSERT_EQ(EditsOf(c).size(), 1u) << "the stop token";
  EXPECT_TRUE(EditsOf(c)[0].masked);
  c.params.presence_penalty = 0.1f;
  EXPECT_EQ(EditsOf(c).size(), 5u);
}

TEST(TokenEdits, ComeBehindThoseOfOtherRows) {
  Case c;
  c.params.logit_bias = {{7, 1.0f}, {3, 2.0f}};
  std::vector<ops::TokenEdit> edits = {{.id = 7, .masked = true}};
  ASSERT_TRUE(AppendTokenEdits(c.params, 0, c.counts, kTokens, &edits).ok());
  ASSERT_EQ(edits.size(), 3u);
  EXPECT_TRUE(edits[0].masked && !edits[0].has_bias);
}

TEST(TokenEdits, RefuseABiasOutsideOfTheVocabulary) {
  Case c;
  c.params.logit_bias = {{1, 1.0f}, {kTokens, 1.0f}};
  std::vector<ops::TokenEdit> edits;
  const absl::Status status =
      AppendTokenEdits(c.params, c.output_tokens, c.counts, kTokens, &edits);
  EXPECT_EQ(status, absl::InvalidArgumentError("logit_bias: token_id=36 vocabulary=36"));
  EXPECT_TRUE(edits.empty());
}

TEST(TokenCountsTest, RemovingWhatWasAddedLeavesNothing) {
  TokenCounts counts;
  counts.AddPrompt({{1}});
  counts.AddOutput(1);
  counts.AddOutput(2);
  counts.RemoveOutput(1);
  counts.RemoveOutput(2);
  ASSERT_EQ(counts.counts().size(), 1u);
  EXPECT_TRUE(counts.counts().at(1).in_prompt);
  EXPECT_EQ(counts.counts().at(1).output, 0);
}

}  // namespace
}  // namespace baton::runtime
