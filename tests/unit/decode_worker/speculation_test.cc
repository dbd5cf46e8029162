// With drafts or without, good ones or bad ones, an answer is the same to the last bit. The model
// is a hash over every key and value it reads, so KV of a rejected draft that stays would show.

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "decode_worker/decode_loop.h"
#include "tests/support/decode_driver.h"
#include "tests/support/fake_runner.h"

namespace baton::decode {
namespace {

using runtime::EngineRequest;
using testing::DecodeDriver;
using testing::FakePrompt;
using testing::FakeRequest;
using testing::FakeRunner;
using testing::kFakeVocab;
using testing::OracleDrafter;
using testing::Output;

using Wrong = std::function<bool(size_t)>;
bool AlwaysRight(size_t) { return false; }
bool AlwaysWrong(size_t) { return true; }
Wrong WrongEvery(size_t period) {
  return [period](size_t position) { return position % period == 0; };
}

class SpeculationTest : public ::testing::Test {
 protected:
  static DecodeLoopOptions Options(int max_drafts) {
    DecodeLoopOptions options;
    options.scheduler.chunk_tokens = 128;
    options.scheduler.max_batch = 8;
    options.speculation.max_drafts = max_drafts;
    options.speculation.ngram = false;
    options.model_fingerprint = "fake";
    options.test_poison_freed = true;
    return options;
  }

  std::vector<Output> Plain(const std::vector<EngineRequest>& requests, int num_blocks = 64) {
    FakeRunner runner(num_blocks);
    DecodeDriver driver(Options(0), runner, *tokenizer_);
    std::vector<Output> outputs = driver.Run(requests);
    plain_steps_ = runner.steps;
    return outputs;
  }
  // Drafts are what the plain run says, but for the wrong ones.
  std::vector<Output> Speculative(const std::vector<EngineRequest>& requests,
                                  const std::vector<Output>& plain,
                                  int max_drafts,
                                  Wrong wrong,
                                  int num_blocks = 64) {
    FakeRunner runner(num_blocks);
    DecodeDriver driver(Options(max_drafts), runner, *tokenizer_);
    driver.loop().AddDrafter(std::make_unique<OracleDrafter>(testing::TextsOf(requests, plain),
                                                             kFakeVocab, std::move(wrong)));
    std::vector<Output> outputs = driver.Run(requests);
    speculative_steps_ = runner.steps;
    return outputs;
  }
  void ExpectSame(const std::vector<EngineRequest>& requests, int num_blocks = 64) {
    const std::vector<Output> plain = Plain(requests, num_blocks);
    for (const Wrong& wrong :
         {Wrong(AlwaysRight), WrongEvery(2), WrongEvery(7), Wrong(AlwaysWrong)})
      EXPECT_EQ(Speculative(requests, plain, 5, wrong, num_blocks), plain);
  }
  EngineRequest Sampled(int seed) {
    EngineRequest request = FakeRequest(FakePrompt(40 + seed, seed), 60);
    request.params.temperature = 1.0f;
    request.params.seed = static_cast<uint64_t>(seed);
    return request;
  }

  const std::unique_ptr<text::Tokenizer> tokenizer_ = testing::FakeTokenizer();
  int plain_steps_ = 0;
  int speculative_steps_ = 0;
};

TEST_F(SpeculationTest, RightDraftsSaveStepsAndWrongOnesCostNone) {
  const std::vector<EngineRequest> requests = {FakeRequest(FakePrompt(50, 1), 121)};
  const std::vector<Output> plain = Plain(requests);
  EXPECT_EQ(plain_steps_, 121);
  Speculative(requests, plain, 5, AlwaysRight);
  EXPECT_EQ(speculative_steps_, 1 + 120 / 6);
  Speculative(requests, plain, 5, AlwaysWrong);
  EXPECT_EQ(speculative_steps_, 121);
}

// Case 12.3: good, bad and mixed drafts; 50 prompts of 128 tokens, together.
TEST_F(SpeculationTest, FiftyPromptsKeepTheirIds) {
  std::vector<EngineRequest> requests;
  for (int i = 0; i < 50; ++i) requests.push_back(FakeRequest(FakePrompt(3 + 5 * i, i), 128));
  ExpectSame(requests, 256);
}

// Case 12.1: the end is the first end token whatever its place in the run of drafts.
TEST_F(SpeculationTest, StopTokenAnywhereInAnAcceptedRunEndsTheAnswer) {
  const EngineRequest base = FakeRequest(FakePrompt(50, 2), 40);
  const std::vector<Output> whole = Plain({base});
  for (int k = 1; k <= 32; ++k) {
    EngineRequest request = base;
    request.params.stop_token_ids = {whole[0][0].ids[k - 1]};
    const std::vector<Output> plain = Plain({request}, 8);
    ASSERT_EQ(plain[0][0].finish, worker::v1::FINISH_STOP_TOKEN);
    for (int drafts = 1; drafts <= 8; ++drafts) {
      FakeRunner runner(8);
      DecodeDriver driver(Options(drafts), runner, *tokenizer_);
      // The oracle goes on behind the end, as a draft model would.
      driver.loop().AddDrafter(std::make_unique<OracleDrafter>(testing::TextsOf({base}, whole),
                                                               kFakeVocab, AlwaysRight));
      EXPECT_EQ(driver.RunOne(request), plain[0]) << "k=" << k << " drafts=" << drafts;
    }
  }
}

// Case 12.2: stop position x cap x run.
TEST_F(SpeculationTest, OfStopAndLengthInOneRunTheEarlierWins) {
  const EngineRequest base = FakeRequest(FakePrompt(50, 2), 40);
  const std::vector<Output> whole = Plain({base});
  std::string text;
  for (const uint32_t id : whole[0][0].ids) text += static_cast<char>('a' + id);
  for (int at = 0; at < 8; ++at) {
    for (uint32_t cap = 1; cap <= 8; ++cap) {
      for (const bool by_string : {false, true}) {
        EngineRequest request = base;
        request.params.max_tokens = cap;
        if (by_string) {
          request.params.stop = {text.substr(at, 2)};
        } else {
          request.params.stop_token_ids = {whole[0][0].ids[at]};
        }
        const Output plain = Plain({request}, 8)[0];
        EXPECT_LE(plain[0].ids.size(), cap);
        for (const int run : {3, 15}) {
          FakeRunner runner(8);
          DecodeDriver driver(Options(run), runner, *tokenizer_);
          driver.loop().AddDrafter(std::make_unique<OracleDrafter>(testing::TextsOf({base}, whole),
                                                                   kFakeVocab, AlwaysRight));
          EXPECT_EQ(driver.RunOne(request), plain) << "at=" << at << " cap=" << cap;
        }
      }
    }
  }
}

// Case 12.4: each parameter is obeyed in a run of drafts as it is without.
TEST_F(SpeculationTest, EverySamplingParameterIsObeyed) {
  const Output untouched = Plain({Sampled(1)})[0];
  const auto check = [&](const char* name, auto change) {
    SCOPED_TRACE(name);
    EngineRequest request = Sampled(1);
    change(&request.params);
    ExpectSame({request});
    EXPECT_NE(Plain({request})[0], untouched) << "no effect";
  };
  check("temperature", [](auto* p) { p->temperature = 3; });
  check("top_k", [](auto* p) { p->top_k = 1; });
  check("top_p", [](auto* p) { p->top_p = 0.3f; });
  check("min_p", [](auto* p) { p->min_p = 0.5f; });
  check("seed", [](auto* p) { p->seed = 99; });
  check("repetition_penalty", [](auto* p) { p->repetition_penalty = 1.8f; });
  check("presence_penalty", [](auto* p) { p->presence_penalty = 2; });
  check("frequency_penalty", [](auto* p) { p->frequency_penalty = 1; });
  check("logit_bias", [](auto* p) { p->logit_bias = {{3, 5.0f}}; });
  check("stop", [&](auto* p) { p->stop = {std::string(1, 'a' + untouched[0].ids[20])}; });
  check("stop_token_ids", [&](auto* p) { p->stop_token_ids = {untouched[0].ids[9]}; });
  check("min_tokens", [&](auto* p) {
    p->stop_token_ids = {untouched[0].ids[2]};
    p->min_tokens = 30;
  });
  check("max_tokens", [](auto* p) { p->max_tokens = 17; });
  check("logprobs", [](auto* p) { p->logprobs = 3; });
  check("n", [](auto* p) { p->n = 3; });
}

TEST_F(SpeculationTest, LogprobsComeForEveryToken) {
  EngineRequest request = Sampled(4);
  request.params.logprobs = 2;
  const std::vector<Output> plain = Plain({request});
  const std::vector<Output> drafted = Speculative({request}, plain, 7, WrongEvery(5));
  EXPECT_EQ(drafted, plain);
  EXPECT_EQ(drafted[0][0].logprobs.size(), 60u);
  EXPECT_EQ(drafted[0][0].top.size(), 120u);
}

// Cases 6.1 and 6.2: beside others, in another place of the batch, n choices, any drafts.
TEST_F(SpeculationTest, SeededIdsDoNotDependOnNeighboursOrDrafts) {
  EngineRequest seeded = Sampled(42);
  seeded.params.n = 4;
  const Output alone = Plain({seeded})[0];
  for (int choice = 1; choice < 4; ++choice) EXPECT_NE(alone[choice].ids, alone[0].ids);
  for (int round = 0; round < 20; ++round) {
    std::vector<EngineRequest> requests;
    for (int i = 0; i < round % 5; ++i) requests.push_back(Sampled(100 + 7 * round + i));
    requests.insert(requests.begin() + round % (requests.size() + 1), seeded);
    const std::vector<Output> plain = Plain(requests);
    const std::vector<Output> drafted =
        Speculative(requests, plain, 1 + round % 8, WrongEvery(2 + round % 6));
    EXPECT_EQ(drafted, plain);
    EXPECT_EQ(drafted[round % requests.size()], alone);
  }
}

// Case 6.1: 10,000 tokens drawn in verified runs and 10,000 drawn plainly with other seeds follow
// one distribution. Two-sample chi-square.
TEST_F(SpeculationTest, DistributionIsThatOfPlainDecoding) {
  const auto sample = [&](uint64_t first_seed, bool drafted) {
    std::vector<EngineRequest> requests;
    for (int i = 0; i < 625; ++i) {
      EngineRequest request = FakeRequest(FakePrompt(8, 1), 2);
      request.params.temperature = 2;
      request.params.n = 16;
      request.params.seed = first_seed + i;
      requests.push_back(request);
    }
    std::vector<Output> outputs = Plain(requests);
    if (drafted) outputs = Speculative(requests, outputs, 1, WrongEvery(3));
    std::vector<int> counts(kFakeVocab);
    for (const Output& output : outputs) {
      for (const testing::ChoiceOutput& choice : output) ++counts[choice.ids[1]];
    }
    return counts;
  };
  const std::vector<int> plain = sample(0, false);
  const std::vector<int> drafted = sample(5000, true);
  double chi_square = 0;
  int degrees = -1;
  for (int id = 0; id < kFakeVocab; ++id) {
    if (plain[id] + drafted[id] == 0) continue;
    chi_square += std::pow(plain[id] - drafted[id], 2) / (plain[id] + drafted[id]);
    ++degrees;
  }
  ASSERT_GT(degrees, 10);
  // Mean and deviation of chi-square are `degrees` and sqrt(2 * degrees); seeds are fixed.
  EXPECT_LT(chi_square, degrees + 4 * std::sqrt(2.0 * degrees));
}

// Case 14.2 with drafts: they never preempt anyone, and what they took is given back.
TEST_F(SpeculationTest, PreemptionWithDraftsChangesNothing) {
  std::vector<EngineRequest> requests;
  for (int i = 0; i < 12; ++i) requests.push_back(FakeRequest(FakePrompt(30 + i, i), 180));
  ExpectSame(requests, 12);
}

TEST_F(SpeculationTest, AnswersEndAtTheContextWithDrafts) {
  FakeRunner plain_runner(8, 128), runner(8, 128);
  const EngineRequest request = FakeRequest(FakePrompt(70, 3), 1000);
  DecodeDriver plain(Options(0), plain_runner, *tokenizer_);
  const Output expected = plain.RunOne(request);
  EXPECT_EQ(expected[0].ids.size(), 58u);
  DecodeDriver driver(Options(15), runner, *tokenizer_);
  driver.loop().AddDrafter(std::make_unique<OracleDrafter>(testing::TextsOf({request}, {expected}),
                                                           kFakeVocab, AlwaysRight));
  EXPECT_EQ(driver.RunOne(request), expected);
}

// Case 5.3 with drafts: NaN behind a wrong draft is nobody's, behind a right one it ends the
// request after the tokens before it.
TEST_F(SpeculationTest, NanBehindAWrongDraftIsNeverSeen) {
  const EngineRequest request = FakeRequest(FakePrompt(50, 2), 20);
  const std::vector<Output> plain = Plain({request});
  const std::vector<uint32_t>& ids = plain[0][0].ids;
  uint32_t absent = 0;
  while (std::find(ids.begin(), ids.end(), absent) != ids.end()) ++absent;
  ASSERT_LT(absent, static_cast<uint32_t>(kFakeVocab));
  FakeRunner runner(64);
  runner.nan_token = absent;
  std::vector<std::vector<uint32_t>> texts = testing::TextsOf({request}, plain);
  for (size_t at = 55; at < texts[0].size(); at += 4) texts[0][at] = absent;
  texts.push_back(testing::TextsOf({request}, plain)[0]);
  DecodeDriver driver(Options(6), runner, *tokenizer_);
  driver.loop().AddDrafter(std::make_unique<OracleDrafter>(texts, kFakeVocab, AlwaysRight));
  EXPECT_EQ(driver.RunOne(request), plain[0]);
}

// Look-up drafts: a model that repeats itself. Greedy decoding of the hash never does, so the
// prompt is the answer's own text.
TEST_F(SpeculationTest, LookUpSavesStepsWhereTextRepeats) {
  EngineRequest request = FakeRequest(FakePrompt(50, 5), 100);
  request.params.logit_bias = {{1, 40.0f}, {2, 35.0f}, {3, 30.0f}};
  request.params.frequency_penalty = 2.0f;  // so the three take turns
  const std::vector<Output> plain = Plain({request});
  DecodeLoopOptions options = Options(8);
  options.speculation.ngram = true;
  FakeRunner runner(64);
  DecodeDriver driver(options, runner, *tokenizer_);
  EXPECT_EQ(driver.RunOne(request), plain[0]);
  EXPECT_LT(runner.steps, plain_steps_);
}

}  // namespace
}  // namespace baton::decode
