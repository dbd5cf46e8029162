// Decode steps as CUDA graphs on the emulated device: the same bits as operations issued one by
// one, however batches, drafts and contexts grow, and what happens when a stream cannot be
// captured.

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/ops/cuda/pass_arrays.h"
#include "engine/runtime/model_runner.h"
#include "gtest/gtest.h"
#include "tests/simt/fake_cudart.h"
#include "tests/simt/simt.h"

namespace baton::simt {
namespace {

using ops::cuda::PassShape;
using ops::cuda::ShapeOfPass;
using runtime::ModelRunner;
using runtime::ModelRunnerOptions;

constexpr int kVocabStep = 37;

std::unique_ptr<ModelRunner> NewRunner(const std::string& model, bool eager) {
  ModelRunnerOptions options;
  options.model_path = absl::StrCat(BATON_SOURCE_DIR, "/tests/data/models/", model);
  options.backend = "cuda";
  options.weight_dtype = "bf16";
  options.max_model_len = 512;
  options.max_step_tokens = options.max_logit_rows = 160;
  options.num_blocks = 24;
  options.backend_options.enforce_eager = eager;
  absl::StatusOr<std::unique_ptr<ModelRunner>> runner = ModelRunner::Create(options);
  EXPECT_TRUE(runner.ok()) << runner.status();
  return runner.ok() ? *std::move(runner) : nullptr;
}

// Three sequences; a step names how many tokens each brings.
class Script {
 public:
  explicit Script(ModelRunner* runner) : runner_(*runner) {}

  // Logits of all tokens of the step.
  std::vector<float> Step(std::vector<int> counts) {
    const std::vector<kv::BlockId> blocks[] = {
        {7, 2, 9, 20, 21, 22}, {4, 11, 1, 12, 13, 14}, {5, 6, 8, 10, 15, 16}};
    std::vector<std::vector<uint32_t>> tokens(counts.size());
    std::vector<std::vector<int>> rows(counts.size());
    std::vector<runtime::StepSequence> sequences;
    for (size_t s = 0; s < counts.size(); ++s) {
      for (int i = 0; i < counts[s]; ++i) {
        tokens[s].push_back(static_cast<uint32_t>((lengths_[s] + i) * kVocabStep + 11 * s) %
                            runner_.config().vocab);
        rows[s].push_back(i);
      }
      if (counts[s] > 0) sequences.push_back({tokens[s], lengths_[s], blocks[s], rows[s]});
      lengths_[s] += counts[s];
    }
    absl::Span<float> logits;
    const absl::Status status = runner_.Step(sequences, nullptr, &logits, nullptr);
    EXPECT_TRUE(status.ok()) << status;
    return {logits.begin(), logits.end()};
  }

 private:
  ModelRunner& runner_;
  int lengths_[3] = {0, 0, 0};
};

std::vector<std::vector<float>> RunScript(ModelRunner* runner, bool grow_table = false) {
  Script script(runner);
  std::vector<std::vector<float>> logits;
  const auto step = [&](std::vector<int> counts) { logits.push_back(script.Step(counts)); };
  step({40, 60, 20});
  for (int i = 0; i < 4; ++i) step({1, 1, 1});  // over the end of a block
  for (int i = 0; i < 3; ++i) step({3, 2, 1});  // a verify
  for (int i = 0; i < 3; ++i) step({8, 8, 0});  // the most drafts
  for (int i = 0; i < 2; ++i) step({0, 1, 0});
  if (!grow_table) return logits;
  for (int i = 0; i < 2; ++i) step({100, 0, 0});
  for (int i = 0; i < 3; ++i) step({1, 1, 1});  // now with more than four blocks
  return logits;
}

class DecodeGraphs : public testing::Test {
 protected:
  void SetUp() override {
    GetRuntimeConfig().lazy = true;
    GetConfig().order = Order::kDescending;
    GetRuntimeStats() = RuntimeStats();
  }
  void TearDown() override {
    GetRuntimeConfig() = RuntimeConfig();
    GetConfig() = Config();
  }
};

TEST_F(DecodeGraphs, GiveTheBitsOfOperationsIssuedOneByOne) {
  const auto eager = NewRunner("chain", true);
  const std::vector<std::vector<float>> want = RunScript(eager.get(), true);
  EXPECT_EQ(GetRuntimeStats().graph_launches, 0u);
  const auto graphs = NewRunner("chain", false);
  EXPECT_EQ(RunScript(graphs.get(), true), want);
  // All repeats of a shape: 3 + 2 + 2 + 1 + 2.
  EXPECT_EQ(GetRuntimeStats().graph_launches, 10u);
}

TEST_F(DecodeGraphs, FormatsWithoutTensorCoresAndModelsWithBiases) {
  for (const char* model : {"random-qwen2-gqa2-tied", "random-qwen3-gqa5-shards"}) {
    const auto eager = NewRunner(model, true), graphs = NewRunner(model, false);
    EXPECT_EQ(RunScript(graphs.get()), RunScript(eager.get())) << model;
  }
}

TEST_F(DecodeGraphs, WhereNothingCanBeCapturedStepsGoOnWithoutGraphs) {
  const auto eager = NewRunner("chain", true), graphs = NewRunner("chain", false);
  GetRuntimeConfig().graphs = false;
  testing::internal::CaptureStderr();
  Script with(graphs.get()), without(eager.get());
  for (const int count : {3, 1, 1, 1}) {
    const std::vector<int> counts(3, count);
    EXPECT_EQ(with.Step(counts), without.Step(counts));
  }
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("cuda graph: capture failed"), std::string::npos) << log;
  EXPECT_EQ(GetRuntimeStats().graph_launches, 0u);
}

// Padding has no slot: a step of three sequences, which is padded to four, writes their own rows
// and nothing else.
TEST_F(DecodeGraphs, PaddingWritesNoKeysAndValues) {
  const auto runner = NewRunner("chain", false);
  Script script(runner.get());
  script.Step({2, 2, 2});
  const size_t bytes = runner->layout().block_bytes() * runner->layout().num_layers;
  const auto read = [&](kv::BlockId block) {
    std::vector<uint8_t> data(bytes);
    runner->ReadBlock(block, data.data());
    return data;
  };
  const std::vector<uint8_t> first = read(0), own = read(7);
  for (int i = 0; i < 3; ++i) script.Step({1, 1, 1});
  EXPECT_EQ(read(0), first);
  EXPECT_NE(read(7), own);
}

TEST(PassShapes, AreFewAndHoldThePass) {
  std::vector<int32_t> ids(600), rows(600);
  std::vector<ops::SequenceView> sequences;
  const auto shape = [&](int count, int queries, int context, int wanted, int max_tokens) {
    sequences.assign(count, ops::SequenceView{.query_len = queries, .context_len = context});
    ops::PassInputs inputs;
    inputs.ids = absl::MakeConstSpan(ids).first(count * queries);
    inputs.logit_rows = absl::MakeConstSpan(rows).first(wanted);
    inputs.sequences = sequences;
    return ShapeOfPass(inputs, max_tokens);
  };
  EXPECT_EQ(shape(1, 1, 1, 1, 512), (PassShape{1, 1, 1, 1, 4}));
  EXPECT_EQ(shape(5, 1, 257, 5, 512), (PassShape{8, 8, 8, 1, 16}));
  EXPECT_EQ(shape(5, 3, 1025, 15, 512), (PassShape{16, 8, 16, 4, 64}));
  EXPECT_EQ(shape(5, 5, 4097, 5, 512), (PassShape{32, 8, 8, 8, 256}));
  EXPECT_EQ(shape(9, 1, 10, 9, 10).tokens, 10) << "never more than activations hold";
  EXPECT_EQ(shape(11, 1, 10, 11, 10), PassShape()) << "more tokens than activations hold";
  EXPECT_EQ(shape(1, 9, 20, 1, 512), PassShape()) << "more queries than the decode kernel takes";
  EXPECT_EQ(shape(1, 1, 20, 0, 512), PassShape()) << "no logits wanted";
  EXPECT_EQ(shape(513, 1, 20, 513, 600), PassShape());
}

}  // namespace
}  // namespace baton::simt
