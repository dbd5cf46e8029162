#include "decode_worker/decode_loop.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "engine/base/metrics.h"
#include "tests/support/collecting_sink.h"
#include "tests/support/fake_receiver.h"
#include "tests/support/fake_runner.h"

namespace baton::decode {
namespace {

using kvtransfer::ReceiverEvent;
using testing::CollectingSink;
using testing::FakePrompt;
using testing::FakeReceiver;
using testing::FakeRequest;
using testing::FakeRunner;
using testing::GreedyIds;
using worker::v1::DecodeResponse;
using Sink = CollectingSink<DecodeResponse>;

class DecodeLoopTest : public ::testing::Test {
 protected:
  void Make(int num_blocks, int max_model_len = 2048) {
    loop_.reset();
    clock_.Advance(absl::Seconds(1));
    runner_ = std::make_unique<FakeRunner>(num_blocks, max_model_len);
    tokenizer_ = testing::FakeTokenizer();
    DecodeLoopOptions options;
    options.scheduler.chunk_tokens = 128;
    options.scheduler.max_batch = 8;
    options.max_calls = 100;
    options.speculation.max_drafts = 0;  // speculation_test.cc
    options.model_fingerprint = "fake";
    options.test_poison_freed = true;
    options.clock = &clock_;
    loop_ = std::make_unique<DecodeLoop>(options, *runner_, *tokenizer_,
                                         worker::WorkerMetrics(metrics_.get()));
    loop_->set_receiver(&receiver_);
  }
  void GiveSwapSpace(int num_blocks) {
    const kv::KvLayout& layout = runner_->layout();
    const auto bytes = static_cast<int64_t>(layout.block_bytes()) * layout.num_layers * num_blocks;
    absl::StatusOr<SwapSpace> swap = SwapSpace::Create(*runner_, bytes);
    ASSERT_TRUE(swap.ok());
    swap_ = std::make_unique<SwapSpace>(*std::move(swap));
    loop_->set_swap_space(swap_.get());
  }
  void TearDown() override {
    if (loop_ == nullptr) return;
    Settle();
    // Case 3.1 and 15.1: when idle nothing is held but by the prefix cache.
    const kv::BlockCounts& counts = loop_->memory().pool().counts();
    EXPECT_EQ(counts.active, 0);
    EXPECT_EQ(counts.reserved, 0);
    EXPECT_EQ(counts.quarantined, 0);
    EXPECT_EQ(loop_->num_calls(), 0);
    EXPECT_EQ(loop_->load().requests_running(), 0u);
    EXPECT_EQ(loop_->load().requests_waiting(), 0u);
    loop_->memory().pool().CheckInvariants();
    loop_->memory().cache().CheckInvariants();
  }

  struct OpenCall {
    CallId id = 0;
    std::shared_ptr<Sink> sink = std::make_shared<Sink>();
  };
  OpenCall Open(runtime::EngineRequest request, bool locally = true) {
    OpenCall call;
    absl::StatusOr<CallId> id = loop_->Open(std::move(request), locally, call.sink);
    EXPECT_TRUE(id.ok()) << id.status();
    call.id = *id;
    return call;
  }
  void Settle() {
    while (loop_->RunOnce(absl::ZeroDuration())) {
    }
  }
  // Ids by choice; checks that each position comes once and in order.
  static std::vector<std::vector<uint32_t>> Ids(const Sink& sink,
                                                uint32_t first_position,
                                                uint32_t n = 1) {
    std::vector<std::vector<uint32_t>> ids(n);
    for (const DecodeResponse& response : sink.responses()) {
      for (const worker::v1::Token& token : response.tokens().tokens()) {
        EXPECT_EQ(token.position(), first_position + ids[token.choice()].size());
        ids[token.choice()].push_back(token.id());
      }
    }
    return ids;
  }
  static std::map<uint32_t, worker::v1::ChoiceFinished> Finishes(const Sink& sink) {
    std::map<uint32_t, worker::v1::ChoiceFinished> finishes;
    for (const DecodeResponse& response : sink.responses()) {
      for (const worker::v1::ChoiceFinished& finish : response.tokens().finished()) {
        EXPECT_TRUE(finishes.emplace(finish.choice(), finish).second);
      }
    }
    return finishes;
  }
  // As a prefill worker would: writes the prompt's keys and values into the promised blocks.
  void WritePrompt(const std::vector<uint32_t>& prompt, const DecodeResponse::Reserved& reserved) {
    const std::vector<kv::BlockId> table(reserved.block_table().begin(),
                                         reserved.block_table().end());
    const int start = static_cast<int>(reserved.first_missing_block()) * kv::kBlockTokens;
    if (start >= static_cast<int>(prompt.size())) return;
    const runtime::StepSequence part{absl::MakeConstSpan(prompt).subspan(start), start, table, {}};
    absl::Span<float> logits;
    runtime::StepTimings timings;
    ASSERT_TRUE(runner_->Step(absl::MakeConstSpan(&part, 1), nullptr, &logits, &timings).ok());
    runner_->steps = 0;
  }
  static ReceiverEvent Landed(uint64_t reservation_id,
                              uint32_t position,
                              const std::vector<uint32_t>& first_ids) {
    ReceiverEvent event;
    event.kind = ReceiverEvent::Kind::kLanded;
    event.reservation_id = reservation_id;
    event.bytes = 4096;
    event.transport = "shm";
    for (uint32_t choice = 0; choice < first_ids.size(); ++choice) {
      worker::v1::Token& token = event.first_tokens.emplace_back();
      token.set_choice(choice);
      token.set_position(position);
      token.set_id(first_ids[choice]);
    }
    return event;
  }
  static ReceiverEvent Event(ReceiverEvent::Kind kind,
                             uint64_t reservation_id,
                             absl::Status status = absl::OkStatus()) {
    ReceiverEvent event;
    event.kind = kind;
    event.reservation_id = reservation_id;
    event.status = std::move(status);
    event.transport = "shm";
    return event;
  }
  // Opens a handed-over request, lands it, and lets it run to its end.
  OpenCall HandOver(const runtime::EngineRequest& request, const std::vector<uint32_t>& first_ids) {
    OpenCall call = Open(request, false);
    Settle();
    const DecodeResponse::Reserved reserved = call.sink->responses().at(0).reserved();
    WritePrompt(request.prompt_ids, reserved);
    loop_->OnReceiverEvent(
        Landed(reserved.handoff().reservation_id(), request.prompt_ids.size(), first_ids));
    return call;
  }

  base::FakeClock clock_;
  std::unique_ptr<base::Metrics> metrics_ = base::Metrics::Create(base::Role::kDecode, "fake");
  FakeReceiver receiver_;
  std::unique_ptr<FakeRunner> runner_;
  std::unique_ptr<text::Tokenizer> tokenizer_;
  std::unique_ptr<SwapSpace> swap_;
  std::unique_ptr<DecodeLoop> loop_;
};

TEST_F(DecodeLoopTest, LocalPromptsOfEveryLengthGenerateTheModelsIds) {
  Make(64);
  for (const int length : {1, 2, 63, 64, 65, 127, 128, 129, 500}) {
    const std::vector<uint32_t> prompt = FakePrompt(length, length);
    const OpenCall call = Open(FakeRequest(prompt, 80));
    Settle();
    ASSERT_TRUE(call.sink->status().ok()) << call.sink->status();
    EXPECT_EQ(Ids(*call.sink, length)[0], GreedyIds(prompt, 80)) << length;
    EXPECT_EQ(Finishes(*call.sink).at(0).finish(), worker::v1::FINISH_LENGTH);
    EXPECT_EQ(call.sink->responses().back().done().generated_tokens(), 80u);
  }
}

// Case 11.8: handed over or computed here, the ids are the same; the first token is not sent again.
TEST_F(DecodeLoopTest, HandedOverPromptsGoOnAfterTheirFirstToken) {
  Make(64);
  for (const int length : {1, 2, 63, 64, 65, 128, 300}) {
    const std::vector<uint32_t> prompt = FakePrompt(length, length);
    const std::vector<uint32_t> expected = GreedyIds(prompt, 70);
    const OpenCall call = HandOver(FakeRequest(prompt, 70), {expected[0]});
    Settle();
    ASSERT_TRUE(call.sink->status().ok()) << call.sink->status();
    EXPECT_EQ(Ids(*call.sink, length + 1)[0],
              std::vector<uint32_t>(expected.begin() + 1, expected.end()))
        << length;
    const DecodeResponse::Done done = call.sink->responses().back().done();
    EXPECT_EQ(done.generated_tokens(), 70u);
    EXPECT_EQ(done.kv_bytes(), 4096u);
    EXPECT_EQ(done.kv_transport(), "shm");
  }
}

TEST_F(DecodeLoopTest, BlocksOfAnEarlierAnswerAreNotAskedForAgain) {
  Make(64);
  std::vector<uint32_t> prompt = FakePrompt(100, 1);
  const std::vector<uint32_t> ids = GreedyIds(prompt, 100);
  HandOver(FakeRequest(prompt, 100), {ids[0]});
  Settle();
  // The next turn: prompt, answer and something new. 199 tokens are computed: 3 full blocks.
  prompt.insert(prompt.end(), ids.begin(), ids.end());
  prompt.push_back(5);
  const OpenCall next = Open(FakeRequest(prompt, 5), false);
  Settle();
  EXPECT_EQ(next.sink->responses().at(0).reserved().first_missing_block(), 3u);
  WritePrompt(prompt, next.sink->responses().at(0).reserved());
  const std::vector<uint32_t> expected = GreedyIds(prompt, 5);
  loop_->OnReceiverEvent(Landed(2, 201, {expected[0]}));
  Settle();
  EXPECT_EQ(Ids(*next.sink, 202)[0], std::vector<uint32_t>(expected.begin() + 1, expected.end()));
}

// Case 14.1: alone and together.
TEST_F(DecodeLoopTest, TwelveAtOnceGenerateTheirSoloIds) {
  Make(256);
  std::vector<OpenCall> calls;
  for (int i = 0; i < 12; ++i) calls.push_back(Open(FakeRequest(FakePrompt(20 + 31 * i, i), 40)));
  Settle();
  for (int i = 0; i < 12; ++i) {
    EXPECT_EQ(Ids(*calls[i].sink, 20 + 31 * i)[0], GreedyIds(FakePrompt(20 + 31 * i, i), 40)) << i;
  }
}

// Case 14.2: a pool for three sequences, twelve long requests.
TEST_F(DecodeLoopTest, PreemptionSendsNoTokenTwiceAndChangesNone) {
  Make(12, 256);
  std::vector<OpenCall> calls;
  for (int i = 0; i < 12; ++i) calls.push_back(Open(FakeRequest(FakePrompt(30 + i, i), 180)));
  Settle();
  for (int i = 0; i < 12; ++i) {
    ASSERT_TRUE(calls[i].sink->status().ok()) << i << calls[i].sink->status();
    EXPECT_EQ(Ids(*calls[i].sink, 30 + i)[0], GreedyIds(FakePrompt(30 + i, i), 180)) << i;
  }
}

// The same with a swap space: some blocks of it, and room for everybody.
TEST_F(DecodeLoopTest, SwappedSequencesGoOnWhereTheyWere) {
  int64_t computed_without = 0;
  for (const int swap_blocks : {0, 4, 64}) {
    Make(12, 256);
    GiveSwapSpace(swap_blocks);
    std::vector<OpenCall> calls;
    for (int i = 0; i < 12; ++i) calls.push_back(Open(FakeRequest(FakePrompt(30 + i, i), 180)));
    Settle();
    for (int i = 0; i < 12; ++i) {
      ASSERT_TRUE(calls[i].sink->status().ok()) << i << calls[i].sink->status();
      EXPECT_EQ(Ids(*calls[i].sink, 30 + i)[0], GreedyIds(FakePrompt(30 + i, i), 180)) << i;
    }
    EXPECT_EQ(swap_->num_free(), swap_blocks);
    // With room for everybody no token is computed twice.
    if (swap_blocks == 0) computed_without = runner_->tokens_computed;
    if (swap_blocks == 64) {
      EXPECT_LT(runner_->tokens_computed, computed_without);
      int64_t once = 0;
      for (int i = 0; i < 12; ++i) once += 30 + i + 179;
      EXPECT_EQ(runner_->tokens_computed, once);
    }
  }
}

TEST_F(DecodeLoopTest, CancelledWhileSwappedLeavesNothing) {
  Make(6, 256);
  GiveSwapSpace(16);
  std::vector<OpenCall> calls;
  for (int i = 0; i < 3; ++i) calls.push_back(Open(FakeRequest(FakePrompt(100, i), 150)));
  for (int i = 0; i < 60; ++i) loop_->RunOnce(absl::ZeroDuration());
  EXPECT_LT(swap_->num_free(), 16);
  for (const OpenCall& call : calls) loop_->Cancel(call.id, absl::CancelledError("gone"));
  Settle();
  EXPECT_EQ(swap_->num_free(), 16);
}

TEST_F(DecodeLoopTest, ASequenceAsLongAsThePoolRunsToItsEnd) {
  Make(4, 1000);
  EXPECT_EQ(loop_->limits().max_prompt_tokens, 256);
  const OpenCall call = Open(FakeRequest(FakePrompt(100, 1), 1000));
  Settle();
  ASSERT_TRUE(call.sink->status().ok());
  // The context ends it: prompt and output together are max_model_len tokens.
  EXPECT_EQ(Ids(*call.sink, 100)[0], GreedyIds(FakePrompt(100, 1), 156));
  EXPECT_EQ(Finishes(*call.sink).at(0).finish(), worker::v1::FINISH_LENGTH);
}

// Case 6.2, and one prompt for all choices.
TEST_F(DecodeLoopTest, ChoicesShareThePromptAndDiffer) {
  for (const int length : {64, 100}) {
    Make(64);
    runtime::EngineRequest request = FakeRequest(FakePrompt(length, 1), 70);
    request.params.temperature = 1;
    request.params.n = 4;
    request.params.seed = 7;
    const OpenCall first = Open(request);
    Settle();
    EXPECT_EQ(runner_->tokens_computed, length + 4 * 69);
    const OpenCall second = Open(request);
    Settle();
    const auto ids = Ids(*first.sink, length, 4);
    EXPECT_EQ(ids, Ids(*second.sink, length, 4));
    for (int a = 0; a < 4; ++a) {
      EXPECT_EQ(ids[a].size(), 70u);
      for (int b = 0; b < a; ++b) EXPECT_NE(ids[a], ids[b]);
    }
    EXPECT_EQ(first.sink->responses().back().done().generated_tokens(), 280u);
  }
}

TEST_F(DecodeLoopTest, ChoicesOfAHandedOverPromptAreForked) {
  Make(64);
  runtime::EngineRequest request = FakeRequest(FakePrompt(100, 1), 30);
  request.params.n = 3;
  const std::vector<uint32_t> expected = GreedyIds(request.prompt_ids, 30);
  const OpenCall call = HandOver(request, {expected[0], expected[0], expected[0]});
  Settle();
  ASSERT_TRUE(call.sink->status().ok()) << call.sink->status();
  for (const auto& ids : Ids(*call.sink, 101, 3)) {
    EXPECT_EQ(ids, std::vector<uint32_t>(expected.begin() + 1, expected.end()));
  }
}

TEST_F(DecodeLoopTest, ChoicesThatDoNotFitAtOnceStillEnd) {
  Make(6, 256);
  runtime::EngineRequest request = FakeRequest(FakePrompt(100, 1), 120);
  request.params.n = 8;
  const OpenCall call = Open(request);
  Settle();
  ASSERT_TRUE(call.sink->status().ok());
  for (const auto& ids : Ids(*call.sink, 100, 8))
    EXPECT_EQ(ids, GreedyIds(request.prompt_ids, 120));
}

TEST_F(DecodeLoopTest, FinishReasonsAreTheEarliestEvents) {
  Make(64);
  const std::vector<uint32_t> prompt = FakePrompt(50, 2);
  const std::vector<uint32_t> ids = GreedyIds(prompt, 40);
  std::string text;
  for (const uint32_t id : ids) text += static_cast<char>('a' + id);
  // A string that begins inside the answer and ends at its 20th token.
  runtime::EngineRequest by_string = FakeRequest(prompt, 40);
  by_string.params.stop = {"!", text.substr(17, 3)};
  const OpenCall string_call = Open(by_string);
  Settle();
  const size_t end = text.find(by_string.params.stop[1]) + 3;
  EXPECT_EQ(Ids(*string_call.sink, 50)[0].size(), end);
  EXPECT_EQ(Finishes(*string_call.sink).at(0).finish(), worker::v1::FINISH_STOP_STRING);
  EXPECT_EQ(Finishes(*string_call.sink).at(0).stop_index(), 1u);
  // A stop token.
  runtime::EngineRequest by_token = FakeRequest(prompt, 40);
  by_token.params.stop_token_ids = {ids[5]};
  const OpenCall token_call = Open(by_token);
  Settle();
  const size_t at = std::find(ids.begin(), ids.end(), ids[5]) - ids.begin();
  EXPECT_EQ(Ids(*token_call.sink, 50)[0].size(), at + 1);
  EXPECT_EQ(Finishes(*token_call.sink).at(0).finish(), worker::v1::FINISH_STOP_TOKEN);
  EXPECT_EQ(Finishes(*token_call.sink).at(0).stop_token_id(), ids[5]);
}

// A resumed answer: what the client has seen is at the end of the prompt and counts as output.
TEST_F(DecodeLoopTest, ResumedTokensCountAsOutput) {
  Make(64);
  const std::vector<uint32_t> prompt = FakePrompt(50, 2);
  const std::vector<uint32_t> ids = GreedyIds(prompt, 40);
  std::string text;
  for (const uint32_t id : ids) text += static_cast<char>('a' + id);
  runtime::EngineRequest request = FakeRequest(prompt, 40);
  request.prompt_ids.insert(request.prompt_ids.end(), ids.begin(), ids.begin() + 25);
  request.resumed_tokens = 25;
  const OpenCall call = Open(request);
  Settle();
  EXPECT_EQ(Ids(*call.sink, 75)[0], std::vector<uint32_t>(ids.begin() + 25, ids.end()));
  EXPECT_EQ(call.sink->responses().back().done().generated_tokens(), 15u);
  // A stop string that began before the worker died.
  request.params.stop = {text.substr(23, 5)};
  if (text.find(request.params.stop[0]) == 23) {
    const OpenCall stopped = Open(request);
    Settle();
    EXPECT_EQ(Ids(*stopped.sink, 75)[0].size(), 3u);
    EXPECT_EQ(Finishes(*stopped.sink).at(0).finish(), worker::v1::FINISH_STOP_STRING);
  }
}

// Case 5.3.
TEST_F(DecodeLoopTest, NanLogitsEndThatRequestAlone) {
  Make(64);
  const std::vector<uint32_t> ids = GreedyIds(FakePrompt(50, 2), 20);
  runner_->nan_token = ids[4];
  std::vector<uint32_t> other = GreedyIds(FakePrompt(30, 9), 3);
  const OpenCall broken = Open(FakeRequest(FakePrompt(50, 2), 20));
  Settle();
  EXPECT_EQ(broken.sink->status().code(), absl::StatusCode::kInternal);
  runner_->nan_token = -1;
  const OpenCall fine = Open(FakeRequest(FakePrompt(30, 9), 3));
  Settle();
  EXPECT_EQ(Ids(*fine.sink, 30)[0], other);
}

TEST_F(DecodeLoopTest, ReservationIsRefusedWhenBlocksAreShort) {
  Make(8);
  const OpenCall first = Open(FakeRequest(FakePrompt(300, 1), 10), false);
  Settle();
  ASSERT_EQ(first.sink->responses().size(), 1u);
  EXPECT_EQ(loop_->memory().pool().counts().reserved, 5);
  EXPECT_EQ(loop_->load().kv_blocks_reserved(), 5u);
  const OpenCall second = Open(FakeRequest(FakePrompt(300, 2), 10), false);
  Settle();
  EXPECT_EQ(second.sink->status().code(), absl::StatusCode::kResourceExhausted);
  loop_->Cancel(first.id, absl::CancelledError("gone"));
  loop_->OnReceiverEvent(Event(ReceiverEvent::Kind::kQuiesced, 1));
}

// Case 11.3: blocks of a cancelled hand-over are nobody's until their writer is quiet.
TEST_F(DecodeLoopTest, CancelledReservationIsQuarantinedUntilQuiet) {
  Make(8);
  const OpenCall call = Open(FakeRequest(FakePrompt(300, 1), 10), false);
  Settle();
  loop_->Cancel(call.id, absl::CancelledError("gone"));
  Settle();
  EXPECT_EQ(call.sink->status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(receiver_.revoked, (std::vector<uint64_t>{1}));
  EXPECT_EQ(loop_->memory().pool().counts().quarantined, 5);
  EXPECT_EQ(loop_->memory().pool().num_available(), 3);
  const OpenCall next = Open(FakeRequest(FakePrompt(300, 2), 10), false);
  Settle();
  EXPECT_EQ(next.sink->status().code(), absl::StatusCode::kResourceExhausted);
  loop_->OnReceiverEvent(Event(ReceiverEvent::Kind::kQuiesced, 1));
  Settle();
  EXPECT_EQ(loop_->memory().pool().counts().quarantined, 0);
  EXPECT_EQ(loop_->memory().pool().num_available(), 8);
}

TEST_F(DecodeLoopTest, CancelThatCrossesLandedFreesAtOnce) {
  Make(8);
  const OpenCall call = Open(FakeRequest(FakePrompt(300, 1), 10), false);
  Settle();
  receiver_.revoke_answer = false;  // it has landed: nobody writes
  loop_->Cancel(call.id, absl::CancelledError("gone"));
  loop_->OnReceiverEvent(Landed(1, 300, {1}));
  Settle();
  EXPECT_EQ(call.sink->status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(loop_->memory().pool().num_available(), 8);
}

// From the moment somebody asked, on whatever thread, until the blocks are free: what waits for its
// writer is not free before that.
TEST_F(DecodeLoopTest, AbortToFreeCountsTheWayToTheEngineAndTheQuarantine) {
  Make(8);
  const base::Histogram freed = metrics_->histogram(base::HistogramId::kKvAbortToFree);
  const OpenCall call = Open(FakeRequest(FakePrompt(300, 1), 10), false);
  Settle();
  loop_->Cancel(call.id, absl::CancelledError("gone"));
  clock_.Advance(absl::Seconds(1));  // the engine thread is busy
  Settle();
  EXPECT_EQ(freed.count(), 0u);
  clock_.Advance(absl::Seconds(2));
  loop_->OnReceiverEvent(Event(ReceiverEvent::Kind::kQuiesced, 1));
  Settle();
  EXPECT_EQ(freed.count(), 1u);
  EXPECT_DOUBLE_EQ(freed.sum(), 3.0);
  const OpenCall running = Open(FakeRequest(FakePrompt(100, 2), 500));
  for (int i = 0; i < 3; ++i) loop_->RunOnce(absl::ZeroDuration());
  loop_->Cancel(running.id, absl::CancelledError("gone"));
  clock_.Advance(absl::Seconds(4));
  Settle();
  EXPECT_EQ(freed.count(), 2u);
  EXPECT_DOUBLE_EQ(freed.sum(), 7.0);
}

// Case 11.1: the peer dies: UNAVAILABLE, nothing leaks.
TEST_F(DecodeLoopTest, FailedHandOverEndsTheCallWithItsStatus) {
  Make(8);
  const OpenCall died = Open(FakeRequest(FakePrompt(100, 1), 10), false);
  const OpenCall damaged = Open(FakeRequest(FakePrompt(100, 2), 10), false);
  Settle();
  loop_->OnReceiverEvent(
      Event(ReceiverEvent::Kind::kFailed, 1, absl::UnavailableError("prefill worker is gone")));
  loop_->OnReceiverEvent(Event(ReceiverEvent::Kind::kFailed, 2, absl::DataLossError("checksum")));
  Settle();
  EXPECT_EQ(died.sink->status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(damaged.sink->status().code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(receiver_.revoked.empty());
  EXPECT_EQ(loop_->memory().pool().counts().free, 8);
}

TEST_F(DecodeLoopTest, BlocksThatTheDeviceDoesNotTakeEndTheCallAndAreNotFoundAgain) {
  Make(8);
  runner_->landed_status = absl::InternalError("device");
  const OpenCall call = HandOver(FakeRequest(FakePrompt(100, 1), 10), {3});
  Settle();
  EXPECT_EQ(call.sink->status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(runner_->landed.size(), 2u);
  EXPECT_EQ(loop_->memory().pool().counts().free, 8);
}

TEST_F(DecodeLoopTest, NonsenseFirstTokensAreDataLoss) {
  Make(64);
  const auto check = [&](ReceiverEvent event) {
    const OpenCall call = Open(FakeRequest(FakePrompt(100, 1), 10), false);
    Settle();
    WritePrompt(FakePrompt(100, 1), call.sink->responses().at(0).reserved());
    event.reservation_id = call.sink->responses().at(0).reserved().handoff().reservation_id();
    loop_->OnReceiverEvent(event);
    Settle();
    EXPECT_EQ(call.sink->status().code(), absl::StatusCode::kDataLoss);
  };
  check(Landed(0, 100, {}));                         // none
  check(Landed(0, 100, {1, 2}));                     // too many
  check(Landed(0, 99, {1}));                         // wrong position
  check(Landed(0, 100, {testing::kFakeVocab + 5}));  // no such id
}

// Case 11.5: the first token has ended the request already.
TEST_F(DecodeLoopTest, LandedRequestThatIsOverTakesNoStep) {
  Make(64);
  const OpenCall call = HandOver(FakeRequest(FakePrompt(100, 1), 1), {3});
  Settle();
  EXPECT_TRUE(call.sink->status().ok());
  EXPECT_EQ(runner_->steps, 0);
  EXPECT_TRUE(Ids(*call.sink, 101)[0].empty());
}

TEST_F(DecodeLoopTest, ReservationsAreAnsweredInTheMiddleOfAStep) {
  Make(64);
  Open(FakeRequest(FakePrompt(100, 1), 2));
  OpenCall during;
  runner_->on_layer = [&](int layer) {
    if (layer == 0 && during.id == 0) during = Open(FakeRequest(FakePrompt(100, 2), 10), false);
    if (layer != 1) return;
    EXPECT_EQ(during.sink->responses().size(), 1u);
  };
  Settle();
  loop_->Cancel(during.id, absl::CancelledError("gone"));
  loop_->OnReceiverEvent(Event(ReceiverEvent::Kind::kQuiesced, 1));
}

TEST_F(DecodeLoopTest, CancelInAStepKeepsItsBlocksUntilTheStepIsOver) {
  Make(64);
  const OpenCall call = Open(FakeRequest(FakePrompt(100, 1), 50));
  const OpenCall waiting = Open(FakeRequest(FakePrompt(100, 3), 50), false);
  const OpenCall other = Open(FakeRequest(FakePrompt(90, 2), 20));
  for (int i = 0; i < 4; ++i) loop_->RunOnce(absl::ZeroDuration());
  std::vector<int> active, reserved;
  runner_->on_layer = [&](int layer) {
    if (layer == 0) loop_->Cancel(call.id, absl::CancelledError("gone"));
    if (layer == 0) loop_->Cancel(waiting.id, absl::CancelledError("gone"));
    active.push_back(loop_->memory().pool().counts().active);
    reserved.push_back(loop_->memory().pool().counts().reserved);
  };
  loop_->RunOnce(absl::ZeroDuration());
  runner_->on_layer = nullptr;
  EXPECT_EQ(active, (std::vector<int>{4, 4, 4}));
  EXPECT_EQ(reserved, (std::vector<int>{
                          2, 0, 0}));  // of a request that no step computes on: within one layer
  EXPECT_EQ(loop_->memory().pool().counts().active, 2);
  loop_->OnReceiverEvent(Event(ReceiverEvent::Kind::kQuiesced, 1));
  Settle();
  EXPECT_EQ(call.sink->status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(Ids(*other.sink, 90)[0], GreedyIds(FakePrompt(90, 2), 20));
}

TEST_F(DecodeLoopTest, ReaderThatDoesNotReadIsCutOff) {
  Make(64);
  const OpenCall call = Open(FakeRequest(FakePrompt(100, 1), 50));
  loop_->RunOnce(absl::ZeroDuration());
  call.sink->Refuse();
  Settle();
  EXPECT_EQ(call.sink->status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(DecodeLoopTest, CancelledWhilePreemptedLeavesNothing) {
  Make(6, 256);
  std::vector<OpenCall> calls;
  for (int i = 0; i < 3; ++i) calls.push_back(Open(FakeRequest(FakePrompt(100, i), 150)));
  for (int i = 0; i < 60; ++i) loop_->RunOnce(absl::ZeroDuration());
  for (const OpenCall& call : calls) loop_->Cancel(call.id, absl::CancelledError("gone"));
  Settle();
  for (const OpenCall& call : calls) EXPECT_TRUE(call.sink->finished());
}

TEST_F(DecodeLoopTest, StopEndsOpenCallsOnce) {
  Make(64);
  const OpenCall local = Open(FakeRequest(FakePrompt(10, 1), 10000));
  const OpenCall reserved = Open(FakeRequest(FakePrompt(10, 1), 10), false);
  loop_->Stop();
  EXPECT_EQ(local.sink->status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(reserved.sink->status().code(), absl::StatusCode::kUnavailable);
  loop_.reset();
}

}  // namespace
}  // namespace baton::decode
