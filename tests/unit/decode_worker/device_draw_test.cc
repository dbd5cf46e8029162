// A device that draws tokens itself, in the decode loop: answers are what they are without one,
// with drafts and without, whatever is asked for, and steps come to the host only where they must.

#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "decode_worker/decode_loop.h"
#include "engine/base/metrics.h"
#include "tests/support/decode_driver.h"
#include "tests/support/drawing_runner.h"

namespace baton::decode {
namespace {

using runtime::EngineRequest;
using testing::DecodeDriver;
using testing::DrawingRunner;
using testing::FakePrompt;
using testing::FakeRequest;
using testing::FakeRunner;
using testing::kFakeVocab;
using testing::Output;

class DeviceDrawTest : public ::testing::Test {
 protected:
  static DecodeLoopOptions Options(int max_drafts) {
    DecodeLoopOptions options;
    options.scheduler.chunk_tokens = 128;
    options.scheduler.max_batch = 8;
    options.speculation.max_drafts = max_drafts;
    options.speculation.ngram = false;
    options.model_fingerprint = "fake";
    return options;
  }

  // Everything that a request may ask of a draw.
  static std::vector<EngineRequest> AllKinds() {
    std::vector<EngineRequest> requests;
    for (int i = 0; i < 12; ++i) {
      EngineRequest request = FakeRequest(FakePrompt(30 + 11 * i, i), 40);
      request.params.seed = static_cast<uint64_t>(i);
      request.params.temperature = i % 3 == 0 ? 0.0f : 1.2f;
      if (i % 4 == 1) request.params.top_p = 0.8f;
      if (i % 4 == 2) request.params.top_k = 6;
      if (i % 5 == 3) request.params.min_p = 0.05f;
      if (i % 2 == 1) request.params.presence_penalty = 1.5f;
      if (i % 3 == 2) request.params.frequency_penalty = 0.7f;
      if (i % 5 == 0) request.params.repetition_penalty = 1.4f;
      if (i % 4 == 0) request.params.logit_bias = {{2, 4.0f}, {7, -50.0f}};
      if (i % 3 == 1) request.params.logprobs = i % 5;
      if (i % 2 == 0) request.params.stop_token_ids = {1, 4, 9, 16};
      if (i % 4 == 2) request.params.min_tokens = 20;
      requests.push_back(request);
    }
    return requests;
  }

  std::vector<Output> OnHost(const std::vector<EngineRequest>& requests) {
    FakeRunner runner(128);
    return DecodeDriver(Options(0), runner, *tokenizer_).Run(requests);
  }

  // The device's logarithms are not the host's.
  static void ExpectSame(const std::vector<Output>& got, const std::vector<Output>& want) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i].size(), want[i].size());
      for (size_t choice = 0; choice < got[i].size(); ++choice) {
        const testing::ChoiceOutput &a = got[i][choice], &b = want[i][choice];
        EXPECT_EQ(a.ids, b.ids) << i;
        EXPECT_EQ(a.finish, b.finish) << i;
        EXPECT_EQ(a.stop_token_id, b.stop_token_id) << i;
        EXPECT_EQ(a.top.size(), b.top.size()) << i;
        ASSERT_EQ(a.logprobs.size(), b.logprobs.size()) << i;
        for (size_t k = 0; k < a.logprobs.size(); ++k)
          EXPECT_NEAR(a.logprobs[k], b.logprobs[k], 1e-5) << i;
      }
    }
  }

  const std::unique_ptr<text::Tokenizer> tokenizer_ = testing::FakeTokenizer();
};

TEST_F(DeviceDrawTest, AnswersAreTheHostsWithDraftsAndWithout) {
  const std::vector<EngineRequest> requests = AllKinds();
  const std::vector<Output> want = OnHost(requests);
  size_t stopped = 0;
  for (const Output& output : want)
    stopped += output[0].finish == worker::v1::FINISH_STOP_TOKEN ? 1 : 0;
  EXPECT_GE(stopped, 3u) << "or stop tokens are not tested";
  for (const int drafts : {0, 1, 5}) {
    for (const size_t wrong_every : {1, 2, 5, 1000}) {
      DrawingRunner runner(128);
      DecodeDriver driver(Options(drafts), runner, *tokenizer_);
      const auto wrong = [=](size_t position) { return position % wrong_every == 0; };
      driver.loop().AddDrafter(std::make_unique<testing::OracleDrafter>(
          testing::TextsOf(requests, want), kFakeVocab, wrong));
      ExpectSame(driver.Run(requests), want);
      EXPECT_GT(runner.rows_on_device, 100);
      EXPECT_EQ(runner.rows_on_host, 0);
    }
  }
}

TEST_F(DeviceDrawTest, OnlyTheFirstTokensOfSeveralChoicesAreDrawnOnTheHost) {
  EngineRequest request = FakeRequest(FakePrompt(70, 3), 20);
  request.params.temperature = 1;
  request.params.n = 3;
  request.params.presence_penalty = 2;
  DrawingRunner runner(128);
  const auto metrics = base::Metrics::Create(base::Role::kDecode, "fake");
  DecodeDriver driver(Options(0), runner, *tokenizer_, worker::WorkerMetrics(metrics.get()));
  ExpectSame(driver.Run({request}), OnHost({request}));
  EXPECT_EQ(runner.rows_on_host, 1);
  EXPECT_EQ(runner.rows_on_device, 3 * 19);
  EXPECT_EQ(metrics->counter(base::CounterId::kSampledRows, "device").value(), 57);
  EXPECT_EQ(metrics->counter(base::CounterId::kSampledRows, "host").value(), 1);
}

// More edits than there is room for in some steps: those are drawn on the host.
TEST_F(DeviceDrawTest, PenaltiesBeyondTheRoomForThemFallBack) {
  std::vector<EngineRequest> requests;
  for (int i = 0; i < 4; ++i) {
    requests.push_back(FakeRequest(FakePrompt(20 + i, i), 60));
    requests.back().params.frequency_penalty = 1;
  }
  DrawingRunner runner(128, {64, 20});
  ExpectSame(DecodeDriver(Options(0), runner, *tokenizer_).Run(requests), OnHost(requests));
  EXPECT_GT(runner.rows_on_device, 4);
  EXPECT_GT(runner.rows_on_host, 40);
}

TEST_F(DeviceDrawTest, APreemptedChoiceGoesOnWhereItWas) {
  std::vector<EngineRequest> requests;
  for (int i = 0; i < 6; ++i) {
    requests.push_back(FakeRequest(FakePrompt(60, i), 80));
    requests.back().params.temperature = 1;
    requests.back().params.presence_penalty = 1;
  }
  DrawingRunner runner(9);  // three whole answers
  const auto metrics = base::Metrics::Create(base::Role::kDecode, "fake");
  DecodeDriver driver(Options(0), runner, *tokenizer_, worker::WorkerMetrics(metrics.get()));
  ExpectSame(driver.Run(requests), OnHost(requests));
  EXPECT_GT(metrics->counter(base::CounterId::kPreemptions).value(), 0);
  EXPECT_EQ(runner.rows_on_host, 0);
}

TEST_F(DeviceDrawTest, ErrorsEndTheRequestAloneAndAreCounted) {
  const EngineRequest good = FakeRequest(FakePrompt(50, 1), 30);
  EngineRequest masked = FakeRequest(FakePrompt(50, 2), 30);
  masked.params.min_tokens = 5;
  for (uint32_t id = 0; id < kFakeVocab; ++id) masked.params.stop_token_ids.push_back(id);
  const std::vector<Output> want = OnHost({good});
  for (const bool on_device : {false, true}) {
    std::unique_ptr<FakeRunner> runner;
    if (on_device) {
      runner = std::make_unique<DrawingRunner>(64);
    } else {
      runner = std::make_unique<FakeRunner>(64);
    }
    const auto metrics = base::Metrics::Create(base::Role::kDecode, "fake");
    DecodeLoop loop(Options(0), *runner, *tokenizer_, worker::WorkerMetrics(metrics.get()));
    using Sink = testing::CollectingSink<worker::v1::DecodeResponse>;
    const auto run = [&](const EngineRequest& request) {
      auto sink = std::make_shared<Sink>();
      EXPECT_TRUE(loop.Open(request, true, sink).ok());
      while (loop.RunOnce(absl::ZeroDuration())) {
      }
      return sink;
    };
    EXPECT_EQ(run(masked)->status(),
              absl::InvalidArgumentError("min_tokens: every token is a stop token"));
    runner->nan_token = want[0][0].ids[4];
    const auto sink = run(good);
    EXPECT_EQ(sink->status(), absl::InternalError("logits: not finite"));
    EXPECT_EQ(sink->responses().size(), 5u) << "tokens before it have been sent";
    EXPECT_EQ(metrics->counter(base::CounterId::kNanLogits).value(), 2);
    loop.Stop();
  }
}

}  // namespace
}  // namespace baton::decode
