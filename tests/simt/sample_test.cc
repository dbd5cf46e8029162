// The sampling kernel against engine/runtime's sampler, which it must agree with token for token:
// same noise, filters, order of ties, penalties, log probabilities, refusals. And the copies of
// blocks.

#include "engine/runtime/sampler.h"

#include <cmath>
#include <limits>
#include <vector>

#include "engine/ops/cuda/kernels.h"
#include "gtest/gtest.h"
#include "tests/simt/device_array.h"
#include "tests/simt/random_values.h"
#include "tests/simt/schedules.h"

namespace baton::simt {
namespace {

using ops::SampleResult;
using ops::SampleRow;
using ops::SampleStatus;
using ops::TokenEdit;
using runtime::SamplingParams;

struct Request {
  SamplingParams params;
  uint32_t choice = 0, position = 0, output_tokens = 0;
  runtime::TokenCounts counts;
  std::vector<float> logits;
};

std::vector<SampleResult> RunKernel(const std::vector<Request>& requests,
                                    int vocab,
                                    int num_tokens) {
  std::vector<SampleRow> rows;
  std::vector<TokenEdit> edits;
  std::vector<float> logits;
  for (const Request& request : requests) {
    const SamplingParams& p = request.params;
    SampleRow row;
    row.temperature = p.temperature;
    row.top_p = p.top_p;
    row.min_p = p.min_p;
    row.top_k = p.top_k;
    row.seed = p.seed;
    row.choice = request.choice;
    row.position = request.position;
    row.repetition_penalty = p.repetition_penalty;
    row.presence_penalty = p.presence_penalty;
    row.frequency_penalty = p.frequency_penalty;
    row.num_logprobs = p.logprobs;
    row.first_edit = static_cast<int32_t>(edits.size());
    EXPECT_TRUE(
        AppendTokenEdits(p, request.output_tokens, request.counts, num_tokens, &edits).ok());
    row.num_edits = static_cast<int32_t>(edits.size()) - row.first_edit;
    rows.push_back(row);
    logits.insert(logits.end(), request.logits.begin(), request.logits.end());
  }
  edits.emplace_back();
  DeviceArray<SampleRow> device_rows(rows);
  DeviceArray<TokenEdit> device_edits(edits);
  DeviceArray<float> device_logits(logits);
  DeviceArray<SampleResult> results(rows.size());
  results.Fill();  // rows have fewer log probabilities than there is room for
  EXPECT_EQ(ops::cuda::Sample({.logits = device_logits.data(),
                               .rows = device_rows.data(),
                               .edits = device_edits.data(),
                               .results = results.data(),
                               .num_rows = static_cast<int>(rows.size()),
                               .vocab = vocab,
                               .num_tokens = num_tokens},
                              nullptr),
            cudaSuccess);
  return results.Get();
}

void ExpectSamplersAgree(const std::vector<Request>& requests, int vocab, int num_tokens) {
  const std::vector<SampleResult> got = RunKernel(requests, vocab, num_tokens);
  runtime::Sampler sampler(vocab, num_tokens);
  for (size_t r = 0; r < requests.size(); ++r) {
    const Request& request = requests[r];
    SCOPED_TRACE(testing::Message()
                 << "row " << r << " V=" << vocab << " T=" << request.params.temperature
                 << " top_k=" << request.params.top_k << " top_p=" << request.params.top_p
                 << " min_p=" << request.params.min_p << " logprobs=" << request.params.logprobs);
    std::vector<float> logits = request.logits;
    const auto want = sampler.Sample(request.params, request.choice, request.position,
                                     request.output_tokens, request.counts, absl::MakeSpan(logits));
    ASSERT_TRUE(want.ok()) << want.status();
    ASSERT_EQ(got[r].status, SampleStatus::kOk);
    EXPECT_EQ(got[r].id, static_cast<int32_t>(want->id));
    if (request.params.logprobs >= 0) {
      EXPECT_NEAR(got[r].logprob, want->logprob, 1e-6f * std::fabs(want->logprob) + 1e-6f);
    }
    ASSERT_EQ(got[r].num_top, static_cast<int32_t>(want->top.size()));
    for (size_t i = 0; i < want->top.size(); ++i) {
      EXPECT_EQ(got[r].top_ids[i], static_cast<int32_t>(want->top[i].first));
      EXPECT_NEAR(got[r].top_logprobs[i], want->top[i].second, 1e-5f);
    }
  }
}

Request RandomRequest(Random* random, int vocab, int num_tokens) {
  Request request;
  SamplingParams& p = request.params;
  const auto one_of = [&](std::initializer_list<float> values) {
    return *(values.begin() + random->Between(0, static_cast<int>(values.size()) - 1));
  };
  p.temperature = one_of({0.0f, 0.3f, 0.7f, 1.0f, 1.5f, 100.0f, 1e-4f});
  p.top_k = random->Pick({0, 0, 1, 2, 20, 64, num_tokens, num_tokens + 5});
  p.top_p = one_of({1.0f, 1.0f, 0.95f, 0.8f, 0.3f, 1e-6f, 0.0f});
  p.min_p = one_of({0.0f, 0.0f, 0.05f, 0.9f});
  p.seed = static_cast<uint64_t>(random->Between(0, 1 << 30)) << 30;
  p.repetition_penalty = one_of({1.0f, 1.1f, 0.8f});
  p.presence_penalty = one_of({0.0f, 0.5f});
  p.frequency_penalty = one_of({0.0f, 0.3f});
  p.logprobs = random->Pick({-1, 0, 1, 5, 20});
  request.choice = static_cast<uint32_t>(random->Between(0, 3));
  request.position = static_cast<uint32_t>(random->Between(0, 5000));
  request.logits = random->Values(vocab, one_of({0.1f, 3.0f, 8.0f}));
  if (random->Between(0, 3) == 0) {  // many ties
    for (float& logit : request.logits) logit = std::round(logit);
  }
  for (const int id : random->Distinct(std::min(6, num_tokens), num_tokens)) {
    switch (random->Between(0, 4)) {
      case 0:
        p.logit_bias.emplace_back(id, one_of({-100.0f, 2.0f, 3e38f}));
        break;
      case 1:
        request.counts.AddPrompt({{static_cast<uint32_t>(id)}});
        break;
      case 2:
        request.counts.AddOutput(static_cast<uint32_t>(id));
        request.counts.AddOutput(static_cast<uint32_t>(id));
        break;
      case 3:
        p.stop_token_ids.push_back(static_cast<uint32_t>(id));
        break;
      default:
        break;
    }
  }
  p.min_tokens = random->Between(0, 1) == 0 ? 0 : 10;
  request.output_tokens = static_cast<uint32_t>(random->Between(0, 20));
  return request;
}

class SampleKernelTest : public ScheduleTest {};
BATON_INSTANTIATE_SCHEDULES(SampleKernelTest);

TEST_P(SampleKernelTest, AgreesWithTheSampler) {
  Random random(77);
  for (const auto& [vocab, num_tokens] : {std::pair{8, 8}, {97, 90}, {3000, 3000}, {1500, 1333}}) {
    std::vector<Request> requests;
    for (int r = 0; r < 30; ++r) requests.push_back(RandomRequest(&random, vocab, num_tokens));
    ExpectSamplersAgree(requests, vocab, num_tokens);
    if (testing::Test::HasFailure()) return;
  }
}

TEST_P(SampleKernelTest, RefusesWhatTheSamplerRefuses) {
  Random random(5);
  const int vocab = 50;
  std::vector<Request> requests(4);
  for (Request& request : requests) request.logits = random.Values(vocab);
  requests[0].logits[49] = NAN;
  requests[1].logits[7] = -INFINITY;
  requests[2].params.min_tokens = 1;
  for (uint32_t id = 0; id < 40; ++id) requests[2].params.stop_token_ids.push_back(id);
  const std::vector<SampleResult> got = RunKernel(requests, vocab, 40);
  EXPECT_EQ(got[0].status, SampleStatus::kNotFinite);
  EXPECT_EQ(got[1].status, SampleStatus::kNotFinite);
  EXPECT_EQ(got[2].status, SampleStatus::kAllMasked);
  EXPECT_EQ(got[3].status, SampleStatus::kOk) << "a bad row spoils no other";
  EXPECT_EQ(got[0].id, -1);
}

class BlockCopyTest : public ScheduleTest {};
BATON_INSTANTIATE_SCHEDULES(BlockCopyTest);

TEST_P(BlockCopyTest, GatherThenScatterMovesTheBlocksAndNothingElse) {
  constexpr int kBytes = 16 * 1100, kPoolBlocks = 6;
  std::vector<uint8_t> bytes(kBytes * kPoolBlocks);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 131 + i / 977);
  DeviceArray<uint8_t> pool(bytes), staging(4 * kBytes), other(bytes.size());
  staging.Fill();
  other.Fill();
  DeviceArray<int32_t> from(std::vector<int32_t>{5, 0, -1, 3}),
      to(std::vector<int32_t>{1, 4, 2, -1});
  ASSERT_EQ(ops::cuda::GatherBlocks({.pool = pool.data(),
                                     .staging = staging.data(),
                                     .blocks = from.data(),
                                     .block_bytes = kBytes,
                                     .num_blocks = 4},
                                    nullptr),
            cudaSuccess);
  ASSERT_EQ(ops::cuda::ScatterBlocks({.pool = other.data(),
                                      .staging = staging.data(),
                                      .blocks = to.data(),
                                      .block_bytes = kBytes,
                                      .num_blocks = 4},
                                     nullptr),
            cudaSuccess);
  const std::vector<uint8_t> got = other.Get();
  for (int block = 0; block < kPoolBlocks; ++block) {
    const int source = block == 1 ? 5 : block == 4 ? 0 : -1;
    for (int i = 0; i < kBytes; ++i) {
      const uint8_t want = source < 0 ? 0xff : bytes[static_cast<size_t>(source) * kBytes + i];
      ASSERT_EQ(got[static_cast<size_t>(block) * kBytes + i], want) << block << " " << i;
    }
  }
}

TEST(SampleLaunchers, RefuseWhatTheKernelsCannotBear) {
  EXPECT_EQ(ops::cuda::Sample({.num_rows = 1, .vocab = 4, .num_tokens = 5}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(ops::cuda::GatherBlocks({.block_bytes = 24, .num_blocks = 1}, nullptr),
            cudaErrorInvalidValue);
  GetStats() = Stats();
  EXPECT_EQ(ops::cuda::Sample({.vocab = 4, .num_tokens = 4}, nullptr), cudaSuccess);
  EXPECT_EQ(ops::cuda::ScatterBlocks({.block_bytes = 16}, nullptr), cudaSuccess);
  EXPECT_EQ(GetStats().launches, 0u);
}

}  // namespace
}  // namespace baton::simt
