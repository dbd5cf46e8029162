// What the formats of the KV cache cost on the trained models: logits and perplexity on held-out
// text, against f32 and against transformers (tests/golden/tiny_qwen3.json).

#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/base/json.h"
#include "engine/model/model_config.h"
#include "engine/runtime/model_runner.h"
#include "engine/text/tokenizer.h"
#include "gtest/gtest.h"
#include "tests/support/engine_steps.h"
#include "tests/support/logit_quality.h"
#include "tests/support/model_files.h"

namespace baton::testing_support {
namespace {

constexpr size_t kWindow = 256;

class KvQualityTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    absl::StatusOr<base::JsonValue> golden =
        base::ParseJson(ReadWhole(SourcePath("tests/golden/tiny_qwen3.json")));
    ASSERT_TRUE(golden.ok()) << golden.status();
    golden_ = *golden->Find("models")->Find(GetParam());
    num_ids_ = *golden->Find("num_ids")->AsInt64();
    absl::StatusOr<std::unique_ptr<text::Tokenizer>> tokenizer = text::Tokenizer::Load(ModelPath());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    absl::StatusOr<model::ModelConfig> config = model::LoadHfConfig(ModelPath());
    ASSERT_TRUE(config.ok()) << config.status();
    num_layers_ = config->num_layers;
    const std::string text = ReadWhole(SourcePath("tests/data/text/heldout.txt"));
    const auto ids = (*tokenizer)->Encode(text, text::SpecialPolicy::kLiteral);
    ids_.assign(ids.begin(), ids.end());
    ASSERT_EQ(static_cast<int64_t>(ids_.size()), num_ids_)
        << "the tokenizer differs from the one of the golden values";
  }

  std::string ModelPath() const { return SourcePath("tests/data/models/" + GetParam()); }

  std::unique_ptr<runtime::ModelRunner> MakeRunner(const std::string& kv_dtype) const {
    runtime::ModelRunnerOptions options = SmallOptions(ModelPath());
    options.weight_dtype = "f32";
    options.kv_dtype = kv_dtype;
    options.num_blocks = 8;
    options.max_model_len = 512;
    absl::StatusOr<std::unique_ptr<runtime::ModelRunner>> runner =
        runtime::ModelRunner::Create(options);
    EXPECT_TRUE(runner.ok()) << runner.status();
    return *std::move(runner);
  }

  // Of every token of all windows, each from an empty cache.
  Logits AllLogits(const std::string& kv_dtype) const {
    std::unique_ptr<runtime::ModelRunner> runner = MakeRunner(kv_dtype);
    StepDriver driver(*runner);
    Logits logits;
    for (size_t first = 0; first + kWindow <= ids_.size(); first += kWindow) {
      TestSequence sequence;
      for (std::vector<float>& row :
           driver.Feed(&sequence, absl::MakeConstSpan(ids_).subspan(first, kWindow), kWindow)) {
        logits.push_back(std::move(row));
      }
      driver.Release(&sequence);
    }
    return logits;
  }

  Quality Compare(const Logits& logits, const Logits& expected) const {
    return CompareLogits(logits, expected, ids_, kWindow);
  }

  base::JsonValue golden_;
  int64_t num_ids_ = 0;
  std::vector<uint32_t> ids_;
  int num_layers_ = 0;
};

TEST_P(KvQualityTest, GreedyIdsInF32AreThoseOfTransformers) {
  std::unique_ptr<runtime::ModelRunner> runner = MakeRunner("f32");
  StepDriver driver(*runner);
  ASSERT_FALSE(golden_.Find("greedy")->items().empty());
  for (const base::JsonValue& path : golden_.Find("greedy")->items()) {
    std::vector<uint32_t> prompt;
    for (const base::JsonValue& id : path.Find("prompt_ids")->items())
      prompt.push_back(*id.AsInt64());
    TestSequence sequence;
    uint32_t next = ArgMax(driver.Feed(&sequence, prompt, 64).back());
    for (const base::JsonValue& id : path.Find("ids")->items()) {
      ASSERT_EQ(next, *id.AsInt64()) << "after " << sequence.cached.size() << " tokens of \""
                                     << path.Find("prompt")->text() << '"';
      next = ArgMax(driver.Feed(&sequence, {next}, 1)[0]);
    }
    driver.Release(&sequence);
  }
}

// The bound from the error of the format:
//   A stored number is rounded to m bits behind the point: an error spread evenly over +-2^-m / 2
//   of its power of two, in the root of the mean square u = 2^-m / sqrt(12) of its size at most. m
//   is 3 for e4m3 and 7 for bf16.
//   Logits: keys and values of each of the L layers bring one such error into the residual stream,
//   independent of one another; norms keep relative errors what they are. So the logits move by at
//   most s = u * sqrt(2 L) of their own spread.
TEST_P(KvQualityTest, PerplexityIsThatOfTransformersAndMovesByTheRoundingErrorOnly) {
  const Logits exact = AllLogits("f32");
  const double exact_nll = Compare(exact, exact).mean_nll();
  // -log p moves by at most twice the largest difference of a logit (logits_parity_test.cc).
  EXPECT_NEAR(exact_nll, *golden_.Find("mean_nll")->AsDouble(), 2 * 1e-4);
  std::printf("%s kv_dtype=f32 perplexity=%.4f\n", GetParam().c_str(), std::exp(exact_nll));
  const std::pair<const char*, int> formats[] = {{"fp8", 3}, {"fp8_dynamic", 3}, {"bf16", 7}};
  for (const auto& [kv_dtype, mantissa_bits] : formats) {
    SCOPED_TRACE(kv_dtype);
    const Quality quality = Compare(AllLogits(kv_dtype), exact);
    const double u = std::ldexp(1.0, -mantissa_bits) / std::sqrt(12.0);
    const double s = u * std::sqrt(2.0 * num_layers_) * quality.logit_rms();
    ExpectMovedWithin(absl::StrCat(GetParam(), " kv_dtype=", kv_dtype), quality, exact_nll, s);
  }
}

INSTANTIATE_TEST_SUITE_P(TrainedModels,
                         KvQualityTest,
                         ::testing::Values("tiny-qwen3", "tiny-qwen3-draft"),
                         [](const auto& info) {
                           return info.param == "tiny-qwen3" ? "target" : "draft";
                         });

}  // namespace
}  // namespace baton::testing_support
