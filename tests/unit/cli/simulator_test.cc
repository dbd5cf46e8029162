#include "cli/simulator.h"

#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace baton::cli {
namespace {

TraceRequest At(double arrival, uint32_t prompt, uint32_t output, const std::string& group = "") {
  TraceRequest request;
  request.arrival_s = arrival;
  request.prompt_tokens = prompt;
  request.output_tokens = output;
  request.prefix_group = group;
  request.prefix_tokens = group.empty() ? 0 : prompt;
  request.is_session = !group.empty();
  return request;
}

// `rate` requests a second.
std::vector<TraceRequest> Poisson(double rate, int count, uint32_t prompt, uint32_t output) {
  std::mt19937 random(7);
  std::exponential_distribution<double> gap(rate);
  std::vector<TraceRequest> trace;
  double now = 0;
  for (int i = 0; i < count; ++i) {
    now += gap(random);
    trace.push_back(At(now, prompt, output));
  }
  return trace;
}

SimOptions Options() {
  SimOptions options;
  options.speed.prefill_step_s = 0.010;
  options.speed.prefill_token_s = 0.0001;
  options.speed.prefill_pair_s = 0;
  options.speed.decode_step_s = 0.020;
  options.speed.decode_sequence_s = 0.001;
  options.speed.decode_kv_token_s = 0;
  options.speed.transfer_s = 0.002;
  options.speed.rpc_s = 0.001;
  return options;
}

TEST(SimulatorTest, OneRequestTakesWhatItsStepsTake) {
  const auto result = Simulate({At(1, 100, 11)}, Options());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->completed, 1u);
  EXPECT_EQ(result->output_tokens, 11u);
  // rpc + step + rpc
  EXPECT_NEAR(result->ttft.mean(), 0.001 + 0.010 + 100 * 0.0001 + 0.001, 1e-6);
  EXPECT_EQ(result->itl.count(), 10u);
  // Nine steps, and the first, which the hand-over delays by what the first token's way home does
  // not hide.
  EXPECT_NEAR(result->itl.mean(), 0.021 + 0.002 / 10, 1e-4);
}

TEST(SimulatorTest, LongPromptTakesSeveralSteps) {
  SimOptions options = Options();
  options.speed.prefill_pair_s = 1e-8;
  const auto result = Simulate({At(0, 1024, 1)}, options);
  ASSERT_TRUE(result.ok());
  EXPECT_NEAR(result->ttft.mean(), 0.002 + 2 * 0.010 + 1024 * 0.0001 + 1024. * 1024 * 1e-8, 1e-5);
}

TEST(SimulatorTest, SessionsHitTheirPrefix) {
  std::vector<TraceRequest> trace;
  for (int turn = 0; turn < 5; ++turn) {
    trace.push_back(At(turn * 10, 640 * (turn + 1), 64, "a"));
    trace.push_back(At(turn * 10 + 0.01, 640 * (turn + 1), 64, "b"));
  }
  SimOptions options = Options();
  options.prefill = options.decode = 2;
  options.policy_options.local_prefill_tokens = 0;
  const auto sticky = Simulate(trace, options);
  ASSERT_TRUE(sticky.ok());
  // 640*(0+1+2+3+4)*2 of 640*(1+2+3+4+5)*2 prompt tokens come from the turn before.
  EXPECT_NEAR(sticky->prefix_hit_ratio, 10.0 / 15, 0.02);
  options.policy = "round_robin";
  trace.erase(trace.begin());  // so that sessions change sides each turn
  const auto other = Simulate(trace, options);
  EXPECT_LT(other->prefix_hit_ratio, sticky->prefix_hit_ratio);
}

TEST(SimulatorTest, DecodeComputesTheRestOfALongSession) {
  const auto result = Simulate({At(0, 640, 64, "a"), At(10, 720, 64, "a")}, Options());
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->local_prefills, 1u) << "16 tokens behind what decode holds";
  EXPECT_EQ(result->completed, 2u);
}

TEST(SimulatorTest, SingleTopologyNeedsNoPrefillWorkers) {
  SimOptions options = Options();
  options.prefill = 0;
  const auto result = Simulate(Poisson(5, 50, 200, 10), options);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->completed, 50u);
  EXPECT_EQ(result->local_prefills, 50u);
}

TEST(SimulatorTest, SmallPoolsMakeRequestsWaitAndLoseNone) {
  SimOptions options = Options();
  options.speed.decode_blocks = 24;
  options.prefill = 2;
  const auto result = Simulate(Poisson(50, 200, 400, 30), options);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->completed, 200u);
  EXPECT_LT(result->refused_by_workers, 200u) << "capacity is known, not polled";
}

TEST(SimulatorTest, OverloadIsRefusedEarlyAndTheRestIsGood) {
  SimOptions options = Options();
  options.deadline_s = 0.5;
  options.slo_ttft_s = 0.5;
  options.slo_tpot_s = 1;
  const auto trace = Poisson(200, 3000, 400, 2);  // a prefill worker does about 25 a second
  const auto refusing = Simulate(trace, options);
  options.admission.refuse_late = false;
  const auto patient = Simulate(trace, options);
  ASSERT_TRUE(refusing.ok() && patient.ok());
  EXPECT_EQ(refusing->completed + refusing->refused + refusing->late, 3000u);
  EXPECT_GT(refusing->refused, 1000u);
  EXPECT_LT(refusing->late, refusing->refused / 10) << "early, not late";
  EXPECT_GT(patient->late, 1000u);
  EXPECT_GE(refusing->goodput, 0.9 * patient->goodput);
}

TEST(SimulatorTest, PredictionsComeTrue) {
  const auto result = Simulate(Poisson(15, 500, 300, 5), Options());
  ASSERT_TRUE(result.ok());
  EXPECT_LT(result->prediction_error_s, 0.25 * result->ttft.mean());
}

TEST(SimulatorTest, SameTraceSameResult) {
  SimOptions options = Options();
  options.prefill = 3;
  options.decode = 3;
  options.policy = "power_of_two";
  const auto trace = Poisson(40, 300, 500, 20);
  const auto first = Simulate(trace, options);
  const auto second = Simulate(trace, options);
  EXPECT_EQ(first->ttft.mean(), second->ttft.mean());
  EXPECT_EQ(first->itl.mean(), second->itl.mean());
  EXPECT_EQ(first->duration_s, second->duration_s);
}

TEST(SimulatorTest, BestSplitFollowsTheWork) {
  SimOptions options = Options();
  options.slo_ttft_s = 0.5;
  options.slo_tpot_s = 0.06;
  options.speed.max_batch = 4;
  const auto long_prompts = FindBestSplit(Poisson(40, 400, 2000, 4), options, 10);
  ASSERT_TRUE(long_prompts.ok()) << long_prompts.status();
  const auto long_answers = FindBestSplit(Poisson(10, 400, 64, 60), options, 10);
  EXPECT_GT(long_prompts->prefill, 6);
  EXPECT_LT(long_answers->prefill, 4);
  EXPECT_EQ(long_answers->prefill + long_answers->decode, 10);
}

TEST(SimulatorTest, WhatCannotBeServedIsRefused) {
  SimOptions options = Options();
  options.speed.max_model_len = 1000;
  EXPECT_TRUE(absl::IsInvalidArgument(Simulate({At(0, 1000, 1)}, options).status()));
  options.decode = 0;
  EXPECT_TRUE(absl::IsInvalidArgument(Simulate({At(0, 10, 1)}, options).status()));
  options = Options();
  options.policy = "x";
  EXPECT_TRUE(absl::IsInvalidArgument(Simulate({At(0, 10, 1)}, options).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(FindBestSplit({At(0, 10, 1)}, Options(), 1).status()));
}

TEST(SimHistogramTest, PercentilesAreWithinOnePercent) {
  SimHistogram histogram;
  for (int i = 1; i <= 1000; ++i) histogram.Add(i / 1000.0);
  for (const double percent : {10.0, 50.0, 90.0, 99.0})
    EXPECT_NEAR(histogram.Percentile(percent), percent / 100, percent / 100 * 0.011);
  EXPECT_NEAR(histogram.mean(), 0.5005, 1e-9);
  EXPECT_EQ(SimHistogram().Percentile(50), 0);
}

}  // namespace
}  // namespace baton::cli
