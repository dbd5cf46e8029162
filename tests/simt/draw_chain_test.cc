// Passes on the emulated device that read tokens which passes before them have drawn: what they
// compute is what they compute when the host brings the tokens, and the host waits once.

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/ops/draw_chain.h"
#include "engine/runtime/model_runner.h"
#include "gtest/gtest.h"
#include "tests/simt/fake_cudart.h"
#include "tests/simt/simt.h"

namespace baton::simt {
namespace {

using ops::SampleResult;
using runtime::ModelRunner;
using runtime::ModelRunnerOptions;
using runtime::StepSequence;

constexpr int kDrawableTokens = 250;
constexpr int kSequences = 3, kBlocks = 4, kRounds = 4;

std::unique_ptr<ModelRunner> MakeRunner(bool eager) {
  ModelRunnerOptions options;
  options.model_path = absl::StrCat(BATON_SOURCE_DIR, "/tests/data/models/random-qwen3-gqa2-tied");
  options.backend = "cuda";
  options.weight_dtype = "bf16";
  options.max_model_len = 256;
  options.max_step_tokens = 300;
  options.max_logit_rows = 64;
  options.num_blocks = kSequences * kBlocks;
  options.backend_options.enforce_eager = eager;
  auto runner = ModelRunner::Create(options);
  EXPECT_TRUE(runner.ok()) << runner.status();
  return *std::move(runner);
}

// Sequences that a runner goes on with, a token a round, greedy.
class Sequences {
 public:
  explicit Sequences(ModelRunner* runner) : runner_(*runner) {
    for (int i = 0; i < kSequences; ++i) {
      for (int t = 0; t < 5 + 9 * i; ++t)
        tokens[i].push_back(static_cast<uint32_t>((t * 37 + 11 * i) % kDrawableTokens));
      for (int b = 0; b < kBlocks; ++b) blocks_[i].push_back(kBlocks * i + b);
    }
  }

  // The next token of each; the prompt at first. With a chain tokens of the round before are still
  // on the device, and those of this one stay there.
  void Round(ops::DrawChain* chain) {
    std::vector<StepSequence> parts;
    std::vector<int> rows(kSequences), drawn(kSequences);
    const bool from_chain = chain != nullptr && chain->size() > 0;
    for (int i = 0; i < kSequences; ++i) {
      rows[i] = static_cast<int>(tokens[i].size()) - computed_[i] - 1;
      StepSequence part{absl::MakeConstSpan(tokens[i]).subspan(computed_[i]), computed_[i],
                        blocks_[i], absl::MakeConstSpan(&rows[i], 1)};
      if (from_chain) {
        drawn[i] = chain->size() - kSequences + i;
        part.drawn = absl::MakeConstSpan(&drawn[i], 1);
        part.chain = chain;
      }
      parts.push_back(part);
    }
    results.emplace_back(kSequences);
    Step(parts, kSequences, absl::MakeSpan(results.back()), chain);
    for (int i = 0; i < kSequences; ++i) {
      computed_[i] = static_cast<int>(tokens[i].size());
      const SampleResult& result = results.back()[i];
      tokens[i].push_back(chain != nullptr ? ops::kNoTokenDrawn : static_cast<uint32_t>(result.id));
    }
  }

  // Scores the first `count` of the last tokens of each with what is before them: drafts, brought
  // by the host, or the draws of a chain, the rounds of which are all of them. Greedy ids of all
  // rows.
  std::vector<int32_t> Verify(const Sequences& drafter,
                              int count,
                              const ops::DrawChain* chain,
                              bool on_device) {
    std::vector<StepSequence> parts;
    std::vector<std::vector<uint32_t>> inputs(kSequences);
    std::vector<std::vector<int32_t>> drawn(kSequences);
    std::vector<int> rows;
    for (int row = 0; row <= count; ++row) rows.push_back(row);
    for (int i = 0; i < kSequences; ++i) {
      const std::vector<uint32_t>& all = drafter.tokens[i];
      inputs[i].assign(all.end() - count - 1, all.end());
      StepSequence part{inputs[i], static_cast<int>(all.size()) - count - 1, blocks_[i], rows};
      if (chain != nullptr) {
        drawn[i].push_back(-1);
        for (int k = 0; k < count; ++k) drawn[i].push_back(kSequences * k + i);
        part.drawn = drawn[i];
        part.chain = chain;
      }
      parts.push_back(part);
    }
    const int num_rows = kSequences * (count + 1);
    std::vector<int32_t> ids;
    if (on_device) {
      std::vector<SampleResult> drawn_here(num_rows);
      Step(parts, num_rows, absl::MakeSpan(drawn_here), nullptr);
      for (const SampleResult& result : drawn_here) ids.push_back(result.id);
      return ids;
    }
    absl::Span<float> logits;
    const absl::Status status = runner_.Step(parts, nullptr, &logits, nullptr);
    EXPECT_TRUE(status.ok()) << status;
    const int vocab = runner_.config().vocab;
    for (int row = 0; status.ok() && row < num_rows; ++row) {
      const float* begin = logits.data() + static_cast<ptrdiff_t>(row) * vocab;
      ids.push_back(static_cast<int32_t>(std::max_element(begin, begin + kDrawableTokens) - begin));
    }
    return ids;
  }

  std::vector<uint32_t> tokens[kSequences];
  std::vector<std::vector<SampleResult>> results;  // by round

 private:
  void Step(const std::vector<StepSequence>& parts,
            int num_rows,
            absl::Span<SampleResult> out,
            ops::DrawChain* chain) {
    std::vector<ops::SampleRow> rows(num_rows);
    for (ops::SampleRow& row : rows) row.temperature = 0;
    ops::Draws draws;
    draws.rows = rows;
    draws.num_tokens = kDrawableTokens;
    draws.results = out;
    draws.chain = chain;
    const absl::Status status = runner_.StepAndDraw(parts, nullptr, draws, nullptr);
    EXPECT_TRUE(status.ok()) << status;
  }

  ModelRunner& runner_;
  std::vector<kv::BlockId> blocks_[kSequences];
  int computed_[kSequences] = {};
};

class DrawChains : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    GetRuntimeConfig().lazy = true;
    GetConfig().order = Order::kDescending;
  }
  void TearDown() override {
    GetRuntimeConfig() = RuntimeConfig();
    GetConfig() = Config();
  }
};
INSTANTIATE_TEST_SUITE_P(GraphsOrNot, DrawChains, testing::Bool());

TEST_P(DrawChains, RoundsAndTheirVerificationAreWhatTheyAreOneByOne) {
  const std::unique_ptr<ModelRunner> runner = MakeRunner(GetParam()),
                                     target = MakeRunner(GetParam());
  Sequences one_by_one(runner.get());
  for (int round = 0; round <= kRounds; ++round) one_by_one.Round(nullptr);
  // Twice, as graphs are made at the second pass of a shape.
  for (int time = 0; time < 2; ++time) {
    SCOPED_TRACE(time);
    Sequences chained(runner.get());
    chained.Round(nullptr);  // the prompt
    EXPECT_EQ(chained.tokens[1].back(),
              one_by_one.tokens[1][one_by_one.tokens[1].size() - kRounds - 1]);
    absl::StatusOr<std::unique_ptr<ops::DrawChain>> made =
        runner->NewDrawChain(kRounds * kSequences);
    ASSERT_TRUE(made.ok() && *made != nullptr) << made.status();
    ops::DrawChain& chain = **made;
    GetRuntimeStats() = RuntimeStats();
    chained.Round(&chain);
    const uint64_t waits_of_the_first = GetRuntimeStats().waits;
    for (int round = 1; round < kRounds; ++round) chained.Round(&chain);
    EXPECT_EQ(chain.size(), kRounds * kSequences);
    if (time > 0)
      EXPECT_EQ(GetRuntimeStats().waits, waits_of_the_first) << "a round was waited for";

    Sequences here(target.get());
    here.Round(nullptr);
    std::vector<int32_t> verified[3];
    // (Logits on the host and draws there; few queries, which are padded and may be a graph.)
    for (int i = 0; i < 2; ++i) verified[i] = here.Verify(chained, kRounds, &chain, i == 1);
    const absl::StatusOr<double> seconds = chain.Finish();
    ASSERT_TRUE(seconds.ok()) << seconds.status();
    EXPECT_GT(*seconds, 0);
    EXPECT_EQ(chain.size(), 0);
    for (int i = 0; i < kSequences; ++i) {
      const size_t first = one_by_one.tokens[i].size() - kRounds;
      for (int round = 0; round < kRounds; ++round) {
        EXPECT_EQ(chained.results[round + 1][i].id, one_by_one.tokens[i][first + round])
            << "sequence " << i << " round " << round;
      }
    }
    verified[2] = here.Verify(one_by_one, kRounds, nullptr, true);
    EXPECT_EQ(verified[0], verified[2]);
    EXPECT_EQ(verified[1], verified[2]);
  }
}

// More queries than a padded pass has.
TEST_P(DrawChains, APassThatIsNotPaddedReadsThemToo) {
  constexpr int kMany = 9;
  const std::unique_ptr<ModelRunner> runner = MakeRunner(GetParam());
  Sequences one_by_one(runner.get());
  for (int round = 0; round <= kMany; ++round) one_by_one.Round(nullptr);
  Sequences chained(runner.get());
  chained.Round(nullptr);
  const auto made = runner->NewDrawChain(kMany * kSequences);
  ASSERT_TRUE(made.ok() && *made != nullptr);
  for (int round = 0; round < kMany; ++round) chained.Round(made->get());
  const std::unique_ptr<ModelRunner> target = MakeRunner(GetParam());
  Sequences here(target.get());
  here.Round(nullptr);
  const std::vector<int32_t> from_chain = here.Verify(chained, kMany, made->get(), true);
  EXPECT_TRUE((*made)->Finish().ok());
  EXPECT_EQ(from_chain, here.Verify(one_by_one, kMany, nullptr, true));
  EXPECT_EQ(from_chain.size(), static_cast<size_t>(kSequences * (kMany + 1)));
}

TEST(DrawChainErrors, AreToldBeforeAnythingIsIssued) {
  const std::unique_ptr<ModelRunner> runner = MakeRunner(false);
  const auto made = runner->NewDrawChain(2);
  ASSERT_TRUE(made.ok() && *made != nullptr);
  const std::vector<uint32_t> tokens = {1, 2};
  const std::vector<kv::BlockId> blocks = {1};
  const std::vector<int> logit_rows = {0, 1};
  std::vector<ops::SampleRow> rows(2);
  std::vector<SampleResult> results(2);
  std::vector<int32_t> drawn;
  const auto message = [&](ops::DrawChain* chain, const ops::DrawChain* source) {
    ops::Draws draws;
    draws.rows = rows;
    draws.num_tokens = kDrawableTokens;
    draws.results = absl::MakeSpan(results);
    draws.chain = chain;
    const StepSequence part{tokens, 0, blocks, logit_rows, drawn, source};
    return std::string(runner->StepAndDraw({part}, nullptr, draws, nullptr).message());
  };
  drawn = {-1, 0};
  EXPECT_EQ(message(nullptr, nullptr), "step: sequence=0 drawn: not the chain of the step");
  EXPECT_EQ(message(nullptr, made->get()), "drawn: draw=0 max=-1");
  drawn = {-1};
  EXPECT_EQ(message(nullptr, made->get()), "step: sequence=0 drawn=1 tokens=2");
  drawn.clear();
  EXPECT_EQ(message(made->get(), nullptr), "");
  EXPECT_EQ((*made)->size(), 2);
  EXPECT_EQ(message(made->get(), nullptr), "draws: chain=4 max=2");
  drawn = {-1, 2};
  EXPECT_EQ(message(nullptr, made->get()), "drawn: draw=2 max=1");
  drawn = {-1, 1};
  EXPECT_EQ(message(nullptr, made->get()), "");
  EXPECT_TRUE((*made)->Finish().ok());
  EXPECT_EQ(message(nullptr, made->get()), "drawn: draw=1 max=-1");
}

TEST(DrawChainErrors, ABackendOnTheHostHasNone) {
  ModelRunnerOptions options;
  options.model_path = absl::StrCat(BATON_SOURCE_DIR, "/tests/data/models/random-qwen3-gqa2-tied");
  options.num_blocks = 4;
  const auto runner = ModelRunner::Create(options);
  ASSERT_TRUE(runner.ok()) << runner.status();
  EXPECT_FALSE((*runner)->reads_draw_chains());
  const auto chain = (*runner)->NewDrawChain(8);
  ASSERT_TRUE(chain.ok());
  EXPECT_EQ(*chain, nullptr);
}

}  // namespace
}  // namespace baton::simt
