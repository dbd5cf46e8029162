// Trained models: what drafts are made of decides how fast an answer comes and never what it says.

#include "decode_worker/model_drafter.h"

#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "engine/base/metrics.h"
#include "tests/support/decode_driver.h"
#include "tests/support/engine_steps.h"

namespace baton::decode {
namespace {

using runtime::EngineRequest;
using testing::DecodeDriver;
using testing::Output;

constexpr int kMaxBatch = 8;

std::string ModelPath(const std::string& name) {
  return testing_support::SourcePath("tests/data/models/" + name);
}

runtime::ModelRunnerOptions RunnerOptions(const std::string& name) {
  runtime::ModelRunnerOptions options;
  options.model_path = ModelPath(name);
  options.num_blocks = 64;
  options.max_step_tokens = 256 + 16 * kMaxBatch;
  options.max_logit_rows = 16 * kMaxBatch;
  options.backend_options.num_threads = 1;
  return options;
}

std::unique_ptr<runtime::ModelRunner> LoadRunner(const runtime::ModelRunnerOptions& options) {
  absl::StatusOr<std::unique_ptr<runtime::ModelRunner>> runner =
      runtime::ModelRunner::Create(options);
  EXPECT_TRUE(runner.ok()) << runner.status();
  return *std::move(runner);
}

class ModelDrafterTest : public ::testing::Test {
 protected:
  enum Kind { kPlain, kNgram, kDraftModel, kLowBitCopy, kAll };

  static void SetUpTestSuite() {
    runner_ = LoadRunner(RunnerOptions("tiny-qwen3")).release();
    tokenizer_ = text::Tokenizer::LoadHuggingFace(ModelPath("tiny-qwen3"))->release();
    std::ifstream file(testing_support::SourcePath("tests/data/text/heldout.txt"));
    std::stringstream text;
    text << file.rdbuf();
    text_ids_ =
        new std::vector<uint32_t>(tokenizer_->Encode(text.str(), text::SpecialPolicy::kLiteral));
  }
  static void TearDownTestSuite() {
    delete runner_;
    delete tokenizer_;
    delete text_ids_;
  }

  // Text from the held-out chapters and a little more of it.
  static EngineRequest Request(int index, float temperature, uint32_t max_tokens = 40) {
    EngineRequest request;
    const auto begin = text_ids_->begin() + 150 * index;
    request.prompt_ids.assign(begin, begin + 60 + 13 * index);
    request.params.temperature = temperature;
    request.params.seed = 7 + index;
    request.params.max_tokens = max_tokens;
    return request;
  }

  std::unique_ptr<ModelDrafter> MakeDrafter(bool low_bit_copy, int draft_blocks = 64) {
    runtime::ModelRunnerOptions options =
        RunnerOptions(low_bit_copy ? "tiny-qwen3" : "tiny-qwen3-draft");
    options.num_blocks = draft_blocks;
    if (low_bit_copy) {
      options.weight_dtype = "q4";
      options.kv_owner = runner_;
    }
    ModelDrafterOptions drafter_options;
    drafter_options.max_batch = kMaxBatch;
    drafter_options.max_catch_up = 128;
    drafter_options.num_tokens = static_cast<int>(tokenizer_->vocab_size());
    drafter_options.uses_target_kv = low_bit_copy;
    // A tenth of a step of the target, which costs 1.
    return std::make_unique<ModelDrafter>(drafter_options, LoadRunner(options),
                                          StepCost({{1, 0.1}}, 0, 0));
  }

  std::vector<Output> Run(const std::vector<EngineRequest>& requests,
                          Kind kind,
                          int draft_blocks = 64) {
    DecodeLoopOptions options;
    options.scheduler.chunk_tokens = 256;
    options.scheduler.max_batch = kMaxBatch;
    options.speculation.max_drafts = kind == kPlain ? 0 : 6;
    options.speculation.ngram = kind == kNgram || kind == kAll;
    options.model_fingerprint = "tiny";
    metrics_ = base::Metrics::Create(base::Role::kDecode, "tiny");
    DecodeDriver driver(options, *runner_, *tokenizer_, worker::WorkerMetrics(metrics_.get()));
    ModelDrafter* own_kv = nullptr;
    if (kind == kDraftModel || kind == kAll) {
      std::unique_ptr<ModelDrafter> drafter = MakeDrafter(false, draft_blocks);
      own_kv = drafter.get();
      driver.loop().AddDrafter(std::move(drafter));
    }
    if (kind == kLowBitCopy || kind == kAll) driver.loop().AddDrafter(MakeDrafter(true));
    const std::vector<Output> outputs = driver.Run(requests);
    if (own_kv != nullptr) {
      EXPECT_EQ(own_kv->memory()->pool().counts().active, 0);
      own_kv->memory()->pool().CheckInvariants();
    }
    return outputs;
  }

  double Count(base::CounterId id) { return metrics_->counter(id).value(); }
  double Proposed() { return Count(base::CounterId::kSpecDecodeDraftTokens); }
  double Accepted() { return Count(base::CounterId::kSpecDecodeAcceptedTokens); }

  static runtime::ModelRunner* runner_;
  static text::Tokenizer* tokenizer_;
  static std::vector<uint32_t>* text_ids_;
  std::unique_ptr<base::Metrics> metrics_;
};

runtime::ModelRunner* ModelDrafterTest::runner_ = nullptr;
text::Tokenizer* ModelDrafterTest::tokenizer_ = nullptr;
std::vector<uint32_t>* ModelDrafterTest::text_ids_ = nullptr;

// Cases 6.1 and 12.3 with trained models: temperatures, seeds, alone and together.
TEST_F(ModelDrafterTest, IdsAreThoseOfPlainDecoding) {
  for (const float temperature : {0.0f, 0.7f, 1.2f}) {
    std::vector<EngineRequest> requests;
    for (int i = 0; i < 4; ++i) requests.push_back(Request(i, temperature));
    requests[1].params.repetition_penalty = 1.2f;
    requests[2].params.top_p = 0.9f;
    requests[2].params.n = 2;
    requests[3].params.logprobs = 2;
    const std::vector<Output> plain = Run(requests, kPlain);
    for (const Kind kind : {kNgram, kDraftModel, kLowBitCopy, kAll}) {
      EXPECT_EQ(Run(requests, kind), plain) << "kind=" << kind << " temperature=" << temperature;
      EXPECT_EQ(Run({requests[2]}, kind)[0], plain[2]) << "alone";
    }
  }
}

TEST_F(ModelDrafterTest, ADraftModelIsOftenRight) {
  for (const float temperature : {0.0f, 0.8f}) {
    Run({Request(0, temperature, 100)}, kDraftModel);
    EXPECT_GT(Accepted(), 25);
    EXPECT_GT(Accepted(), 0.25 * Proposed()) << temperature;
  }
}

// The copy agrees with the target nearly always, and far more often than any other model.
TEST_F(ModelDrafterTest, ALowBitCopyIsNearlyAlwaysRight) {
  for (const float temperature : {0.0f, 0.8f}) {
    Run({Request(0, temperature, 100)}, kLowBitCopy);
    EXPECT_GT(Accepted(), 60);
    EXPECT_GT(Accepted(), 0.6 * Proposed()) << temperature;
  }
}

// The drafter's cache holds one prompt or none: the others go on without drafts.
TEST_F(ModelDrafterTest, AFullDraftCacheNeitherDelaysNorFailsARequest) {
  std::vector<EngineRequest> requests;
  for (int i = 0; i < 4; ++i) requests.push_back(Request(i, 0.7f, 80));
  const std::vector<Output> plain = Run(requests, kPlain);
  for (const int draft_blocks : {1, 2, 4})
    EXPECT_EQ(Run(requests, kDraftModel, draft_blocks), plain);
  EXPECT_GT(Proposed(), 0);
}

TEST_F(ModelDrafterTest, APromptLongerThanACatchUpStepIsCaughtUpInPieces) {
  EngineRequest request = Request(0, 0, 60);
  request.prompt_ids.assign(text_ids_->begin(), text_ids_->begin() + 900);
  const std::vector<Output> plain = Run({request}, kPlain);
  EXPECT_EQ(Run({request}, kDraftModel), plain);
  EXPECT_GT(Accepted(), 0);
}

TEST_F(ModelDrafterTest, ACopyOfAnotherModelIsRefused) {
  runtime::ModelRunnerOptions options = RunnerOptions("tiny-qwen3-draft");
  options.kv_owner = runner_;
  EXPECT_EQ(runtime::ModelRunner::Create(options).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace baton::decode
