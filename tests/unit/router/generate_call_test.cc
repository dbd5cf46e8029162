#include "router/generate_call.h"

#include <algorithm>
#include <string>
#include <vector>

#include "engine/process/grpc_status.h"
#include "tests/unit/router/generate_call_fixture.h"

namespace baton::router {
namespace {

class GenerateCallTest : public GenerateCallFixture {
 protected:
  // One event of a normal answer of three tokens to a prompt of three: R reserved, F first token, P
  // prefill done, Q its call ends, T second token, U third token and end, D decode done, E its call
  // ends.
  void Play(char event) {
    switch (event) {
      case 'R':
        return legs_.decodes.back()->Send(Reserved());
      case 'F':
        return legs_.prefills.back()->Send(First({Token(0, 3, Id("a"))}));
      case 'P':
        return legs_.prefills.back()->Send(PrefillDone());
      case 'T':
        return legs_.decodes.back()->Send(Tokens({Token(0, 4, Id("b"))}));
      case 'U':
        return legs_.decodes.back()->Send(Tokens({Token(0, 5, Id("c"))}, {Length(0)}));
      case 'D':
        return legs_.decodes.back()->Send(DecodeDone());
      case 'Q':
        return legs_.prefills.back()->End(absl::OkStatus());
      case 'E':
        return legs_.decodes.back()->End(absl::OkStatus());
    }
  }
  // All orders in which those events can arrive: each stream keeps its own order (R T U D E and F P
  // Q).
  static std::vector<std::string> Orders() {
    std::string mask = "DDDDDPPP";
    std::sort(mask.begin(), mask.end());
    std::vector<std::string> orders;
    do {
      std::string order;
      size_t d = 0, p = 0;
      for (char c : mask) order += c == 'D' ? "RTUDE"[d++] : "FPQ"[p++];
      orders.push_back(order);
    } while (std::next_permutation(mask.begin(), mask.end()));
    return orders;
  }
  const std::vector<uint32_t> abc_ = {Id("a"), Id("b"), Id("c")};
};

TEST_F(GenerateCallTest, EveryOrderOfEventsGivesTheSameAnswer) {
  ASSERT_EQ(Orders().size(), 56u);
  for (const std::string& order : Orders()) {
    SCOPED_TRACE(order);
    Running running = Start(Request());
    for (size_t i = 0; i < order.size(); ++i) {
      EXPECT_TRUE(order.find('R') < i || running.received->messages.empty())
          << "nothing before Reserved";
      Play(order[i]);
    }
    timers_.Advance(absl::Seconds(1));
    EXPECT_EQ(running.received->ids(), abc_);
    EXPECT_EQ(running.received->text(), "abc");
    ASSERT_EQ(running.received->finishes.size(), 1u);
    EXPECT_TRUE(running.received->finishes[0].ok());
    const v1::GenerateResponse& last = running.received->messages.back();
    EXPECT_EQ(last.finished().reason(), v1::FINISH_REASON_LENGTH);
    EXPECT_EQ(last.finished().usage().prompt_tokens(), 3u);
    EXPECT_EQ(last.finished().usage().completion_tokens(), 3u);
    EXPECT_EQ(last.finished().usage().cached_prompt_tokens(), 2u);
    EXPECT_EQ(last.finished().usage().seed(), 77u);
    EXPECT_EQ(last.finished().timings().kv_transport(), "shm")
        << "prefill's figures are waited for";
    EXPECT_FALSE(legs_.decodes.back()->cancelled);
    EXPECT_FALSE(legs_.prefills.back()->cancelled);
    ASSERT_EQ(legs_.prefills.back()->tickets.size(), 1u);
    EXPECT_EQ(legs_.prefills.back()->tickets[0].handoff().reservation_id(), 9u);
    EXPECT_EQ(legs_.prefills.back()->tickets[0].decode_address(), "d1");
  }
}

TEST_F(GenerateCallTest, FirstTokenWaitsForReservedAndNotForTheTransfer) {
  Running running = Start(Request());
  Play('F');
  EXPECT_TRUE(running.received->messages.empty());
  Play('R');
  EXPECT_EQ(running.received->text(), "a");
  running.call->OnClientCancel(absl::CancelledError());
}

TEST_F(GenerateCallTest, PrefillStartsAtOnceOnlyWithHeadroom) {
  for (const char* d : {"d1", "d2"}) {
    auto full = ReadyStatus("decode");
    full.mutable_load()->set_kv_blocks_free(0);
    table_.OnStatus(d, full);
  }
  Running running = Start(Request());
  EXPECT_TRUE(legs_.prefills.empty());
  Play('R');
  ASSERT_EQ(legs_.prefills.size(), 1u);
  EXPECT_EQ(legs_.prefills[0]->tickets.size(), 1u);
  for (char event : std::string("FPTUD")) Play(event);
  EXPECT_EQ(running.received->ids(), abc_);
}

// Cancelled after each event of each order: both workers are told, the client's call ends once,
// nothing leaks.
TEST_F(GenerateCallTest, CancelAtEveryStateCancelsBothWorkers) {
  for (const std::string& order : Orders()) {
    for (size_t played = 0; played < order.size(); ++played) {
      SCOPED_TRACE(order.substr(0, played));
      Running running = Start(Request());
      for (char event : order.substr(0, played)) Play(event);
      const bool over = running.received->done();
      running.call->OnClientCancel(absl::CancelledError());
      ASSERT_EQ(running.received->finishes.size(), 1u);
      if (!over) {
        EXPECT_EQ(running.received->code(), absl::StatusCode::kCancelled);
        const bool decode_done = order.substr(0, played).find('D') != std::string::npos;
        EXPECT_TRUE(decode_done || legs_.decodes.back()->cancelled);
      }
      legs_.EndCancelled();
      const size_t seen = running.received->messages.size();
      if (!legs_.prefills.back()->ended && order.find('F') >= played)
        legs_.prefills.back()->Send(First({Token(0, 3, Id("a"))}));
      EXPECT_EQ(running.received->messages.size(), seen) << "late events are dropped";
      EXPECT_EQ(running.received->finishes.size(), 1u);
    }
  }
}

// Case 11.5: one token needs no reservation, no transfer and no decode worker.
TEST_F(GenerateCallTest, OneTokenNeedsPrefillOnly) {
  v1::GenerateRequest request = Request();
  request.mutable_sampling()->set_max_tokens(1);
  Running running = Start(request);
  EXPECT_TRUE(legs_.decodes.empty());
  ASSERT_EQ(legs_.prefills.size(), 1u);
  EXPECT_FALSE(legs_.prefills[0]->open.needs_handoff());
  legs_.prefills[0]->Send(First({Token(0, 3, Id("a"))}, {Length(0)}));
  ASSERT_TRUE(running.received->done());
  EXPECT_TRUE(running.received->finishes[0].ok());
  EXPECT_EQ(running.received->messages.size(), 1u);
  EXPECT_EQ(running.received->messages[0].finished().usage().completion_tokens(), 1u);
  EXPECT_FALSE(legs_.prefills[0]->cancelled) << "it ends by itself";
}

// Case 11.5: the first token ends the answer; decode is told to forget it, whether it has reserved
// or not.
TEST_F(GenerateCallTest, EndAtTheFirstTokenCancelsDecode) {
  for (bool reserved_first : {false, true}) {
    SCOPED_TRACE(reserved_first);
    Running running = Start(Request());
    if (reserved_first) Play('R');
    const uint32_t eos = Facts().config.eos_ids[0];
    worker::v1::ChoiceFinished end;
    end.set_finish(worker::v1::FINISH_STOP_TOKEN);
    end.set_stop_token_id(eos);
    legs_.prefills.back()->Send(First({Token(0, 3, eos)}, {end}));
    ASSERT_TRUE(running.received->done());
    EXPECT_TRUE(running.received->finishes[0].ok());
    EXPECT_TRUE(legs_.decodes.back()->cancelled);
    EXPECT_EQ(running.received->text(), "");
    EXPECT_EQ(running.received->ids(), std::vector<uint32_t>{eos});
    EXPECT_EQ(running.received->messages.back().finished().stop_token_id(), eos);
    EXPECT_EQ(running.received->messages.back().finished().usage().completion_tokens(), 1u);
    legs_.EndCancelled();
  }
}

TEST_F(GenerateCallTest, PositionsReachTheClientOnce) {
  Running running = Start(Request());
  Play('R');
  Play('F');
  legs_.decodes[0]->Send(Tokens({Token(0, 3, Id("a")), Token(0, 4, Id("b"))}));
  legs_.decodes[0]->Send(Tokens({Token(0, 4, Id("b")), Token(0, 5, Id("c"))}, {Length(0)}));
  Play('P');
  Play('D');
  EXPECT_EQ(running.received->ids(), abc_);
}

TEST_F(GenerateCallTest, MissingPositionIsInternal) {
  Running running = Start(Request());
  Play('R');
  Play('F');
  legs_.decodes[0]->Send(Tokens({Token(0, 5, Id("c"))}));
  EXPECT_EQ(running.received->code(), absl::StatusCode::kInternal);
}

TEST_F(GenerateCallTest, WorkerEndingWithoutAnAnswerIsInternal) {
  Running early = Start(Request());
  Play('R');
  legs_.decodes.back()->End(absl::OkStatus());
  EXPECT_EQ(early.received->code(), absl::StatusCode::kInternal);
  Running silent = Start(Request());
  legs_.prefills.back()->End(absl::OkStatus());
  EXPECT_EQ(silent.received->code(), absl::StatusCode::kInternal);
}

// Case 2.1: the stop string lies over the hand-over; nothing of it is sent.
TEST_F(GenerateCallTest, StopStringOverTheHandOverIsHeldBack) {
  v1::GenerateRequest request = Request();
  request.mutable_sampling()->add_stop("ab");
  Running running = Start(request);
  Play('R');
  Play('F');
  EXPECT_EQ(running.received->text(), "") << "a may begin the stop string";
  EXPECT_EQ(running.received->ids(), std::vector<uint32_t>{Id("a")}) << "the token is no secret";
  worker::v1::ChoiceFinished end;
  end.set_finish(worker::v1::FINISH_STOP_STRING);
  legs_.decodes[0]->Send(Tokens({Token(0, 4, Id("b"))}, {end}));
  Play('P');
  Play('D');
  ASSERT_TRUE(running.received->done());
  EXPECT_EQ(running.received->text(), "");
  EXPECT_EQ(running.received->messages.back().finished().reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(running.received->messages.back().finished().stop_string(), "ab");
}

// Case 2.2: held text is released when the answer ends otherwise.
TEST_F(GenerateCallTest, HeldTextIsReleasedAtTheEnd) {
  v1::GenerateRequest request = Request();
  request.mutable_sampling()->add_stop("cx");
  Running running = Start(request);
  for (char event : std::string("RFTUPD")) Play(event);
  EXPECT_EQ(running.received->text(), "abc");
}

// The router alone sees this stop: the text shows a control token that workers' text does not have.
TEST_F(GenerateCallTest, StopThatOnlyTheRouterSeesEndsDecode) {
  const uint32_t special = Facts().config.eos_ids[0];
  const std::string shown(Facts().tokenizer->TokenBytes(special));
  v1::GenerateRequest request = Request();
  request.set_show_special(true);
  request.mutable_sampling()->set_ignore_eos(true);
  request.mutable_sampling()->add_stop(shown);
  Running running = Start(request);
  Play('R');
  Play('F');
  legs_.decodes[0]->Send(Tokens({Token(0, 4, special)}));
  ASSERT_TRUE(running.received->done());
  EXPECT_TRUE(running.received->finishes[0].ok());
  EXPECT_EQ(running.received->text(), "a");
  EXPECT_TRUE(legs_.decodes[0]->cancelled);
}

TEST_F(GenerateCallTest, EachChoiceFinishesOnceAndUsageComesLast) {
  v1::GenerateRequest request = Request();
  request.mutable_sampling()->set_n(3);
  Running running = Start(request);
  Play('R');
  legs_.prefills[0]->Send(
      First({Token(0, 3, Id("a")), Token(1, 3, Id("b")), Token(2, 3, Id("c"))}, {Length(1)}));
  legs_.decodes[0]->Send(Tokens({Token(0, 4, Id("b")), Token(2, 4, Id("a"))}, {Length(2)}));
  legs_.decodes[0]->Send(Tokens({Token(0, 5, Id("c"))}, {Length(0)}));
  EXPECT_FALSE(running.received->done());
  Play('P');
  Play('D');
  ASSERT_TRUE(running.received->done());
  std::vector<int> ends(3);
  for (const auto& message : running.received->messages) {
    ends[message.index()] += message.has_finished();
    EXPECT_EQ(message.finished().has_usage(), &message == &running.received->messages.back());
  }
  EXPECT_EQ(ends, (std::vector<int>{1, 1, 1}));
  EXPECT_EQ(running.received->text(0), "abc");
  EXPECT_EQ(running.received->text(2), "ca");
  EXPECT_EQ(running.received->messages.back().finished().usage().completion_tokens(), 6u);
}

TEST_F(GenerateCallTest, FiguresOfPrefillAreNotWaitedForLong) {
  Running running = Start(Request());
  for (char event : std::string("RFTUD")) Play(event);
  EXPECT_FALSE(running.received->done());
  timers_.Advance(deps_.done_grace);
  EXPECT_TRUE(running.received->done());
  EXPECT_EQ(running.received->ids(), abc_);
  // What was handed over, the decode worker knows too.
  const v1::Timings& timings = running.received->messages.back().finished().timings();
  EXPECT_EQ(timings.kv_transport(), "shm");
  EXPECT_EQ(timings.kv_bytes(), 640u);
}

TEST_F(GenerateCallTest, ClientThatDoesNotReadEndsTheCall) {
  Running running = Start(Request());
  Play('R');
  running.received->write_status = absl::ResourceExhaustedError("slow");
  Play('F');
  EXPECT_EQ(running.received->code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(legs_.decodes[0]->cancelled);
  EXPECT_TRUE(legs_.prefills[0]->cancelled);
}

TEST_F(GenerateCallTest, WorkersGetResolvedParametersAndTheDeadline) {
  v1::GenerateRequest request = Request();
  request.set_cache_salt("salt");
  request.set_priority(v1::PRIORITY_LOW);
  request.mutable_sampling()->set_seed(0);
  request.mutable_sampling()->set_temperature(0);
  Running running = Start(request, absl::Seconds(7));
  const auto& spec = legs_.decodes[0]->open.spec();
  EXPECT_EQ(spec.SerializeAsString(), legs_.prefills[0]->open.spec().SerializeAsString());
  EXPECT_EQ(spec.sampling().seed(), 0u);
  EXPECT_EQ(spec.sampling().temperature(), 0);
  EXPECT_EQ(spec.sampling().max_tokens(), 10u);
  EXPECT_EQ(spec.sampling().logprobs(), -1);
  EXPECT_EQ(spec.cache_salt(), "salt");
  EXPECT_EQ(spec.priority(), -8);
  EXPECT_EQ(spec.attempt(), 1u);
  EXPECT_EQ(legs_.decodes[0]->deadline, clock_.Now() + absl::Seconds(7));
  EXPECT_EQ(legs_.prefills[0]->deadline, clock_.Now() + absl::Seconds(7));
  running.call->OnClientCancel(absl::CancelledError());
}

TEST_F(GenerateCallTest, LogprobsOfBothWorkersArePassedOn) {
  v1::GenerateRequest request = Request();
  request.mutable_sampling()->set_logprobs(1);
  Running running = Start(request);
  const auto with_logprob = [](worker::v1::Token token, float logprob) {
    token.set_has_logprob(true);
    token.set_logprob(logprob);
    auto* top = token.add_top();
    top->set_token_id(1);
    top->set_logprob(logprob / 2);
    return token;
  };
  Play('R');
  legs_.prefills[0]->Send(First({with_logprob(Token(0, 3, Id("a")), -2)}));
  legs_.decodes[0]->Send(Tokens({with_logprob(Token(0, 4, Id("b")), -4)}, {Length(0)}));
  Play('P');
  Play('D');
  ASSERT_EQ(running.received->messages.size(), 2u);
  EXPECT_EQ(running.received->messages[0].logprobs(0).logprob(), -2);
  EXPECT_EQ(running.received->messages[1].logprobs(0).token_id(), Id("b"));
  EXPECT_EQ(running.received->messages[1].logprobs(0).top(0).logprob(), -2);
}

TEST_F(GenerateCallTest, TimesAreMeasuredInTheRouter) {
  Running running = Start(Request());
  timers_.Advance(absl::Milliseconds(30));
  Play('R');
  timers_.Advance(absl::Milliseconds(20));
  Play('F');
  timers_.Advance(absl::Milliseconds(10));
  Play('T');
  timers_.Advance(absl::Milliseconds(30));
  for (char event : std::string("UPD")) Play(event);
  const v1::Timings& timings = running.received->messages.back().finished().timings();
  EXPECT_NEAR(timings.ttft_s(), 0.05, 1e-9);
  EXPECT_NEAR(timings.prefill_s(), 0.05, 1e-9);
  EXPECT_NEAR(timings.itl_mean_s(), 0.02, 1e-9);
  EXPECT_NEAR(timings.e2e_s(), 0.09, 1e-9);
  EXPECT_EQ(timings.kv_bytes(), 640u);
  EXPECT_EQ(timings.prefill_worker(), "p1");
  EXPECT_EQ(timings.decode_worker(), "d1");
  const auto ttft = store_->histogram(base::HistogramId::kRouterTimeToFirstToken, "generate");
  EXPECT_EQ(ttft.count(), 1u);
  EXPECT_NEAR(ttft.sum(), 0.05, 1e-9);
  EXPECT_EQ(store_->histogram(base::HistogramId::kRouterInterTokenLatency, "generate").count(), 2u);
  EXPECT_NEAR(store_->histogram(base::HistogramId::kRouterTtftStage, "reserve").sum(), 0.03, 1e-9);
}

class SingleTopologyTest : public GenerateCallFixture {
 protected:
  SingleTopologyTest() : GenerateCallFixture(Topology::kSingle) {}
};

TEST_F(SingleTopologyTest, DecodeWorkerDoesEverything) {
  Running running = Start(Request());
  ASSERT_EQ(legs_.decodes.size(), 1u);
  EXPECT_TRUE(legs_.prefills.empty());
  EXPECT_TRUE(legs_.decodes[0]->open.prefill_locally());
  legs_.decodes[0]->Send(Tokens({Token(0, 3, Id("a"))}));
  EXPECT_EQ(running.received->text(), "a");
  legs_.decodes[0]->Send(Tokens({Token(0, 4, Id("b"))}, {Length(0)}));
  auto done = DecodeDone();
  done.mutable_done()->set_cached_prompt_tokens(1);
  legs_.decodes[0]->Send(done);
  ASSERT_TRUE(running.received->done());
  EXPECT_TRUE(running.received->finishes[0].ok());
  EXPECT_EQ(running.received->text(), "ab");
  EXPECT_EQ(running.received->messages.back().finished().usage().cached_prompt_tokens(), 1u);
}

}  // namespace
}  // namespace baton::router
