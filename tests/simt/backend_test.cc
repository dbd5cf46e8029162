// The CUDA backend as a whole on the emulated device, with lazy streams: its host code, kernels and
// matrix products run real models step by step. Logits must be those of the cpu backend but for
// rounding, and greedy ids the same wherever two tokens are not closer than that.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "engine/ops/backend.h"
#include "engine/runtime/model_runner.h"
#include "gtest/gtest.h"
#include "tests/simt/fake_cudart.h"
#include "tests/simt/model_case.h"
#include "tests/simt/simt.h"

namespace baton::simt {
namespace {

using runtime::ModelRunner;

size_t ArgMax(const std::vector<float>& row) {
  return std::max_element(row.begin(), row.end()) - row.begin();
}

// Both backends round; neither is the truth. So both are measured against the same model in f32,
// and the CUDA backend may be no further from it than the cpu backend is, with room for chance.
void ExpectSameModel(const ModelSetting& setting) {
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
  const ModelSetting setting = {"tiny-qwen3", "bf16", "fp8"};
  const auto runner = ModelRunner::Create(OptionsOf(setting, "cuda"));
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
