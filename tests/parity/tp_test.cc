// Two ranks give the bits of one: logits, and keys and values, in every weight and KV format
// (DESIGN section 3). All comparisons are exact.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "engine/runtime/model_runner.h"
#include "gtest/gtest.h"
#include "tests/support/engine_steps.h"

namespace baton::testing_support {
namespace {

using Logits = std::vector<std::vector<float>>;
using Formats = std::tuple<std::string, std::string>;  // weight dtype, KV dtype

struct RunnerSetup {
  std::string model = "random-qwen3-gqa2-tied";
  std::string backend = "cpu";
  std::string weight_dtype = "bf16";
  std::string kv_dtype = "fp8";
  std::string isa = "auto";
  int num_threads = 2;
};

absl::StatusOr<std::unique_ptr<runtime::ModelRunner>> TryRunner(const RunnerSetup& setup, int tp) {
  runtime::ModelRunnerOptions options =
      SmallOptions(SourcePath("tests/data/models/" + setup.model));
  options.backend = setup.backend;
  options.weight_dtype = setup.weight_dtype;
  options.kv_dtype = setup.kv_dtype;
  options.tp = tp;
  options.max_model_len = 256;
  options.backend_options.num_threads = setup.num_threads;
  options.backend_options.isa = setup.isa;
  return runtime::ModelRunner::Create(options);
}

// The valid rows of a sequence's blocks, head by head, wherever a rank keeps them.
std::vector<uint8_t> KeysAndValues(runtime::ModelRunner& runner, const TestSequence& sequence) {
  const kv::KvLayout& layout = runner.layout();
  std::vector<uint8_t> bytes;
  for (int layer = 0; layer < layout.num_layers; ++layer) {
    for (int head = 0; head < 2 * layout.num_kv_heads; ++head) {
      const int side = head / layout.num_kv_heads, of_model = head % layout.num_kv_heads;
      const int rank = of_model / layout.rank_heads(), of_rank = of_model % layout.rank_heads();
      for (size_t t = 0; t < sequence.cached.size(); ++t) {
        const uint8_t* block =
            runner.kv_pool().data() +
            layout.BlockOffset(layer, sequence.blocks[t / kv::kBlockTokens], rank);
        const int row = static_cast<int>(t % kv::kBlockTokens);
        const uint8_t* from = block + layout.RowOffset(side, of_rank, row);
        bytes.insert(bytes.end(), from, from + layout.row_bytes());
        if (layout.scale_bytes() == 0) continue;
        const uint8_t* scale = block + layout.ScaleOffset(side, of_rank, row);
        bytes.insert(bytes.end(), scale, scale + sizeof(float));
      }
    }
  }
  return bytes;
}

// A prompt in chunks, then token by token, with another sequence beside it.
void ExpectEqualBits(const RunnerSetup& setup) {
  Logits logits[2];
  std::vector<uint8_t> cached[2];
  for (const int tp : {1, 2}) {
    auto runner = TryRunner(setup, tp);
    ASSERT_TRUE(runner.ok()) << runner.status();
    EXPECT_EQ((*runner)->layout().tp, tp);
    const std::vector<uint32_t> tokens = RandomTokens(140, (*runner)->config().vocab, 3);
    StepDriver driver(**runner);
    TestSequence a, b;
    logits[tp - 1] = driver.Feed(&a, absl::MakeConstSpan(tokens).first(130), 70);
    for (size_t i = 130; i < tokens.size(); ++i) {
      auto step = driver.Step({{&b, {tokens[i - 5], tokens[i - 3]}}, {&a, {tokens[i]}}});
      logits[tp - 1].push_back(step[1][0]);
      logits[tp - 1].push_back(step[0][1]);
    }
    cached[tp - 1] = KeysAndValues(**runner, a);
  }
  EXPECT_TRUE(logits[0] == logits[1]);
  EXPECT_TRUE(cached[0] == cached[1]);
}

class TpFormatsTest : public ::testing::TestWithParam<Formats> {};

TEST_P(TpFormatsTest, TwoRanksGiveTheBitsOfOne) {
  RunnerSetup setup;
  std::tie(setup.weight_dtype, setup.kv_dtype) = GetParam();
  for (const char* backend : {"cpu", "ref"}) {
    SCOPED_TRACE(backend);
    setup.backend = backend;
    ExpectEqualBits(setup);
  }
}

INSTANTIATE_TEST_SUITE_P(
    AllFormats,
    TpFormatsTest,
    ::testing::Combine(::testing::Values("f32", "bf16", "int8", "q4"),
                       ::testing::Values("fp8", "fp8_dynamic", "bf16", "f32")));

// One KV head a rank; head dim 128; biases; YaRN; F cut into unequal parts.
TEST(TpTest, TwoRanksGiveTheBitsOfOneInEveryShape) {
  for (const char* model :
       {"random-qwen3-gqa1-hd128", "random-qwen2-gqa2-tied", "random-llama-gqa2-yarn",
        "random-llama-gqa1", "tiny-qwen3", "tiny-qwen3-draft", "chain"}) {
    for (const char* weight_dtype : {"bf16", "int8"}) {
      SCOPED_TRACE(std::string(model) + " " + weight_dtype);
      RunnerSetup setup;
      setup.model = model;
      setup.weight_dtype = weight_dtype;
      ExpectEqualBits(setup);
    }
  }
}

TEST(TpTest, TwoRanksGiveTheBitsOfOneOnEveryInstructionSet) {
  for (const char* isa : {"portable", "avx2", "avx512_model", "amx_model", "avx512", "amx"}) {
    for (const char* weight_dtype : {"bf16", "int8", "q4"}) {
      SCOPED_TRACE(std::string(isa) + " " + weight_dtype);
      RunnerSetup setup;
      setup.isa = isa;
      setup.weight_dtype = weight_dtype;
      if (absl::IsUnavailable(TryRunner(setup, 1).status())) continue;  // not on this machine
      ExpectEqualBits(setup);
    }
  }
}

TEST(TpTest, RanksMayHaveSeveralThreads) {
  RunnerSetup setup;
  setup.num_threads = 5;
  setup.weight_dtype = "int8";
  ExpectEqualBits(setup);
}

TEST(TpTest, RefusedAtStartByName) {
  RunnerSetup setup;
  setup.model = "random-qwen3-gqa4-yarn";
  EXPECT_EQ(TryRunner(setup, 2).status(),
            absl::InvalidArgumentError("tp=2: num_kv_heads=1 is not divisible"));
  EXPECT_EQ(TryRunner(setup, 3).status(), absl::InvalidArgumentError("tp=3: want 1 or 2"));
  EXPECT_EQ(TryRunner(setup, 0).status(), absl::InvalidArgumentError("tp=0: want 1 or 2"));
}

// A step that is refused leaves the ranks whole.
TEST(TpTest, StepsGoOnAfterARefusedOne) {
  auto runner = TryRunner({}, 2);
  ASSERT_TRUE(runner.ok()) << runner.status();
  const std::vector<uint32_t> bad = {1u << 30};
  const std::vector<kv::BlockId> table = {0};
  const runtime::StepSequence part{bad, 0, table, {}};
  EXPECT_TRUE(absl::IsInvalidArgument(
      (*runner)->Step(absl::MakeConstSpan(&part, 1), nullptr, nullptr, nullptr)));
  StepDriver driver(**runner);
  TestSequence sequence;
  EXPECT_EQ(driver.Feed(&sequence, RandomTokens(9, (*runner)->config().vocab, 1), 4).size(), 9u);
}

// What an observer is told to be there is there, of all ranks.
TEST(TpTest, ALayerIsDoneWhenAllRanksHaveAppended) {
  struct Watcher : runtime::LayerObserver {
    explicit Watcher(runtime::ModelRunner& runner) : runner(runner) {}
    void OnLayerDone(int layer) override {
      const kv::KvLayout& layout = runner.layout();
      for (int rank = 0; rank < layout.tp; ++rank) {
        const uint8_t* block = runner.kv_pool().data() + layout.BlockOffset(layer, 0, rank);
        for (int side = 0; side < 2; ++side) {
          const uint8_t* row = block + layout.RowOffset(side, 0, 0);
          missing += std::count(row, row + layout.row_bytes(), 0xff) > 0;
        }
      }
      ++layers;
    }
    runtime::ModelRunner& runner;
    int layers = 0, missing = 0;
  };
  auto runner = TryRunner({}, 2);
  ASSERT_TRUE(runner.ok()) << runner.status();
  const std::vector<uint32_t> tokens = RandomTokens(64, (*runner)->config().vocab, 1);
  const std::vector<kv::BlockId> table = {0};
  for (int step = 0; step < 50; ++step) {
    std::memset((*runner)->kv_pool().data(), 0xff, (*runner)->kv_pool().size());
    Watcher watcher(**runner);
    const runtime::StepSequence part{tokens, 0, table, {}};
    ASSERT_TRUE((*runner)->Step(absl::MakeConstSpan(&part, 1), &watcher, nullptr, nullptr).ok());
    EXPECT_EQ(watcher.layers, (*runner)->layout().num_layers);
    EXPECT_EQ(watcher.missing, 0);
  }
}

TEST(TpTest, BlocksAreCopiedSavedAndRestoredWhole) {
  auto runner = TryRunner({}, 2);
  ASSERT_TRUE(runner.ok()) << runner.status();
  const kv::KvLayout& layout = (*runner)->layout();
  uint8_t* pool = (*runner)->kv_pool().data();
  for (size_t i = 0; i < layout.pool_bytes(); ++i) pool[i] = static_cast<uint8_t>(i * 7 + i / 251);
  const std::vector<uint8_t> before(pool, pool + layout.pool_bytes());
  std::vector<uint8_t> saved(layout.block_bytes() * layout.num_layers);
  (*runner)->ReadBlock(1, saved.data());
  (*runner)->CopyBlock(1, 2);
  (*runner)->WriteBlock(3, saved.data());
  std::vector<uint8_t> want = before;
  for (int rank = 0; rank < 2; ++rank) {
    for (int layer = 0; layer < layout.num_layers; ++layer) {
      for (const int block : {2, 3}) {
        std::memcpy(want.data() + layout.BlockOffset(layer, block, rank),
                    before.data() + layout.BlockOffset(layer, 1, rank), layout.rank_block_bytes());
      }
    }
  }
  EXPECT_EQ(std::memcmp(want.data(), pool, want.size()), 0);
}

// A low-bit copy of the model works in the pool of the other, on as many ranks.
TEST(TpTest, ACopyInAnotherPrecisionSharesThePool) {
  Logits logits[2];
  for (const int tp : {1, 2}) {
    auto owner = TryRunner({}, tp);
    ASSERT_TRUE(owner.ok()) << owner.status();
    runtime::ModelRunnerOptions options =
        SmallOptions(SourcePath("tests/data/models/random-qwen3-gqa2-tied"));
    options.weight_dtype = "q4";
    options.max_model_len = 256;
    options.kv_owner = owner->get();
    auto copy = runtime::ModelRunner::Create(options);
    ASSERT_TRUE(copy.ok()) << copy.status();
    const std::vector<uint32_t> tokens = RandomTokens(90, (*owner)->config().vocab, 3);
    StepDriver driver(**owner);
    TestSequence sequence;
    driver.Feed(&sequence, absl::MakeConstSpan(tokens).first(80), 80);
    for (int i = 80; i < 90; ++i) {
      const int first_row = 0;
      const runtime::StepSequence part{absl::MakeConstSpan(tokens).subspan(i, 1), i,
                                       sequence.blocks, absl::MakeConstSpan(&first_row, 1)};
      absl::Span<float> row;
      const absl::Status status =
          (*copy)->Step(absl::MakeConstSpan(&part, 1), nullptr, &row, nullptr);
      ASSERT_TRUE(status.ok()) << status;
      logits[tp - 1].emplace_back(row.begin(), row.end());
    }
  }
  EXPECT_TRUE(logits[0] == logits[1]);
}

}  // namespace
}  // namespace baton::testing_support
