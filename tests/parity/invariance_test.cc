// The same bits for any chunking, batch, block placement and backend, in every weight and KV format
// (DESIGN section 3). All comparisons are exact.

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "engine/runtime/model_runner.h"
#include "gtest/gtest.h"
#include "tests/support/engine_steps.h"

namespace baton::testing_support {
namespace {

using Logits = std::vector<std::vector<float>>;

std::unique_ptr<runtime::ModelRunner> MakeRunner(const std::string& model,
                                                 const std::string& backend,
                                                 const std::string& weight_dtype,
                                                 const std::string& kv_dtype) {
  runtime::ModelRunnerOptions options = SmallOptions(SourcePath("tests/data/models/" + model));
  options.backend = backend;
  options.weight_dtype = weight_dtype;
  options.kv_dtype = kv_dtype;
  options.max_model_len = 256;
  options.backend_options.num_threads = 2;
  absl::StatusOr<std::unique_ptr<runtime::ModelRunner>> runner =
      runtime::ModelRunner::Create(options);
  EXPECT_TRUE(runner.ok()) << runner.status();
  return runner.ok() ? *std::move(runner) : nullptr;
}

// Model, backend, weight dtype, KV dtype.
using Param = std::tuple<std::string, std::string, std::string, std::string>;

class InvarianceTest : public ::testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    const auto& [model, backend, weight_dtype, kv_dtype] = GetParam();
    runner_ = MakeRunner(model, backend, weight_dtype, kv_dtype);
    ASSERT_NE(runner_, nullptr);
    driver_ = std::make_unique<StepDriver>(*runner_);
    tokens_ = RandomTokens(150, runner_->config().vocab, 1);
    TestSequence sequence;
    whole_ = driver_->Feed(&sequence, tokens_, 150);
    driver_->Release(&sequence);
  }

  std::unique_ptr<runtime::ModelRunner> runner_;
  std::unique_ptr<StepDriver> driver_;
  std::vector<uint32_t> tokens_;
  Logits whole_;
};

// Case 10.3
TEST_P(InvarianceTest, ChunksDoNotChangeABit) {
  for (const int chunk : {1, 17, 64, 97}) {
    TestSequence sequence;
    EXPECT_TRUE(driver_->Feed(&sequence, tokens_, chunk) == whole_) << "chunk " << chunk;
    driver_->Release(&sequence);
  }
}

// Case 10.3: blocks that another sequence has filled serve as a cached prefix.
TEST_P(InvarianceTest, CachedPrefixDoesNotChangeABit) {
  TestSequence first;
  driver_->Feed(&first, absl::MakeConstSpan(tokens_).first(128), 100);
  for (const size_t cached_blocks : {1, 2}) {
    TestSequence second;
    second.blocks.assign(first.blocks.begin(), first.blocks.begin() + cached_blocks);
    second.cached.assign(tokens_.begin(), tokens_.begin() + cached_blocks * 64);
    const Logits rest =
        driver_->Feed(&second, absl::MakeConstSpan(tokens_).subspan(cached_blocks * 64), 150);
    EXPECT_TRUE(rest == Logits(whole_.begin() + cached_blocks * 64, whole_.end()))
        << cached_blocks << " blocks";
  }
}

// Case 14.1: three sequences in one step, prefill beside decode.
TEST_P(InvarianceTest, BatchNeighboursDoNotChangeABit) {
  TestSequence a, b, c;
  const std::vector<uint32_t> others = RandomTokens(200, runner_->config().vocab, 2);
  driver_->Feed(&b, absl::MakeConstSpan(others).first(70), 70);
  Logits logits;
  size_t next_b = 70, next_c = 0;
  for (size_t first = 0; first < tokens_.size();) {
    const size_t last = std::min(first + (first % 3 == 0 ? 1 : 40), tokens_.size());
    std::vector<TestPart> parts = {{&b, {others[next_b++]}},
                                   {&a, {tokens_.begin() + first, tokens_.begin() + last}},
                                   {&c, {others.begin() + next_c, others.begin() + next_c + 13}}};
    next_c += 13;
    std::rotate(parts.begin(), parts.begin() + first % 3, parts.end());
    const size_t own = (1 + 3 - first % 3) % 3;
    auto step = driver_->Step(std::move(parts));
    logits.insert(logits.end(), step[own].begin(), step[own].end());
    first = last;
  }
  EXPECT_TRUE(logits == whole_);
}

std::string ParamName(const ::testing::TestParamInfo<Param>& info) {
  std::string name = std::get<0>(info.param) + "_" + std::get<1>(info.param) + "_" +
                     std::get<2>(info.param) + "_kv_" + std::get<3>(info.param);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

const auto kWeightDtypes = ::testing::Values("f32", "bf16", "int8", "q4");
const auto kKvDtypes = ::testing::Values("fp8", "fp8_dynamic", "bf16", "f32");

INSTANTIATE_TEST_SUITE_P(AllFormats,
                         InvarianceTest,
                         ::testing::Combine(::testing::Values("random-qwen3-gqa2-tied"),
                                            ::testing::Values("cpu"),
                                            kWeightDtypes,
                                            kKvDtypes),
                         ParamName);
// ref is slow, and BackendsAgreeTest binds it to cpu in every format.
INSTANTIATE_TEST_SUITE_P(Ref,
                         InvarianceTest,
                         ::testing::Combine(::testing::Values("random-qwen3-gqa2-tied"),
                                            ::testing::Values("ref"),
                                            ::testing::Values("bf16"),
                                            kKvDtypes),
                         ParamName);
// Other shapes: widths that are no multiple of 32, bias, head dim 128, several query heads per KV
// head.
INSTANTIATE_TEST_SUITE_P(Shapes,
                         InvarianceTest,
                         ::testing::Combine(::testing::Values("random-qwen3-gqa5-shards",
                                                              "random-qwen2-gqa2-tied",
                                                              "random-llama-gqa4-hd128"),
                                            ::testing::Values("cpu"),
                                            ::testing::Values("bf16", "int8"),
                                            ::testing::Values("fp8")),
                         ParamName);

// Weight dtype, KV dtype.
class BackendsAgreeTest : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(BackendsAgreeTest, CpuGivesTheBitsOfRef) {
  const auto& [weight_dtype, kv_dtype] = GetParam();
  Logits logits[2];
  for (const int i : {0, 1}) {
    std::unique_ptr<runtime::ModelRunner> runner =
        MakeRunner("random-qwen3-gqa4-yarn", i == 0 ? "ref" : "cpu", weight_dtype, kv_dtype);
    ASSERT_NE(runner, nullptr);
    StepDriver driver(*runner);
    TestSequence sequence;
    logits[i] = driver.Feed(&sequence, RandomTokens(140, runner->config().vocab, 3), 70);
  }
  EXPECT_TRUE(logits[0] == logits[1]);
}

INSTANTIATE_TEST_SUITE_P(AllFormats,
                         BackendsAgreeTest,
                         ::testing::Combine(kWeightDtypes, kKvDtypes));

// Case 14.1
TEST(ConcurrencyTest, TwelvePromptsTogetherGiveTheirSoloIds) {
  constexpr int kPrompts = 12, kRounds = 10, kAnswer = 8;
  std::unique_ptr<runtime::ModelRunner> runner =
      MakeRunner("random-qwen3-gqa2-tied", "cpu", "bf16", "fp8");
  ASSERT_NE(runner, nullptr);
  StepDriver driver(*runner);
  std::vector<std::vector<uint32_t>> prompts, solo(kPrompts);
  for (int p = 0; p < kPrompts; ++p) {
    prompts.push_back(RandomTokens(5 + 9 * p, runner->config().vocab, 100 + p));
    TestSequence sequence;
    uint32_t next = ArgMax(driver.Feed(&sequence, prompts[p], 512).back());
    for (int i = 0; i < kAnswer; ++i) {
      solo[p].push_back(next);
      next = ArgMax(driver.Feed(&sequence, {next}, 1)[0]);
    }
    driver.Release(&sequence);
  }
  std::mt19937 random(5);
  std::vector<int> order(kPrompts);
  for (int p = 0; p < kPrompts; ++p) order[p] = p;
  for (int round = 0; round < kRounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    std::vector<TestSequence> sequences(kPrompts);
    std::vector<std::vector<uint32_t>> answers(kPrompts);
    // Prompts join one by one, each in two chunks, while the ones before decode.
    for (int step = 0;
         std::any_of(answers.begin(), answers.end(), [](auto& a) { return a.size() < kAnswer; });
         ++step) {
      std::vector<TestPart> parts;
      std::vector<int> who;
      for (int i = 0; i < kPrompts && i <= step; ++i) {
        const int p = order[i];
        const size_t cached = sequences[p].cached.size();
        if (answers[p].size() == kAnswer) continue;
        const std::vector<uint32_t>& prompt = prompts[p];
        const auto half = prompt.begin() + prompt.size() / 2;
        if (cached == 0) {
          parts.push_back({&sequences[p], {prompt.begin(), half}});
        } else if (cached < prompt.size()) {
          parts.push_back({&sequences[p], {half, prompt.end()}});
        } else {
          parts.push_back({&sequences[p], {answers[p].back()}});
        }
        who.push_back(p);
      }
      const auto logits = driver.Step(parts);
      for (size_t i = 0; i < who.size(); ++i) {
        const int p = who[i];
        if (sequences[p].cached.size() >= prompts[p].size())
          answers[p].push_back(ArgMax(logits[i].back()));
      }
    }
    EXPECT_EQ(answers, solo) << "round " << round;
    for (TestSequence& sequence : sequences) driver.Release(&sequence);
  }
}

}  // namespace
}  // namespace baton::testing_support
