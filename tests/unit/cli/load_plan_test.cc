#include "cli/load_plan.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace baton::cli {
namespace {

LengthDistribution Lengths(const std::string& text) {
  const auto lengths = LengthDistribution::Parse(text);
  EXPECT_TRUE(lengths.ok()) << lengths.status();
  return *lengths;
}

std::vector<uint32_t> Draws(const std::string& text, int count = 40'000) {
  const LengthDistribution lengths = Lengths(text);
  Dice dice(7);
  std::vector<uint32_t> out(count);
  for (uint32_t& value : out) value = lengths.Draw(&dice);
  return out;
}

double MeanOf(const std::vector<uint32_t>& values) {
  double sum = 0;
  for (const uint32_t value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

TEST(LoadPlanTest, FixedAndUniformLengthsStayInTheirRange) {
  for (const uint32_t value : Draws("17", 100)) EXPECT_EQ(value, 17u);
  const std::vector<uint32_t> values = Draws("10-13");
  std::vector<int> counts(14);
  for (const uint32_t value : values) {
    ASSERT_GE(value, 10u);
    ASSERT_LE(value, 13u);
    ++counts[value];
  }
  // Each a quarter: five deviations of a binomial.
  const double slack = 5 * std::sqrt(40'000 * 0.25 * 0.75);
  for (int length = 10; length <= 13; ++length) EXPECT_NEAR(counts[length], 10'000, slack);
}

TEST(LoadPlanTest, NormalAndLogNormalLengthsHaveTheirMiddleAndAreNeverZero) {
  EXPECT_NEAR(MeanOf(Draws("normal:200:20")), 200, 5 * 20 / std::sqrt(40'000.0));
  std::vector<uint32_t> values = Draws("lognormal:100:0.5");
  std::sort(values.begin(), values.end());
  // A median's deviation is about 1.25 sigma / sqrt(n), here relative.
  EXPECT_NEAR(values[20'000], 100, 100 * 5 * 1.25 * 0.5 / std::sqrt(40'000.0) + 1);
  for (const uint32_t value : Draws("normal:1:50")) EXPECT_GE(value, 1u);
}

TEST(LoadPlanTest, BadLengthsAreRefused) {
  for (const char* text : {"", "0", "x", "5-3", "1-", "-4", "1.5", "normal:5", "normal:0:1",
                           "normal:5:-1", "gamma:5:1", "1-2-3", "99999999999", "nan", "1:2:3"}) {
    EXPECT_EQ(LengthDistribution::Parse(text).status().code(), absl::StatusCode::kInvalidArgument)
        << text;
  }
}

TEST(LoadPlanTest, PoissonArrivalsHaveTheRateAndItsSpread) {
  LoadOptions options;
  options.requests = 40'000;
  options.rate = 50;
  const std::vector<TraceRequest> plan = MakePlan(options);
  double last = 0, squares = 0;
  for (const TraceRequest& request : plan) {
    const double gap = request.arrival_s - last;
    ASSERT_GE(gap, 0);
    squares += gap * gap;
    last = request.arrival_s;
  }
  // Mean 1/rate; an exponential's deviation equals its mean, so E[gap^2] = 2/rate^2.
  EXPECT_NEAR(last / 40'000, 0.02, 5 * 0.02 / std::sqrt(40'000.0));
  EXPECT_NEAR(squares / 40'000, 2 * 0.02 * 0.02, 5 * std::sqrt(20.0) * 0.02 * 0.02 / 200);
}

TEST(LoadPlanTest, TheSameSeedIsTheSamePlanAndAnotherRateTheSameRequests) {
  LoadOptions options;
  options.prompt_tokens = Lengths("1-1000");
  options.rate = 10;
  const std::vector<TraceRequest> first = MakePlan(options), again = MakePlan(options);
  options.rate = 20;
  const std::vector<TraceRequest> faster = MakePlan(options);
  options.rate = 0;
  const std::vector<TraceRequest> at_once = MakePlan(options);
  options.seed = 2;
  const std::vector<TraceRequest> other = MakePlan(options);
  int differing = 0;
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].arrival_s, again[i].arrival_s);
    EXPECT_DOUBLE_EQ(first[i].arrival_s, 2 * faster[i].arrival_s);
    EXPECT_EQ(first[i].prompt_tokens, faster[i].prompt_tokens);
    EXPECT_EQ(at_once[i].arrival_s, 0);
    differing += first[i].prompt_tokens != other[i].prompt_tokens;
  }
  EXPECT_GT(differing, 90);
}

TEST(LoadPlanTest, PromptsBeginAlikeInAGroupAndDifferOtherwise) {
  TraceRequest request;
  request.prompt_tokens = 100;
  request.prefix_group = "a";
  request.prefix_tokens = 60;
  const std::vector<uint32_t> one = PromptIds(request, 1, 5, 1000);
  const std::vector<uint32_t> two = PromptIds(request, 2, 5, 1000);
  EXPECT_EQ(one, PromptIds(request, 1, 5, 1000));
  EXPECT_TRUE(std::equal(one.begin(), one.begin() + 60, two.begin()));
  EXPECT_FALSE(std::equal(one.begin() + 60, one.end(), two.begin() + 60));
  request.prefix_group = "b";
  EXPECT_NE(PromptIds(request, 1, 5, 1000)[0], one[0]);
  request.prefix_group.clear();
  EXPECT_NE(PromptIds(request, 1, 5, 1000), PromptIds(request, 2, 5, 1000));
  for (const uint32_t id : one) EXPECT_LT(id, 1000u);
}

}  // namespace
}  // namespace baton::cli
