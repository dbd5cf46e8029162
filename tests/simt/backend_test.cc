// The CUDA backend as a whole on the emulated device, with lazy streams: its host code, kernels and
// matrix products run real models step by step. Logits must be those of the cpu backend but for
// rounding, and greedy ids the same wherever two tokens are not closer than that.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/ops/backend.h"
#include "engine/runtime/model_runner.h"
#include "gtest/gtest.h"
#include "tests/simt/fake_cudart.h"
#include "tests/simt/simt.h"

namespace baton::simt {
namespace {

using runtime::ModelRunner;
using runtime::ModelRunnerOptions;

struct Setting {
  const char* model;
  const char* weights;
  const char* kv;
};

ModelRunnerOptions Options(const Setting& setting, const std::string& backend) {
  ModelRunnerOptions options;
  options.model_path = absl::StrCat(BATON_SOURCE_DIR, "/tests/data/models/", setting.model);
  options.backend = backend;
  options.weight_dtype = setting.weights;
  options.kv_dtype = setting.kv;
  options.max_model_len = 256;
  options.max_step_tokens = 128;
  options.num_blocks = 12;
  options.backend_options.num_threads = 1;
  return options;
}

// Two sequences with blocks of their own, fed in chunks, then one token at a time, then both with
// several: prefill over a cached prefix, decode and verify. Returns the logits of every token.
std::vector<std::vector<float>> RunModel(ModelRunner* runner) {
  const std::vector<kv::BlockId> blocks[2] = {{7, 2, 9}, {4, 11, 0}};
  const int vocab = runner->config().vocab;
  int lengths[2] = {0, 0};
  std::vector<std::vector<float>> logits;
  const auto step = [&](int first_count, int second_count) {
    std::vector<uint32_t> tokens[2];
    std::vector<int> rows[2];
    std::vector<runtime::StepSequence> sequences;
    const int counts[2] = {first_count, second_count};
    for (int s = 0; s < 2; ++s) {
      for (int i = 0; i < counts[s]; ++i) {
        tokens[s].push_back(static_cast<uint32_t>((lengths[s] + i) * 37 + 11 * s) % vocab);
        rows[s].push_back(i);
      }
      if (counts[s] > 0) sequences.push_back({tokens[s], lengths[s], blocks[s], rows[s]});
      lengths[s] += counts[s];
    }
    absl::Span<float> out;
    const absl::Status status = runner->Step(sequences, nullptr, &out, nullptr);
    ASSERT_TRUE(status.ok()) << status;
    for (int row = 0; row < first_count + second_count; ++row) {
      const absl::Span<float> values = out.subspan(static_cast<size_t>(row) * vocab, vocab);
      logits.emplace_back(values.begin(), values.end());
    }
  };
  step(40, 20);  // both by the prefill kernel
  step(30, 1);   // over a cached prefix, beside a decode
  step(1, 1);
  step(5, 8);  // a verify
  step(1, 0);
  return logits;
}

size_t ArgMax(const std::vector<float>& row) {
  return std::max_element(row.begin(), row.end()) - row.begin();
}

double RelativeError(const std::vector<std::vector<float>>& got,
                     const std::vector<std::vector<float>>& want) {
  double error = 0, size = 0;
  for (size_t row = 0; row < want.size(); ++row) {
    for (size_t i = 0; i < want[row].size(); ++i) {
      const double difference = double{got[row][i]} - want[row][i];
      error += difference * difference;
      size += double{want[row][i]} * want[row][i];
    }
  }
  return std::sqrt(error / size);
}

std::vector<std::vector<float>> LogitsOf(const Setting& setting, const std::string& backend) {
  const auto runner = ModelRunner::Create(Options(setting, backend));
  EXPECT_TRUE(runner.ok()) << runner.status();
  if (!runner.ok()) return {};
  return RunModel(runner->get());
}

// Both backends round; neither is the truth. So both are measured against the same model in f32,
// and the CUDA backend may be no further from it than the cpu backend is, with room for chance.
void ExpectSameModel(const Setting& setting) {
  SCOPED_TRACE(testing::Message() << setting.model << " " << setting.weights << " " << setting.kv);
  constexpr double kChance = 1.5, kF32Rounding = 1e-4;
  const std::vector<std::vector<float>> cpu = LogitsOf(setting, "cpu"),
                                        cuda = LogitsOf(setting, "cuda"),
                                        exact = LogitsOf({setting.model, "f32", "f32"}, "cpu");
  ASSERT_EQ(cpu.size(), cuda.size());
  ASSERT_FALSE(cpu.empty());
  EXPECT_LE(RelativeError(cuda, exact), kChance * RelativeError(cpu, exact) + kF32Rounding);
  for (size_t row = 0; row < cpu.size(); ++row) {
    double largest = 0;
    for (size_t i = 0; i < cpu[row].size(); ++i) {
      ASSERT_TRUE(std::isfinite(cuda[row][i])) << "row " << row;
      largest = std::max(largest, std::fabs(double{cuda[row][i]} - cpu[row][i]));
    }
    // Ids may differ only where the two best are closer than the logits' own difference.
    const size_t best = ArgMax(cpu[row]), other = ArgMax(cuda[row]);
    EXPECT_LE(cpu[row][best] - cpu[row][other], 2 * largest) << "row " << row;
  }
}

class BackendOnTheEmulatedDevice : public testing::TestWithParam<uint64_t> {
 protected:
  void SetUp() override {
    GetRuntimeConfig().lazy = true;
    GetRuntimeConfig().seed = GetParam();
    GetConfig().order = GetParam() % 2 == 0 ? Order::kDescending : Order::kRandom;
  }
  void TearDown() override {
    GetRuntimeConfig() = RuntimeConfig();
    GetConfig() = Config();
  }
};

TEST_P(BackendOnTheEmulatedDevice, RunsQwen3) { ExpectSameModel({"tiny-qwen3", "bf16", "fp8"}); }

INSTANTIATE_TEST_SUITE_P(Seeds, BackendOnTheEmulatedDevice, testing::Values(1, 2));

TEST(BackendModels, OtherShapesFormatsAndWeights) {
  ExpectSameModel({"random-qwen3-gqa5-shards", "bf16", "fp8_dynamic"});
  ExpectSameModel({"random-qwen3-gqa1-hd128", "bf16", "fp8"});
  ExpectSameModel({"random-qwen2-gqa2-tied", "bf16", "fp8_dynamic"});  // with biases
  ExpectSameModel({"random-llama-gqa2-yarn", "bf16", "bf16"});
  ExpectSameModel({"random-qwen3-gqa4-yarn", "f32", "f32"});
  ExpectSameModel({"random-llama-gqa4-hd128", "f32", "fp8_dynamic"});
}

TEST(BackendModels, BlocksAreCopiedOnTheDevice) {
  const Setting setting = {"tiny-qwen3", "bf16", "fp8"};
  const auto runner = ModelRunner::Create(Options(setting, "cuda"));
  ASSERT_TRUE(runner.ok()) << runner.status();
  const auto run = [&](std::vector<uint32_t> tokens, int start, kv::BlockId block) {
    const std::vector<int> rows = {static_cast<int>(tokens.size()) - 1};
    const std::vector<kv::BlockId> table = {block};
    absl::Span<float> out;
    EXPECT_TRUE((*runner)->Step({{tokens, start, table, rows}}, nullptr, &out, nullptr).ok());
    return std::vector<float>(out.begin(), out.end());
  };
  run({1, 2, 3, 4, 5}, 0, 3);
  (*runner)->CopyBlock(3, 8);
  const std::vector<float> original = run({6}, 5, 3), copy = run({6}, 5, 8);
  EXPECT_EQ(original, copy);
}

}  // namespace
}  // namespace baton::simt
