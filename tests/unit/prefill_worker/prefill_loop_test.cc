#include "prefill_worker/prefill_loop.h"

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "engine/base/metrics.h"
#include "tests/support/collecting_sink.h"
#include "tests/support/drawing_runner.h"

namespace baton::prefill {
namespace {

using testing::CollectingSink;
using testing::FakePrompt;
using testing::FakeRequest;
using testing::FakeRunner;
using testing::GreedyIds;
using worker::v1::PrefillResponse;
using Sink = CollectingSink<PrefillResponse>;

// Notes what it is asked to do; transfers end when the test says so.
class RecordingSender : public kvtransfer::Sender {
 public:
  kvtransfer::TransferId Begin(kvtransfer::TransferSpec spec) override {
    specs.push_back(std::move(spec));
    return specs.size() - 1;
  }
  void Push(kvtransfer::TransferId id,
            int block_begin,
            int block_end,
            int layer_begin,
            int layer_end,
            absl::Span<const kv::BlockId> our_blocks) override {
    pushes.push_back({block_begin, block_end, layer_begin, layer_end});
  }
  void Commit(kvtransfer::TransferId id, std::vector<worker::v1::Token> first_tokens) override {
    commits.push_back(std::move(first_tokens));
  }
  void Abort(kvtransfer::TransferId id, absl::string_view reason) override { ++aborts; }
  void OnMessage(const worker::v1::PeerMessage& message) override {}
  void OnPeerGone(const absl::Status& reason) override {}
  std::string transport_name() const override { return "shm"; }
  double probe_bytes_per_second() const override { return 1e9; }

  void End(size_t index, absl::Status status) {
    kvtransfer::TransferResult result;
    result.status = std::move(status);
    result.units_sent = 7;
    result.bytes = 1000;
    specs[index].on_done(result);
  }

  struct Pushed {
    int block_begin, block_end, layer_begin, layer_end;
    friend bool operator==(const Pushed&, const Pushed&) = default;
  };
  std::vector<kvtransfer::TransferSpec> specs;
  std::vector<Pushed> pushes;
  std::vector<std::vector<worker::v1::Token>> commits;
  int aborts = 0;
};

class FakeConnector : public PeerConnector {
 public:
  void Connect(const std::string& address, const std::string& incarnation, Found found) override {
    if (!refusal.ok()) return found(refusal);
    found(sender);
  }
  std::shared_ptr<RecordingSender> sender = std::make_shared<RecordingSender>();
  absl::Status refusal;
};

class PrefillLoopTest : public ::testing::Test {
 protected:
  void Make(int num_blocks, int chunk_tokens, int max_calls = 100) {
    loop_.reset();
    runner_ = std::make_unique<FakeRunner>(num_blocks, 2048);
    MakeLoop(chunk_tokens, max_calls);
  }
  // On a device that draws tokens itself.
  const testing::DrawingRunner& MakeDrawing(int num_blocks, int chunk_tokens) {
    loop_.reset();
    auto runner = std::make_unique<testing::DrawingRunner>(num_blocks);
    const testing::DrawingRunner& drawing = *runner;
    runner_ = std::move(runner);
    MakeLoop(chunk_tokens, 100);
    return drawing;
  }
  void MakeLoop(int chunk_tokens, int max_calls) {
    clock_.Advance(absl::Seconds(1));
    tokenizer_ = testing::FakeTokenizer();
    PrefillLoopOptions options;
    options.chunk_tokens = chunk_tokens;
    options.max_calls = max_calls;
    options.model_fingerprint = "fake";
    options.test_poison_freed = true;
    options.clock = &clock_;
    loop_ = std::make_unique<PrefillLoop>(options, *runner_, *tokenizer_, connector_,
                                          worker::WorkerMetrics(metrics_.get()));
  }
  void TearDown() override {
    if (loop_ == nullptr) return;
    Settle();
    // Case 3.1: when idle nothing is held but by the prefix cache.
    const kv::BlockCounts& counts = loop_->memory().pool().counts();
    EXPECT_EQ(counts.active, 0);
    EXPECT_EQ(counts.total(), runner_->layout().num_blocks);
    EXPECT_EQ(loop_->num_calls(), 0);
    EXPECT_EQ(loop_->load().requests_running(), 0u);
    EXPECT_EQ(loop_->load().requests_waiting(), 0u);
    EXPECT_EQ(loop_->load().queue_tokens(), 0u);
    loop_->memory().pool().CheckInvariants();
    loop_->memory().cache().CheckInvariants();
  }

  struct OpenCall {
    CallId id = 0;
    std::shared_ptr<Sink> sink = std::make_shared<Sink>();
  };
  OpenCall Open(runtime::EngineRequest request, bool needs_handoff) {
    OpenCall call;
    absl::StatusOr<CallId> id = loop_->Open(std::move(request), needs_handoff, call.sink);
    EXPECT_TRUE(id.ok()) << id.status();
    call.id = *id;
    return call;
  }
  void Settle() {
    while (loop_->RunOnce(absl::ZeroDuration())) {
    }
  }
  Ticket MakeTicket(int blocks, int first_missing) {
    Ticket ticket;
    ticket.set_decode_address("decode:1");
    ticket.set_first_missing_block(first_missing);
    for (int i = 0; i < blocks; ++i) ticket.add_block_table(100 + i);
    return ticket;
  }
  static PrefillResponse::FirstTokens First(const std::vector<PrefillResponse>& responses) {
    return responses.empty() ? PrefillResponse::FirstTokens() : responses[0].first_tokens();
  }

  base::FakeClock clock_;
  std::unique_ptr<base::Metrics> metrics_ = base::Metrics::Create(base::Role::kPrefill, "fake");
  FakeConnector connector_;
  std::unique_ptr<FakeRunner> runner_;
  std::unique_ptr<text::Tokenizer> tokenizer_;
  std::unique_ptr<PrefillLoop> loop_;
};

// Case 11.8: one token, block edges, chunk edges.
TEST_F(PrefillLoopTest, FirstTokenIsTheModelsForEveryPromptLength) {
  Make(64, 128);
  for (const int length : {1, 2, 63, 64, 65, 127, 128, 129, 192, 1000}) {
    const std::vector<uint32_t> prompt = FakePrompt(length, length);
    const OpenCall call = Open(FakeRequest(prompt, 1), false);
    Settle();
    ASSERT_TRUE(call.sink->status().ok()) << length << " " << call.sink->status();
    const auto responses = call.sink->responses();
    ASSERT_EQ(responses.size(), 2u);
    ASSERT_EQ(First(responses).tokens_size(), 1);
    EXPECT_EQ(First(responses).tokens(0).id(), GreedyIds(prompt, 1)[0]) << length;
    EXPECT_EQ(First(responses).tokens(0).position(), static_cast<uint32_t>(length));
    EXPECT_TRUE(responses[1].has_done());
  }
}

// Case 14.1 in small: batched or alone, the token is the same.
TEST_F(PrefillLoopTest, PromptsInOneStepDoNotDisturbEachOther) {
  Make(64, 512);
  std::vector<OpenCall> calls;
  for (int i = 0; i < 6; ++i)
    calls.push_back(Open(FakeRequest(FakePrompt(40 + 13 * i, i), 1), false));
  EXPECT_TRUE(loop_->RunOnce(absl::ZeroDuration()));
  EXPECT_EQ(runner_->steps, 1);
  for (int i = 0; i < 6; ++i) {
    ASSERT_TRUE(calls[i].sink->status().ok());
    EXPECT_EQ(First(calls[i].sink->responses()).tokens(0).id(),
              GreedyIds(FakePrompt(40 + 13 * i, i), 1)[0]);
  }
}

TEST_F(PrefillLoopTest, CachedBlocksAreNotComputedAgain) {
  Make(64, 128);
  const std::vector<uint32_t> prompt = FakePrompt(200, 1);
  Open(FakeRequest(prompt, 1), false);
  Settle();
  runner_->tokens_computed = 0;
  const OpenCall again = Open(FakeRequest(prompt, 1), false);
  Settle();
  EXPECT_EQ(runner_->tokens_computed, 200 - 192);
  EXPECT_EQ(First(again.sink->responses()).cached_prompt_tokens(), 192u);
  EXPECT_EQ(First(again.sink->responses()).tokens(0).id(), GreedyIds(prompt, 1)[0]);
  // A match never covers the last prompt token.
  const OpenCall edge = Open(FakeRequest(FakePrompt(128, 1), 1), false);
  Settle();
  EXPECT_EQ(First(edge.sink->responses()).cached_prompt_tokens(), 64u);
}

TEST_F(PrefillLoopTest, SaltSeparatesCaches) {
  Make(64, 128);
  const std::vector<uint32_t> prompt = FakePrompt(200, 1);
  Open(FakeRequest(prompt, 1), false);
  Settle();
  runtime::EngineRequest salted = FakeRequest(prompt, 1);
  salted.cache_salt = "other tenant";
  const OpenCall call = Open(salted, false);
  Settle();
  EXPECT_EQ(First(call.sink->responses()).cached_prompt_tokens(), 0u);
}

// Case 11.5: the first token ends the request: no transfer, one token.
TEST_F(PrefillLoopTest, RequestThatEndsWithItsFirstTokenIsNotShipped) {
  Make(64, 128);
  const std::vector<uint32_t> prompt = FakePrompt(100, 3);
  const uint32_t first = GreedyIds(prompt, 1)[0];
  runtime::EngineRequest by_length = FakeRequest(prompt, 1);
  runtime::EngineRequest by_token = FakeRequest(prompt, 50);
  by_token.params.stop_token_ids = {first};
  runtime::EngineRequest by_string = FakeRequest(prompt, 50);
  by_string.params.stop = {std::string(1, static_cast<char>('a' + first))};
  const std::pair<runtime::EngineRequest, worker::v1::Finish> cases[] = {
      {by_length, worker::v1::FINISH_LENGTH},
      {by_token, worker::v1::FINISH_STOP_TOKEN},
      {by_string, worker::v1::FINISH_STOP_STRING},
  };
  for (const auto& [request, finish] : cases) {
    const OpenCall call = Open(request, true);
    Settle();
    ASSERT_TRUE(call.sink->status().ok());
    const auto responses = call.sink->responses();
    ASSERT_EQ(First(responses).finished_size(), 1);
    EXPECT_EQ(First(responses).finished(0).finish(), finish);
    EXPECT_EQ(First(responses).tokens_size(), 1);
    EXPECT_TRUE(responses.back().has_done());
  }
  EXPECT_TRUE(connector_.sender->specs.empty());
}

// Case 6.2: every choice has its own first token, all from one pass.
TEST_F(PrefillLoopTest, ChoicesDrawTheirOwnFirstTokens) {
  Make(64, 128);
  runtime::EngineRequest request = FakeRequest(FakePrompt(100, 4), 1);
  request.params.temperature = 3;
  request.params.n = 8;
  request.params.seed = 7;
  const OpenCall first = Open(request, false);
  Settle();
  const OpenCall second = Open(request, false);
  Settle();
  std::set<uint32_t> ids;
  const auto a = First(first.sink->responses()), b = First(second.sink->responses());
  ASSERT_EQ(a.tokens_size(), 8);
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(a.tokens(i).choice(), static_cast<uint32_t>(i));
    EXPECT_EQ(a.tokens(i).id(), b.tokens(i).id());
    ids.insert(a.tokens(i).id());
  }
  EXPECT_GT(ids.size(), 2u);
}

// Case 7.2: the token drawn on prefill carries its log probability, for every choice.
TEST_F(PrefillLoopTest, FirstTokensCarryLogprobs) {
  Make(64, 128);
  runtime::EngineRequest request = FakeRequest(FakePrompt(100, 4), 1);
  request.params.logprobs = 3;
  request.params.n = 2;
  const OpenCall call = Open(request, false);
  Settle();
  const PrefillResponse::FirstTokens first = First(call.sink->responses());
  ASSERT_EQ(first.tokens_size(), 2);
  for (const worker::v1::Token& token : first.tokens()) {
    EXPECT_TRUE(token.has_logprob());
    ASSERT_EQ(token.top_size(), 3);
    EXPECT_EQ(token.top(0).token_id(), token.id());  // greedy
    EXPECT_EQ(token.top(0).logprob(), token.logprob());
  }
}

// Of chunks that end a prompt and others, of one choice and several.
TEST_F(PrefillLoopTest, ADeviceDrawsTheFirstTokensThatTheHostWould) {
  std::vector<runtime::EngineRequest> requests;
  for (int i = 0; i < 6; ++i) {
    requests.push_back(FakeRequest(FakePrompt(50 + 60 * i, i), 1));
    runtime::SamplingParams& params = requests.back().params;
    params.temperature = i % 2 == 0 ? 2.0f : 0.0f;
    params.repetition_penalty = 1.5f;
    params.logprobs = i % 3 - 1;
    params.seed = static_cast<uint64_t>(i);
  }
  const auto run = [&] {
    std::vector<OpenCall> calls;
    for (const runtime::EngineRequest& request : requests) calls.push_back(Open(request, false));
    Settle();
    std::vector<PrefillResponse::FirstTokens> first;
    for (const OpenCall& call : calls) first.push_back(First(call.sink->responses()));
    return first;
  };
  Make(64, 256);
  const auto want = run();
  const testing::DrawingRunner& device = MakeDrawing(64, 256);
  const auto got = run();
  for (size_t i = 0; i < requests.size(); ++i) {
    ASSERT_EQ(got[i].tokens_size(), 1);
    EXPECT_EQ(got[i].tokens(0).id(), want[i].tokens(0).id());
    EXPECT_EQ(got[i].tokens(0).has_logprob(), want[i].tokens(0).has_logprob());
    EXPECT_NEAR(got[i].tokens(0).logprob(), want[i].tokens(0).logprob(), 1e-5);
    EXPECT_EQ(got[i].tokens(0).top_size(), want[i].tokens(0).top_size());
  }
  EXPECT_EQ(device.rows_on_device, 6);
  EXPECT_EQ(device.rows_on_host, 0);
  // Several choices of one prompt share a row: it comes to the host.
  const auto choices = [&] {
    runtime::EngineRequest request = FakeRequest(FakePrompt(100, 9), 1);
    request.params.temperature = 2;
    request.params.n = 4;
    const OpenCall call = Open(request, false);
    Settle();
    std::vector<uint32_t> ids;
    const PrefillResponse::FirstTokens first = First(call.sink->responses());
    for (const auto& token : first.tokens()) ids.push_back(token.id());
    return ids;
  };
  const std::vector<uint32_t> drawn = choices();
  EXPECT_EQ(device.rows_on_host, 1);
  EXPECT_EQ(metrics_->counter(base::CounterId::kSampledRows, "device").value(), 6);
  EXPECT_EQ(metrics_->counter(base::CounterId::kSampledRows, "host").value(), 6 + 1);
  Make(64, 256);
  EXPECT_EQ(choices(), drawn);
}

// A call that ends while its last chunk is computed has generated nothing.
TEST_F(PrefillLoopTest, NoTokenIsCountedForAPromptThatWasCancelledInItsLastStep) {
  Make(64, 128);
  const OpenCall call = Open(FakeRequest(FakePrompt(60, 1), 5), false);
  runner_->on_layer = [&](int layer) {
    if (layer == 1) loop_->Cancel(call.id, absl::CancelledError("client"));
  };
  Settle();
  EXPECT_EQ(call.sink->status().code(), absl::StatusCode::kCancelled);
  const auto tokens = metrics_->histogram(base::HistogramId::kRequestGenerationTokens);
  EXPECT_EQ(tokens.sum(), 0);
  EXPECT_EQ(tokens.count(), 1u);
}

// Case 5.3.
TEST_F(PrefillLoopTest, NanLogitsEndThatRequestAlone) {
  Make(64, 512);
  std::vector<uint32_t> bad = FakePrompt(70, 1);
  bad.back() = 3;
  std::vector<uint32_t> good = FakePrompt(70, 2);
  good.back() = 4;
  runner_->nan_token = 3;
  const OpenCall broken = Open(FakeRequest(bad, 1), false);
  const OpenCall fine = Open(FakeRequest(good, 1), false);
  Settle();
  EXPECT_EQ(broken.sink->status().code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(broken.sink->responses().empty());
  EXPECT_TRUE(fine.sink->status().ok());
}

TEST_F(PrefillLoopTest, EarlyTicketShipsLayerByLayer) {
  Make(64, 128);
  const OpenCall call = Open(FakeRequest(FakePrompt(200, 5), 10), true);
  loop_->GiveTicket(call.id, MakeTicket(4, 1));
  Settle();
  using P = RecordingSender::Pushed;
  // Block 0 is at the peer already. Two chunks: 128 tokens, then 72 with the partly filled last
  // block.
  const std::vector<P> expected = {{1, 2, 0, 1}, {1, 2, 1, 2}, {1, 2, 2, 3},
                                   {2, 4, 0, 1}, {2, 4, 1, 2}, {2, 4, 2, 3}};
  EXPECT_EQ(connector_.sender->pushes, expected);
  ASSERT_EQ(connector_.sender->commits.size(), 1u);
  ASSERT_EQ(connector_.sender->commits[0].size(), 1u);
  EXPECT_EQ(connector_.sender->commits[0][0].id(), First(call.sink->responses()).tokens(0).id());
  EXPECT_FALSE(call.sink->finished());
  EXPECT_EQ(connector_.sender->specs[0].peer_blocks,
            (std::vector<kv::BlockId>{100, 101, 102, 103}));
  connector_.sender->End(0, absl::OkStatus());
  Settle();
  ASSERT_TRUE(call.sink->status().ok());
  EXPECT_EQ(call.sink->responses().back().done().kv_bytes(), 1000u);
  EXPECT_EQ(call.sink->responses().back().done().transport(), "shm");
}

TEST_F(PrefillLoopTest, FirstTokensDoNotWaitForTheTicket) {
  Make(64, 128);
  const OpenCall call = Open(FakeRequest(FakePrompt(200, 5), 10), true);
  Settle();
  EXPECT_EQ(First(call.sink->responses()).tokens_size(), 1);
  loop_->GiveTicket(call.id, MakeTicket(4, 0));
  Settle();
  using P = RecordingSender::Pushed;
  EXPECT_EQ(connector_.sender->pushes, (std::vector<P>{{0, 4, 0, 3}}));
  EXPECT_EQ(connector_.sender->commits.size(), 1u);
  connector_.sender->End(0, absl::OkStatus());
}

TEST_F(PrefillLoopTest, TicketInTheMiddleOfAStepShipsWhatIsDoneAndGoesOn) {
  Make(64, 128);
  const OpenCall call = Open(FakeRequest(FakePrompt(200, 5), 10), true);
  ASSERT_TRUE(loop_->RunOnce(absl::ZeroDuration()));
  runner_->on_layer = [&](int layer) {
    if (layer == 1) loop_->GiveTicket(call.id, MakeTicket(4, 0));
  };
  Settle();
  using P = RecordingSender::Pushed;
  // The first chunk's blocks at once, then the running chunk's layers so far, then the last layer.
  EXPECT_EQ(connector_.sender->pushes, (std::vector<P>{{0, 2, 0, 3}, {2, 4, 0, 2}, {2, 4, 2, 3}}));
  connector_.sender->End(0, absl::OkStatus());
}

// The ticket may be faster than the queue: what the prefix cache gives at admission is shipped too.
TEST_F(PrefillLoopTest, TicketBeforeAdmissionShipsCachedBlocksToo) {
  Make(64, 128);
  const std::vector<uint32_t> prompt = FakePrompt(200, 5);
  Open(FakeRequest(prompt, 1), false);
  Settle();
  const OpenCall call = Open(FakeRequest(prompt, 10), true);
  loop_->GiveTicket(call.id, MakeTicket(4, 0));
  Settle();
  using P = RecordingSender::Pushed;
  // Three blocks are cached; the last one is computed.
  EXPECT_EQ(connector_.sender->pushes,
            (std::vector<P>{{0, 3, 0, 3}, {3, 4, 0, 1}, {3, 4, 1, 2}, {3, 4, 2, 3}}));
  connector_.sender->End(0, absl::OkStatus());
}

TEST_F(PrefillLoopTest, NothingToSendIsLegal) {
  Make(64, 128);
  const OpenCall call = Open(FakeRequest(FakePrompt(128, 5), 10), true);
  loop_->GiveTicket(call.id, MakeTicket(2, 2));
  Settle();
  EXPECT_TRUE(connector_.sender->pushes.empty());
  EXPECT_EQ(connector_.sender->commits.size(), 1u);
  connector_.sender->End(0, absl::OkStatus());
  Settle();
  EXPECT_TRUE(call.sink->status().ok());
}

TEST_F(PrefillLoopTest, BadTicketIsRefused) {
  Make(64, 128);
  const OpenCall short_table = Open(FakeRequest(FakePrompt(128, 5), 10), true);
  loop_->GiveTicket(short_table.id, MakeTicket(1, 0));
  const OpenCall past_end = Open(FakeRequest(FakePrompt(128, 5), 10), true);
  loop_->GiveTicket(past_end.id, MakeTicket(2, 3));
  Settle();
  EXPECT_EQ(short_table.sink->status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(past_end.sink->status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(PrefillLoopTest, RefusedPeerEndsTheCallWithItsStatus) {
  Make(64, 128);
  connector_.refusal =
      absl::FailedPreconditionError("fingerprint: field=kv_dtype ours=fp8 peer=bf16");
  const OpenCall call = Open(FakeRequest(FakePrompt(128, 5), 10), true);
  loop_->GiveTicket(call.id, MakeTicket(2, 0));
  Settle();
  EXPECT_EQ(call.sink->status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(call.sink->status().message().find("kv_dtype"), std::string::npos);
}

TEST_F(PrefillLoopTest, FailedTransferEndsTheCallWithItsStatus) {
  Make(64, 128);
  const OpenCall call = Open(FakeRequest(FakePrompt(128, 5), 10), true);
  loop_->GiveTicket(call.id, MakeTicket(2, 0));
  Settle();
  connector_.sender->End(0, absl::UnavailableError("peer gone"));
  Settle();
  EXPECT_EQ(call.sink->status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(PrefillLoopTest, TicketThatNeverComesIsABoundedWait) {
  Make(64, 128);
  const OpenCall call = Open(FakeRequest(FakePrompt(128, 5), 10), true);
  Settle();
  clock_.Advance(PrefillLoopOptions{}.ticket_timeout + absl::Seconds(1));
  Settle();
  EXPECT_EQ(call.sink->status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(PrefillLoopTest, CancelInTheQueueComputesNothing) {
  Make(64, 64);
  const OpenCall first = Open(FakeRequest(FakePrompt(64, 5), 1), false);
  const OpenCall queued = Open(FakeRequest(FakePrompt(500, 6), 1), false);
  // Case 3.2: an expired request leaves the queue without prefill.
  loop_->Cancel(queued.id, absl::DeadlineExceededError("deadline passed"));
  Settle();
  EXPECT_EQ(queued.sink->status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(runner_->tokens_computed, 64);
}

// Case 3.1: from abort to free within one layer.
TEST_F(PrefillLoopTest, CancelInAStepFreesItsBlocksWithinOneLayer) {
  Make(64, 512);
  const OpenCall call = Open(FakeRequest(FakePrompt(300, 6), 10), true);
  const OpenCall other = Open(FakeRequest(FakePrompt(100, 7), 1), false);
  std::vector<int> active;
  runner_->on_layer = [&](int layer) {
    if (layer == 0) loop_->Cancel(call.id, absl::CancelledError("gone"));
    active.push_back(loop_->memory().pool().counts().active);
  };
  Settle();
  EXPECT_EQ(active, (std::vector<int>{7, 2, 2}));
  EXPECT_EQ(call.sink->status().code(), absl::StatusCode::kCancelled);
  // The other prompt of the step is not disturbed.
  ASSERT_TRUE(other.sink->status().ok());
  EXPECT_EQ(First(other.sink->responses()).tokens(0).id(), GreedyIds(FakePrompt(100, 7), 1)[0]);
}

TEST_F(PrefillLoopTest, CancelWaitsForTheTransferThatReadsItsBlocks) {
  Make(64, 512);
  const OpenCall call = Open(FakeRequest(FakePrompt(300, 6), 10), true);
  loop_->GiveTicket(call.id, MakeTicket(5, 0));
  Settle();
  const base::Histogram freed = metrics_->histogram(base::HistogramId::kKvAbortToFree);
  loop_->Cancel(call.id, absl::CancelledError("gone"));
  clock_.Advance(absl::Seconds(1));  // the engine thread is busy
  Settle();
  EXPECT_EQ(call.sink->status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(connector_.sender->aborts, 1);
  EXPECT_EQ(loop_->memory().pool().counts().active, 5);
  EXPECT_EQ(loop_->num_calls(), 1);
  EXPECT_EQ(freed.count(), 0u);
  clock_.Advance(absl::Seconds(2));
  connector_.sender->End(0, absl::CancelledError("aborted"));
  Settle();
  EXPECT_EQ(freed.count(), 1u);
  EXPECT_DOUBLE_EQ(freed.sum(), 3.0);
}

TEST_F(PrefillLoopTest, PromptsWaitForBlocksInOrder) {
  Make(8, 512);
  const OpenCall big = Open(FakeRequest(FakePrompt(400, 1), 10), true);
  Settle();
  const OpenCall waits = Open(FakeRequest(FakePrompt(300, 2), 1), false);
  runtime::EngineRequest unimportant = FakeRequest(FakePrompt(30, 3), 1);
  unimportant.priority = -1;
  const OpenCall behind = Open(unimportant, false);
  const OpenCall shorter = Open(FakeRequest(FakePrompt(60, 4), 1), false);
  Settle();
  // `big` waits for its ticket and holds 7 of 8 blocks; nobody passes the one in front, but a
  // shorter one is in front of it.
  EXPECT_TRUE(shorter.sink->finished());
  EXPECT_FALSE(waits.sink->finished());
  EXPECT_FALSE(behind.sink->finished());
  EXPECT_EQ(loop_->load().requests_waiting(), 2u);
  loop_->Cancel(big.id, absl::CancelledError("gone"));
  Settle();
  EXPECT_TRUE(waits.sink->status().ok());
  EXPECT_TRUE(behind.sink->status().ok());
}

TEST_F(PrefillLoopTest, CallsAboveTheLimitAreRefused) {
  Make(64, 64, /*max_calls=*/2);
  Open(FakeRequest(FakePrompt(10, 1), 1), false);
  Open(FakeRequest(FakePrompt(10, 2), 1), false);
  const auto sink = std::make_shared<Sink>();
  EXPECT_EQ(loop_->Open(FakeRequest(FakePrompt(10, 3), 1), false, sink).status().code(),
            absl::StatusCode::kResourceExhausted);
  Settle();
  EXPECT_FALSE(sink->finished());
  Open(FakeRequest(FakePrompt(10, 3), 1), false);
}

TEST_F(PrefillLoopTest, FailedStepEndsItsRequestsAndNoOther) {
  Make(64, 64);
  const OpenCall call = Open(FakeRequest(FakePrompt(10, 1), 1), false);
  runner_->step_status = absl::InvalidArgumentError("a bug");
  Settle();
  EXPECT_EQ(call.sink->status().code(), absl::StatusCode::kInternal);
  runner_->step_status = absl::OkStatus();
  const OpenCall next = Open(FakeRequest(FakePrompt(10, 1), 1), false);
  Settle();
  EXPECT_TRUE(next.sink->status().ok());
}

TEST_F(PrefillLoopTest, StopEndsOpenCallsOnce) {
  Make(64, 64);
  const OpenCall call = Open(FakeRequest(FakePrompt(10, 1), 10), true);
  loop_->Start();
  loop_->Stop();
  EXPECT_EQ(call.sink->status().code(), absl::StatusCode::kUnavailable);
  loop_.reset();
}

// The draft model's KV of whole blocks goes to a place of its own, after the prompt itself.
class DraftPrefillTest : public PrefillLoopTest {
 protected:
  void MakeWithDraftModel(int num_blocks) {
    Make(num_blocks, 128);
    draft_runner_ = std::make_unique<FakeRunner>(num_blocks, 2048);
    loop_->SetDraftModel(*draft_runner_, draft_connector_);
  }
  // Prompts of 200 tokens: 4 blocks, 3 of them full.
  OpenCall OpenWithDraft(int seed, int draft_blocks = 3, int first_missing = 0) {
    const OpenCall call = Open(FakeRequest(FakePrompt(200, seed), 10), true);
    Ticket ticket = MakeTicket(4, 0);
    for (int i = 0; i < draft_blocks; ++i) ticket.mutable_draft()->add_block_table(500 + i);
    ticket.mutable_draft()->set_first_missing_block(first_missing);
    loop_->GiveTicket(call.id, ticket);
    return call;
  }
  RecordingSender& draft_sender() { return *draft_connector_.sender; }

  std::unique_ptr<FakeRunner> draft_runner_;
  FakeConnector draft_connector_;
};

TEST_F(DraftPrefillTest, FullBlocksAreComputedAfterThePromptAndSent) {
  MakeWithDraftModel(64);
  const OpenCall call = OpenWithDraft(1, 3, 1);
  int prompt_done_at_draft_step = -1;
  draft_runner_->on_layer = [&](int) {
    if (prompt_done_at_draft_step < 0)
      prompt_done_at_draft_step = static_cast<int>(call.sink->responses().size());
  };
  Settle();
  EXPECT_EQ(prompt_done_at_draft_step, 1);  // the first token was out
  EXPECT_EQ(draft_runner_->tokens_computed, 192);
  ASSERT_EQ(draft_sender().specs.size(), 1u);
  EXPECT_EQ(draft_sender().specs[0].prompt_tokens, 192);
  EXPECT_EQ(draft_sender().specs[0].first_missing_block, 1);
  EXPECT_EQ(draft_sender().specs[0].peer_blocks, (std::vector<kv::BlockId>{500, 501, 502}));
  ASSERT_EQ(draft_sender().commits.size(), 1u);
  EXPECT_TRUE(draft_sender().commits[0].empty());
  // Blocks of a layer in a step, the known one left out.
  EXPECT_EQ(draft_sender().pushes[0], (RecordingSender::Pushed{1, 2, 0, 1}));
  // Each hand-over ends by itself.
  connector_.sender->End(0, absl::OkStatus());
  Settle();
  EXPECT_TRUE(call.sink->status().ok());
  draft_sender().End(0, absl::OkStatus());
  Settle();
}

TEST_F(DraftPrefillTest, TheSamePromptIsComputedOnce) {
  MakeWithDraftModel(64);
  for (int round = 0; round < 2; ++round) {
    OpenWithDraft(1);
    Settle();
    connector_.sender->End(round, absl::OkStatus());
    draft_sender().End(round, absl::OkStatus());
    Settle();
  }
  // The second time the last block only.
  EXPECT_EQ(draft_runner_->tokens_computed, 192 + 64);
}

TEST_F(DraftPrefillTest, NothingThatGoesWrongTouchesTheRequest) {
  const auto expect_fine = [&](const OpenCall& call, size_t transfer) {
    Settle();
    connector_.sender->End(transfer, absl::OkStatus());
    Settle();
    EXPECT_TRUE(call.sink->status().ok()) << call.sink->status();
  };
  MakeWithDraftModel(64);
  expect_fine(OpenWithDraft(1, 2), 0);  // a place of the wrong size
  expect_fine(OpenWithDraft(2, 3, 3), 1);
  EXPECT_EQ(draft_runner_->steps, 0);
  draft_connector_.refusal = absl::FailedPreconditionError("another draft model");
  expect_fine(OpenWithDraft(3), 2);
  draft_connector_.refusal = absl::OkStatus();
  draft_runner_->step_status = absl::InternalError("broken");
  expect_fine(OpenWithDraft(4), 3);
  EXPECT_EQ(draft_sender().aborts, 1);
  draft_sender().End(0, absl::AbortedError("aborted"));
  Settle();
}

TEST_F(DraftPrefillTest, ACancelledRequestTakesItsDraftAlong) {
  MakeWithDraftModel(64);
  const OpenCall call = OpenWithDraft(1);
  draft_runner_->on_layer = [&](int layer) {
    if (layer == 1 && draft_runner_->steps == 1) {
      loop_->Cancel(call.id, absl::CancelledError("gone"));
    }
  };
  Settle();
  EXPECT_EQ(draft_sender().aborts, 1);
  EXPECT_TRUE(draft_sender().commits.empty());
  connector_.sender->End(0, absl::CancelledError("gone"));
  draft_sender().End(0, absl::CancelledError("gone"));
  Settle();
  EXPECT_EQ(draft_runner_->steps, 1);
}

}  // namespace
}  // namespace baton::prefill
