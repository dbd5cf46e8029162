#include <algorithm>
#include <string>
#include <vector>

#include "engine/process/grpc_status.h"
#include "tests/unit/router/generate_call_fixture.h"

namespace baton::router {
namespace {

using GenerateCallFailureTest = GenerateCallFixture;

// Runs the newest attempt to its end, whatever part of the answer it resumes with.
class ResumeTest : public GenerateCallFixture {
 protected:
  const std::vector<uint32_t> answer_ = {Id("a"), Id("b"), Id("c")};

  worker::v1::Token At(uint32_t output) { return Token(0, 3 + output, answer_[output]); }

  void FinishNewestAttempt() {
    FakePrefill& prefill = *legs_.prefills.back();
    const uint32_t resumed = prefill.open.spec().resumed_tokens();
    ASSERT_LT(resumed, 3u);
    if (!legs_.decodes.empty() && !legs_.decodes.back()->cancelled &&
        !legs_.decodes.back()->ended) {
      FakeDecode& decode = *legs_.decodes.back();
      decode.Send(Reserved());
      if (resumed == 2) {
        prefill.Send(First({At(2)}, {Length(0)}));
        return;
      }
      prefill.Send(First({At(resumed)}));
      for (uint32_t i = resumed + 1; i < 3; ++i) {
        decode.Send(i == 2 ? Tokens({At(i)}, {Length(0)}) : Tokens({At(i)}));
      }
      prefill.Send(PrefillDone());
      decode.Send(DecodeDone());
    }
  }
};

// A worker is lost after each number of events; the client sees one whole answer.
TEST_F(ResumeTest, LostWorkerCostsTheClientNothing) {
  for (bool lose_decode : {false, true}) {
    for (int played = 0; played <= 3; ++played) {
      if (!lose_decode && played > 2) continue;  // behind the hand-over prefill does not matter
      SCOPED_TRACE(testing::Message()
                   << (lose_decode ? "decode" : "prefill") << " after " << played);
      const size_t before = legs_.prefills.size();
      Running running = Start(Request());
      auto prefill = legs_.prefills.back();
      auto decode = legs_.decodes.back();
      if (played >= 1) decode->Send(Reserved());
      if (played >= 2) prefill->Send(First({At(0)}));
      if (played >= 3) decode->Send(Tokens({At(1)}));
      (lose_decode ? decode->End(absl::UnavailableError("killed"))
                   : prefill->End(absl::UnavailableError("killed")));
      ASSERT_EQ(legs_.prefills.size(), before + 2) << "a second attempt";
      EXPECT_NE(lose_decode ? legs_.decodes.back()->address : legs_.prefills.back()->address,
                lose_decode ? decode->address : prefill->address);
      EXPECT_TRUE(lose_decode ? prefill->cancelled : decode->cancelled);
      const auto& spec = legs_.prefills.back()->open.spec();
      EXPECT_EQ(spec.attempt(), 2u);
      EXPECT_EQ(spec.sampling().seed(), 77u) << "the same seed";
      EXPECT_EQ(spec.resumed_tokens(), played >= 3 ? 2u : played >= 2 ? 1u : 0u);
      EXPECT_EQ(spec.prompt_ids_size(), 3 + static_cast<int>(spec.resumed_tokens()));
      legs_.EndCancelled();
      FinishNewestAttempt();
      timers_.Advance(absl::Seconds(1));
      ASSERT_TRUE(running.received->done());
      EXPECT_TRUE(running.received->finishes[0].ok()) << running.received->finishes[0];
      EXPECT_EQ(running.received->ids(), answer_);
      EXPECT_EQ(running.received->messages.back().finished().usage().prompt_tokens(), 3u);
      EXPECT_EQ(running.received->messages.back().finished().timings().retries(), 1u);
      legs_.EndCancelled();
    }
  }
}

TEST_F(ResumeTest, PrefillLostBehindTheHandOverDoesNotMatter) {
  Running running = Start(Request());
  legs_.decodes[0]->Send(Reserved());
  legs_.prefills[0]->Send(First({At(0)}));
  legs_.decodes[0]->Send(Tokens({At(1)}));
  legs_.prefills[0]->End(absl::UnavailableError("killed"));
  legs_.decodes[0]->Send(Tokens({At(2)}, {Length(0)}));
  legs_.decodes[0]->Send(DecodeDone());
  EXPECT_EQ(running.received->ids(), answer_);
  EXPECT_TRUE(running.received->finishes[0].ok());
  EXPECT_EQ(legs_.prefills.size(), 1u);
}

// The two workers' streams race: a short answer may be over on decode before prefill's message has
// come.
TEST_F(ResumeTest, DecodeMayEndBeforeTheFirstTokensArrive) {
  for (bool prefill_dies : {false, true}) {
    const size_t before = legs_.prefills.size();
    Running running = Start(Request());
    auto prefill = legs_.prefills.back();
    auto decode = legs_.decodes.back();
    decode->Send(Reserved());
    decode->Send(Tokens({At(1)}));
    decode->Send(Tokens({At(2)}, {Length(0)}));
    decode->Send(DecodeDone());
    decode->End(absl::OkStatus());
    ASSERT_FALSE(running.received->done());
    if (prefill_dies) {
      prefill->End(absl::UnavailableError("killed"));
      ASSERT_EQ(legs_.prefills.size(), before + 2) << "a second attempt";
      FinishNewestAttempt();
    } else {
      prefill->Send(First({At(0)}));
      prefill->Send(PrefillDone());
    }
    timers_.Advance(absl::Seconds(1));
    ASSERT_TRUE(running.received->done());
    EXPECT_TRUE(running.received->finishes[0].ok()) << running.received->finishes[0];
    EXPECT_EQ(running.received->ids(), answer_);
    legs_.EndCancelled();
  }
}

TEST_F(GenerateCallFailureTest, RetriesAreBoundedAndTheClientIsToldWhatItHas) {
  Running running = Start(Request());
  legs_.decodes.back()->Send(Reserved());
  legs_.prefills.back()->Send(First({Token(0, 3, Id("a"))}));
  for (int i = 0; i < 3; ++i) {
    ASSERT_FALSE(running.received->done()) << i;
    legs_.decodes.back()->End(absl::UnavailableError("killed"));
    legs_.EndCancelled();
  }
  ASSERT_TRUE(running.received->done());
  const absl::Status& status = running.received->finishes[0];
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  ASSERT_TRUE(process::GetErrorInfo(status).has_value());
  EXPECT_EQ(process::GetErrorInfo(status)->reason, "WORKER_LOST");
  EXPECT_EQ(process::GetErrorInfo(status)->metadata.at("tokens_sent"), "1");
  EXPECT_EQ(legs_.decodes.size(), 3u);
  EXPECT_EQ(store_->counter(base::CounterId::kRouterRetries, "unavailable").value(), 2);
}

// Each of n choices goes on behind its own tokens, with the noise of its own number.
TEST_F(GenerateCallFailureTest, SeveralChoicesResumeEachByItself) {
  v1::GenerateRequest request = Request();
  request.mutable_sampling()->set_n(3);
  Running running = Start(request);
  legs_.prefills.back()->End(absl::UnavailableError("killed"));
  ASSERT_EQ(legs_.decodes.size(), 2u) << "before the first token: all together";
  EXPECT_EQ(legs_.decodes.back()->open.spec().sampling().n(), 3u);
  auto prefill = legs_.prefills.back();
  auto decode = legs_.decodes.back();
  decode->Send(Reserved());
  prefill->Send(First({Token(0, 3, Id("a")), Token(1, 3, Id("b")), Token(2, 3, Id("c"))}));
  decode->Send(Tokens({Token(0, 4, Id("d")), Token(1, 4, Id("e"))}, {Length(0)}));
  decode->End(absl::UnavailableError("killed"));
  ASSERT_EQ(legs_.decodes.size(), 4u) << "choice 0 is over";
  const std::vector<std::vector<uint32_t>> behind = {{}, {Id("b"), Id("e")}, {Id("c")}};
  for (uint32_t choice : {1u, 2u}) {
    const auto& spec = legs_.decodes[1 + choice]->open.spec();
    EXPECT_EQ(spec.sampling().n(), 1u);
    EXPECT_EQ(spec.sampling().first_choice(), choice);
    EXPECT_EQ(spec.resumed_tokens(), behind[choice].size());
    EXPECT_EQ(std::vector<uint32_t>(spec.prompt_ids().begin() + 3, spec.prompt_ids().end()),
              behind[choice]);
  }
  // They end one after the other; the workers number from 0.
  legs_.decodes[3]->Send(Reserved());
  legs_.prefills[3]->Send(First({Token(0, 4, Id("f"))}));
  legs_.decodes[3]->Send(Tokens({Token(0, 5, Id("g"))}, {Length(0)}));
  legs_.decodes[3]->Send(DecodeDone());
  legs_.decodes[3]->End(absl::OkStatus());
  EXPECT_FALSE(running.received->done());
  legs_.decodes[2]->Send(Reserved());
  legs_.prefills[2]->Send(First({Token(0, 5, Id("h"))}, {Length(0)}));
  timers_.Advance(absl::Seconds(1));
  ASSERT_TRUE(running.received->done());
  EXPECT_TRUE(running.received->finishes[0].ok()) << running.received->finishes[0];
  EXPECT_EQ(running.received->text(0), "ad");
  EXPECT_EQ(running.received->text(1), "beh");
  EXPECT_EQ(running.received->text(2), "cfg");
  EXPECT_EQ(running.received->messages.back().finished().usage().completion_tokens(), 8u);
}

// What the decode worker promised to a choice that its prefill worker has finished may be the room
// that the others wait for.
TEST_F(GenerateCallFailureTest, AResumedChoiceThatPrefillFinishesHoldsNoDecodeWorker) {
  v1::GenerateRequest request = Request();
  request.mutable_sampling()->set_n(2);
  Running running = Start(request);
  legs_.decodes.back()->Send(Reserved());
  legs_.prefills.back()->Send(First({Token(0, 3, Id("a")), Token(1, 3, Id("b"))}));
  legs_.decodes.back()->End(absl::UnavailableError("killed"));
  ASSERT_EQ(legs_.decodes.size(), 3u);
  legs_.decodes[1]->Send(Reserved());
  legs_.prefills[1]->Send(First({Token(0, 4, Id("c"))}, {Length(0)}));
  EXPECT_TRUE(legs_.decodes[1]->cancelled);
  EXPECT_FALSE(legs_.prefills[1]->cancelled) << "it ends by itself";
  EXPECT_FALSE(running.received->done());
  // A choice that the decode worker ends still gets its figures.
  legs_.decodes[2]->Send(Reserved());
  legs_.prefills[2]->Send(First({Token(0, 4, Id("d"))}));
  legs_.decodes[2]->Send(Tokens({Token(0, 5, Id("e"))}, {Length(0)}));
  EXPECT_FALSE(legs_.decodes[2]->cancelled);
  legs_.decodes[2]->Send(DecodeDone());
  timers_.Advance(absl::Seconds(1));
  ASSERT_TRUE(running.received->done());
  EXPECT_TRUE(running.received->finishes[0].ok()) << running.received->finishes[0];
}

TEST_F(GenerateCallFailureTest, ResumedChoicesThatFailAgainAreBoundedEach) {
  v1::GenerateRequest request = Request();
  request.mutable_sampling()->set_n(2);
  Running running = Start(request);
  legs_.decodes.back()->Send(Reserved());
  legs_.prefills.back()->Send(First({Token(0, 3, Id("a")), Token(1, 3, Id("b"))}));
  for (int i = 0; i < 10 && !running.received->done(); ++i) {
    for (const auto& leg : std::vector(legs_.decodes)) {
      if (!leg->ended) leg->End(absl::UnavailableError("killed"));
    }
  }
  ASSERT_TRUE(running.received->done());
  EXPECT_EQ(running.received->code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(process::GetErrorInfo(running.received->finishes[0])->metadata.at("tokens_sent"), "2");
  EXPECT_LE(legs_.decodes.size(), 5u);
}

absl::Status Accusation() {
  return process::WithErrorInfo(absl::UnavailableError("kv transfer"), process::kPeerFailed, {});
}

// An answer that is over with its first token needs no hand-over: the prefill worker lets go of it,
// and that the decode worker says so may be heard before the token.
TEST_F(GenerateCallFailureTest, AHandOverThatNobodyNeedsAnyMoreIsNoFailure) {
  Running running = Start(Request());
  legs_.decodes[0]->Send(Reserved());
  legs_.decodes[0]->End(Accusation());
  EXPECT_FALSE(running.received->done());
  legs_.prefills[0]->Send(First({Token(0, 3, Id("a"))}, {Length(0)}));
  legs_.prefills[0]->End(absl::OkStatus());
  timers_.Advance(absl::Seconds(1));
  ASSERT_TRUE(running.received->done());
  EXPECT_TRUE(running.received->finishes[0].ok()) << running.received->finishes[0];
  EXPECT_EQ(running.received->text(), "a");
  EXPECT_EQ(legs_.decodes.size(), 1u);
}

TEST_F(GenerateCallFailureTest, AHandOverThatBrokeIsTriedElsewhereBehindTheFirstToken) {
  Running running = Start(Request());
  legs_.decodes[0]->Send(Reserved());
  legs_.decodes[0]->End(Accusation());
  legs_.prefills[0]->Send(First({Token(0, 3, Id("a"))}));
  ASSERT_EQ(legs_.decodes.size(), 2u) << "there is nothing to wait for any more";
  EXPECT_EQ(legs_.decodes[1]->address + legs_.prefills[1]->address, "d1p2");
  EXPECT_EQ(running.received->text(), "a");
  running.call->OnClientCancel(absl::CancelledError());
}

// Of two choices one is over with its first token.
TEST_F(GenerateCallFailureTest, OfChoicesThoseThatAreNotOverGoOn) {
  v1::GenerateRequest request = Request();
  request.mutable_sampling()->set_n(2);
  Running running = Start(request);
  legs_.decodes[0]->Send(Reserved());
  legs_.decodes[0]->End(Accusation());
  legs_.prefills[0]->Send(First({Token(0, 3, Id("a")), Token(1, 3, Id("b"))}, {Length(0)}));
  ASSERT_EQ(legs_.decodes.size(), 2u);
  EXPECT_EQ(legs_.decodes[1]->open.spec().sampling().first_choice(), 1u);
  running.call->OnClientCancel(absl::CancelledError());
}

TEST_F(GenerateCallFailureTest, ThePrefillWorkersOwnFailureEndsTheWait) {
  Running running = Start(Request());
  legs_.decodes[0]->Send(Reserved());
  legs_.decodes[0]->End(Accusation());
  legs_.prefills[0]->End(absl::UnavailableError("killed"));
  ASSERT_EQ(legs_.decodes.size(), 2u);
  EXPECT_EQ(legs_.decodes[1]->address + legs_.prefills[1]->address, "d1p2");
  running.call->OnClientCancel(absl::CancelledError());
}

// A worker that says its peer has failed is believed, once.
TEST_F(GenerateCallFailureTest, TheAccusedPeerIsAvoided) {
  Running running = Start(Request());
  ASSERT_EQ(legs_.decodes[0]->address + legs_.prefills[0]->address, "d1p1");
  legs_.decodes[0]->End(Accusation());
  EXPECT_EQ(legs_.decodes.size(), 1u) << "what the accused one has said may be on its way";
  timers_.Advance(absl::Seconds(1));
  ASSERT_EQ(legs_.decodes.size(), 2u);
  EXPECT_EQ(legs_.decodes[1]->address + legs_.prefills[1]->address, "d1p2");
  legs_.decodes[1]->End(Accusation());
  timers_.Advance(absl::Seconds(1));
  ASSERT_EQ(legs_.decodes.size(), 3u);
  EXPECT_EQ(legs_.decodes[2]->address, "d2") << "the common factor of both";
  running.call->OnClientCancel(absl::CancelledError());
}

// Case 11.7: what a worker refuses reaches the client unchanged, and the other worker lets go.
TEST_F(GenerateCallFailureTest, RefusalOfAWorkerReachesTheClientUnchanged) {
  for (const absl::Status& status : {absl::InvalidArgumentError("prompt: too long"),
                                     absl::InternalError("logits are not finite")}) {
    Running running = Start(Request());
    legs_.prefills.back()->End(status);
    ASSERT_TRUE(running.received->done());
    EXPECT_EQ(running.received->finishes[0].code(), status.code());
    EXPECT_EQ(running.received->finishes[0].message(), status.message());
    EXPECT_TRUE(legs_.decodes.back()->cancelled);
    legs_.EndCancelled();
  }
}

TEST_F(GenerateCallFailureTest, FullDecodeWorkerIsAskedAgainWhenItHasRoom) {
  Running running = Start(Request());
  EXPECT_EQ(legs_.decodes[0]->address, "d1");
  legs_.decodes[0]->End(absl::ResourceExhaustedError("no blocks"));
  EXPECT_TRUE(legs_.prefills[0]->cancelled);
  ASSERT_EQ(legs_.decodes.size(), 2u);
  EXPECT_EQ(legs_.decodes[1]->address, "d2");
  legs_.decodes[1]->End(absl::ResourceExhaustedError("no blocks"));
  legs_.EndCancelled();
  timers_.Advance(absl::Milliseconds(900));
  for (const char* d : {"d1", "d2"}) table_.OnStatus(d, ReadyStatus("decode"));
  EXPECT_EQ(legs_.decodes.size(), 2u) << "both are full: wait, and do not ask";
  EXPECT_FALSE(running.received->done());
  EXPECT_EQ(store_->counter(base::CounterId::kRouterRetries, "exhausted").value(), 1);
  auto room = ReadyStatus("decode");
  room.mutable_load()->set_kv_blocks_free(99);
  table_.OnStatus("d2", room);
  ASSERT_EQ(legs_.decodes.size(), 3u);
  EXPECT_EQ(legs_.decodes[2]->address, "d2");
  legs_.decodes[2]->Send(Reserved());
  legs_.prefills.back()->Send(First({Token(0, 3, Id("a"))}));
  legs_.decodes[2]->Send(Tokens({Token(0, 4, Id("b"))}, {Length(0)}));
  legs_.prefills.back()->Send(PrefillDone());
  legs_.decodes[2]->Send(DecodeDone());
  EXPECT_EQ(running.received->text(), "ab");
}

TEST_F(GenerateCallFailureTest, WaitingForCapacityEndsAtTheDeadline) {
  Running running = Start(Request(), absl::Milliseconds(50));
  for (int i = 0; i < 2; ++i) legs_.decodes.back()->End(absl::ResourceExhaustedError("no blocks"));
  timers_.Advance(absl::Milliseconds(49));
  ASSERT_FALSE(running.received->done());
  timers_.Advance(absl::Milliseconds(1));
  ASSERT_TRUE(running.received->done());
  EXPECT_EQ(running.received->code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(legs_.decodes.size(), 2u);
}

TEST_F(GenerateCallFailureTest, DeadlineOfAWorkerEndsTheCall) {
  Running running = Start(Request());
  legs_.decodes[0]->End(absl::DeadlineExceededError("x"));
  EXPECT_EQ(running.received->code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(legs_.prefills[0]->cancelled);
  EXPECT_EQ(legs_.decodes.size(), 1u);
}

TEST_F(GenerateCallFailureTest, PairThatDoesNotFitIsLeftForAnother) {
  Running running = Start(Request());
  legs_.prefills[0]->End(absl::FailedPreconditionError("kv_dtype differs"));
  ASSERT_EQ(legs_.prefills.size(), 2u);
  EXPECT_EQ(legs_.prefills[1]->address, "p2");
  running.call->OnClientCancel(absl::CancelledError());
}

TEST_F(GenerateCallFailureTest, NoReadyWorkerIsUnavailableWithRetryInfo) {
  for (const char* p : {"p1", "p2"}) table_.OnDown(p, absl::UnavailableError("gone"));
  Running running = Start(Request());
  EXPECT_EQ(running.received->code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(process::RetryDelay(running.received->finishes[0]).has_value());
  EXPECT_EQ(Rejected("no_worker"), 1);
}

// Case 11.4: pairs that differ are refused with the field's name.
TEST_F(GenerateCallFailureTest, PairsThatDifferAreRefusedByName) {
  for (const char* d : {"d1", "d2"}) {
    auto other = ReadyStatus("decode", "2");
    other.mutable_fingerprint()->set_kv_dtype("bf16");
    table_.OnStatus(d, other);
  }
  Running running = Start(Request());
  EXPECT_EQ(running.received->code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(running.received->finishes[0].message().find("kv_dtype"), absl::string_view::npos);
}

TEST_F(GenerateCallFailureTest, FullQueueIsRefusedWithRetryInfo) {
  std::vector<Running> running;
  for (int i = 0; i < 4; ++i) running.push_back(Start(Request()));
  EXPECT_EQ(legs_.decodes.size(), 2u) << "two places";
  Running refused = Start(Request());
  EXPECT_EQ(refused.received->code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(process::RetryDelay(refused.received->finishes[0]).has_value());
  EXPECT_EQ(Rejected("queue_full"), 1);
  running[0].call->OnClientCancel(absl::CancelledError());
  EXPECT_EQ(legs_.decodes.size(), 3u) << "the place went to the oldest";
  for (Running& r : running) r.call->OnClientCancel(absl::CancelledError());
}

// Case 3.2: a request whose deadline passes in the queue reaches no worker.
TEST_F(GenerateCallFailureTest, DeadlineInTheQueueReachesNoWorker) {
  Running first = Start(Request());
  Running second = Start(Request());
  Running waiting = Start(Request(), absl::Milliseconds(200));
  timers_.Advance(absl::Milliseconds(200));
  EXPECT_EQ(waiting.received->code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(legs_.decodes.size(), 2u);
  EXPECT_EQ(Rejected("deadline"), 1);
  first.call->OnClientCancel(absl::CancelledError());
  second.call->OnClientCancel(absl::CancelledError());
}

TEST_F(GenerateCallFailureTest, CancelInTheQueueAndWhileEncodingReachesNoWorker) {
  Running first = Start(Request());
  Running second = Start(Request());
  Running waiting = Start(Request());
  waiting.call->OnClientCancel(absl::CancelledError());
  EXPECT_EQ(waiting.received->code(), absl::StatusCode::kCancelled);
  first.call->OnClientCancel(absl::CancelledError());
  second.call->OnClientCancel(absl::CancelledError());
  encoder_.hold = true;
  Running encoding = Start(Request());
  encoding.call->OnClientCancel(absl::CancelledError());
  EXPECT_EQ(encoding.received->code(), absl::StatusCode::kCancelled);
  encoder_.held();
  EXPECT_EQ(legs_.decodes.size(), 2u);
}

// Case 15.2: one outcome for each request.
TEST_F(GenerateCallFailureTest, EveryRequestHasOneOutcome) {
  Running cancelled = Start(Request());
  cancelled.call->OnClientCancel(absl::CancelledError());
  cancelled.call->OnClientCancel(absl::CancelledError());
  Running late = Start(Request());
  late.call->OnClientCancel(absl::DeadlineExceededError("x"));
  v1::GenerateRequest bad = Request();
  bad.mutable_sampling()->set_top_p(2);
  Running invalid = Start(bad);
  EXPECT_EQ(invalid.received->code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(process::FieldViolations(invalid.received->finishes[0]).at(0).field, "sampling.top_p");
  v1::GenerateRequest one = Request();
  one.mutable_sampling()->set_max_tokens(1);
  Running good = Start(one);
  legs_.prefills.back()->Send(First({Token(0, 3, Id("a"))}, {Length(0)}));
  EXPECT_EQ(Outcomes("CANCELLED"), 1);
  EXPECT_EQ(Outcomes("DEADLINE_EXCEEDED"), 1);
  EXPECT_EQ(Outcomes("INVALID_ARGUMENT"), 1);
  EXPECT_EQ(Outcomes("OK"), 1);
  legs_.EndCancelled();
}

// Case 4.2: both numbers are told.
TEST_F(GenerateCallFailureTest, PromptAboveTheContextIsRefusedWithBothNumbers) {
  Running running = Start(Request(std::vector<uint32_t>(1025, 5)));
  EXPECT_EQ(running.received->code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(running.received->finishes[0].message().find("1025"), absl::string_view::npos);
  EXPECT_NE(running.received->finishes[0].message().find("1024"), absl::string_view::npos);
  EXPECT_TRUE(legs_.decodes.empty());
}

}  // namespace
}  // namespace baton::router
