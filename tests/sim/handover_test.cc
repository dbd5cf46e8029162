// A prefill loop, a decode loop and the real hand-over between them in one process, with a model
// that notices every wrong block. What is missing here is gRPC and the router: the test plays it.

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

#include "decode_worker/decode_loop.h"
#include "kvtransfer/receiver.h"
#include "kvtransfer/sender.h"
#include "prefill_worker/prefill_loop.h"
#include "tests/support/collecting_sink.h"
#include "tests/support/fake_runner.h"
#include "tests/support/memory_link.h"
#include "tests/support/test_fingerprint.h"

namespace baton {
namespace {

using testing::CollectingSink;
using testing::FakePrompt;
using testing::FakeRequest;
using testing::FakeRunner;
using testing::GreedyIds;
using worker::v1::DecodeResponse;
using worker::v1::PrefillResponse;

constexpr absl::Duration kPatience = absl::Seconds(20);

// Two workers and the session between them.
class Pair : public prefill::PeerConnector {
 public:
  Pair(const std::string& transport, int prefill_blocks, int decode_blocks)
      : transport_(transport),
        prefill_runner(prefill_blocks, 2048),
        decode_runner(decode_blocks, 2048),
        tokenizer_(testing::FakeTokenizer()) {
    prefill::PrefillLoopOptions prefill_options;
    prefill_options.chunk_tokens = 128;
    prefill_options.max_calls = 200;
    prefill_options.model_fingerprint = "fake";
    prefill_options.test_poison_freed = true;
    prefill_loop = std::make_unique<prefill::PrefillLoop>(
        prefill_options, prefill_runner, *tokenizer_, *this, worker::WorkerMetrics());
    decode::DecodeLoopOptions decode_options;
    decode_options.scheduler.chunk_tokens = 128;
    decode_options.max_calls = 200;
    decode_options.model_fingerprint = "fake";
    decode_options.test_poison_freed = true;
    decode_loop = std::make_unique<decode::DecodeLoop>(decode_options, decode_runner, *tokenizer_,
                                                       worker::WorkerMetrics());
    ConnectWorkers();
    prefill_loop->Start();
    decode_loop->Start();
  }

  ~Pair() {
    prefill_loop->Stop();
    decode_loop->Stop();
    to_prefill_.Stop();
    sender_.reset();
    prefill_loop.reset();  // with the last share of the sender, if transfers were open
    to_decode_.Stop();
    receiver_->OnPeerGone(session_);
  }

  void Connect(const std::string& address, const std::string& incarnation, Found found) override {
    found(sender_);
  }

  // Nobody is in flight and nothing is held but by the prefix caches.
  bool WaitUntilIdle() const {
    const absl::Time deadline = absl::Now() + kPatience;
    while (absl::Now() < deadline) {
      const worker::v1::WorkerLoad p = prefill_loop->load(), d = decode_loop->load();
      if (prefill_loop->num_calls() == 0 && decode_loop->num_calls() == 0 &&
          p.kv_blocks_active() == 0 && d.kv_blocks_active() == 0 && d.kv_blocks_reserved() == 0 &&
          d.kv_blocks_quarantined() == 0) {
        return true;
      }
      absl::SleepFor(absl::Milliseconds(1));
    }
    return false;
  }

 private:
  void ConnectWorkers() {
    kvtransfer::ReceiverOptions receiver_options;
    receiver_options.pool = &decode_runner.kv_pool();
    receiver_options.layout = decode_runner.layout();
    receiver_options.fingerprint = testing::TestFingerprint(decode_runner.layout());
    receiver_options.incarnation = "decode-decode-de";
    receiver_options.transports = {transport_};
    absl::StatusOr<std::unique_ptr<kvtransfer::Receiver>> receiver =
        kvtransfer::Receiver::Create(receiver_options, [this](kvtransfer::ReceiverEvent event) {
          decode_loop->OnReceiverEvent(std::move(event));
        });
    BATON_CHECK(receiver.ok(), "receiver: ", receiver.status().ToString());
    receiver_ = *std::move(receiver);
    decode_loop->set_receiver(receiver_.get());
    kvtransfer::SenderOptions sender_options;
    sender_options.pool = &prefill_runner.kv_pool();
    sender_options.layout = prefill_runner.layout();
    sender_options.transport = transport_;
    sender_options.hello.set_incarnation("prefill-prefill-");
    sender_options.hello.set_role("prefill");
    *sender_options.hello.mutable_fingerprint() = testing::TestFingerprint(prefill_runner.layout());
    absl::StatusOr<worker::v1::Hello> hello =
        receiver_->OnPeerHello(sender_options.hello, &to_prefill_, &session_);
    BATON_CHECK(hello.ok(), "hello: ", hello.status().ToString());
    absl::StatusOr<std::unique_ptr<kvtransfer::Sender>> sender =
        kvtransfer::Sender::Create(sender_options, *hello, &to_decode_);
    BATON_CHECK(sender.ok(), "sender: ", sender.status().ToString());
    sender_ = *std::move(sender);
    to_decode_.SetReceiver(
        [this](const worker::v1::PeerMessage& message) { receiver_->OnMessage(session_, message); },
        [] {});
    to_prefill_.SetReceiver(
        [sender = sender_.get()](const worker::v1::PeerMessage& message) {
          sender->OnMessage(message);
        },
        [] {});
  }

  const std::string transport_;

 public:
  FakeRunner prefill_runner, decode_runner;
  std::unique_ptr<prefill::PrefillLoop> prefill_loop;
  std::unique_ptr<decode::DecodeLoop> decode_loop;

 private:
  std::unique_ptr<text::Tokenizer> tokenizer_;
  kvtransfer::SessionId session_ = 0;
  std::unique_ptr<kvtransfer::Receiver> receiver_;
  std::shared_ptr<kvtransfer::Sender> sender_;  // shared with the prefill loop's transfers
  testing::MemoryLink to_decode_, to_prefill_;
};

// One request as the router leads it.
struct Request {
  std::shared_ptr<CollectingSink<PrefillResponse>> prefill =
      std::make_shared<CollectingSink<PrefillResponse>>();
  std::shared_ptr<CollectingSink<DecodeResponse>> decode =
      std::make_shared<CollectingSink<DecodeResponse>>();
  prefill::CallId prefill_id = 0;
  decode::CallId decode_id = 0;
  bool has_ticket = false;

  void Open(Pair* pair, const runtime::EngineRequest& request) {
    const auto d = pair->decode_loop->Open(request, false, decode);
    const auto p = pair->prefill_loop->Open(request, true, prefill);
    BATON_CHECK(d.ok() && p.ok());
    decode_id = *d;
    prefill_id = *p;
  }
  // Passes the ticket on, once it is there.
  void Poll(Pair* pair) {
    if (has_ticket) return;
    const auto responses = decode->responses();
    if (responses.empty() || !responses[0].has_reserved()) {
      if (!decode->finished()) return;
      pair->prefill_loop->Cancel(prefill_id, absl::CancelledError("no reservation"));
      has_ticket = true;
      return;
    }
    const DecodeResponse::Reserved& reserved = responses[0].reserved();
    prefill::Ticket ticket;
    *ticket.mutable_handoff() = reserved.handoff();
    ticket.set_first_missing_block(reserved.first_missing_block());
    *ticket.mutable_block_table() = reserved.block_table();
    pair->prefill_loop->GiveTicket(prefill_id, std::move(ticket));
    has_ticket = true;
  }
  bool finished() const { return prefill->finished() && decode->finished(); }
  // Ids of one choice, first token from prefill, the others from decode; every position once.
  std::vector<uint32_t> Ids(uint32_t choice, uint32_t prompt_tokens) const {
    std::vector<uint32_t> ids;
    const auto take = [&](const auto& tokens) {
      for (const worker::v1::Token& token : tokens) {
        if (token.choice() != choice) continue;
        EXPECT_EQ(token.position(), prompt_tokens + ids.size());
        ids.push_back(token.id());
      }
    };
    for (const PrefillResponse& response : prefill->responses())
      take(response.first_tokens().tokens());
    for (const DecodeResponse& response : decode->responses()) take(response.tokens().tokens());
    return ids;
  }
};

void Lead(Pair* pair, std::vector<Request>* requests) {
  const absl::Time deadline = absl::Now() + kPatience;
  while (absl::Now() < deadline) {
    bool all = true;
    for (Request& request : *requests) {
      request.Poll(pair);
      all &= request.finished();
    }
    if (all) return;
    absl::SleepFor(absl::Microseconds(200));
  }
  FAIL() << "requests did not end in time";
}

class HandOverTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Transports, HandOverTest, ::testing::Values("shm", "tcp"));

// Case 11.8: prompt lengths at block and chunk edges; disaggregated ids = single-process ids.
TEST_P(HandOverTest, EveryPromptLengthGivesTheModelsIds) {
  Pair pair(GetParam(), 64, 64);
  for (const int length : {1, 2, 63, 64, 65, 127, 128, 129, 400}) {
    std::vector<Request> requests(1);
    requests[0].Open(&pair, FakeRequest(FakePrompt(length, length), 70));
    Lead(&pair, &requests);
    ASSERT_TRUE(requests[0].prefill->status().ok()) << requests[0].prefill->status();
    ASSERT_TRUE(requests[0].decode->status().ok()) << requests[0].decode->status();
    EXPECT_EQ(requests[0].Ids(0, length), GreedyIds(FakePrompt(length, length), 70)) << length;
  }
  EXPECT_TRUE(pair.WaitUntilIdle());
}

TEST_P(HandOverTest, BlocksTheDecodeWorkerHoldsAreNotSent) {
  Pair pair(GetParam(), 64, 64);
  const std::vector<uint32_t> prompt = FakePrompt(300, 1);
  uint64_t bytes[2];
  for (uint64_t& sent : bytes) {
    std::vector<Request> requests(1);
    requests[0].Open(&pair, FakeRequest(prompt, 5));
    Lead(&pair, &requests);
    EXPECT_EQ(requests[0].Ids(0, 300), GreedyIds(prompt, 5));
    sent = requests[0].prefill->responses().back().done().kv_bytes();
  }
  // 300 tokens; 4 full blocks are there the second time, 44 tokens are not.
  EXPECT_EQ(bytes[0] / 300, bytes[1] / 44);
}

TEST_P(HandOverTest, ChoicesTravelOnce) {
  Pair pair(GetParam(), 64, 64);
  runtime::EngineRequest request = FakeRequest(FakePrompt(100, 1), 80);
  request.params.n = 4;
  std::vector<Request> requests(1);
  requests[0].Open(&pair, request);
  Lead(&pair, &requests);
  for (uint32_t choice = 0; choice < 4; ++choice) {
    EXPECT_EQ(requests[0].Ids(choice, 100), GreedyIds(request.prompt_ids, 80));
  }
}

// Case 14.1: twelve together equal twelve alone.
TEST_P(HandOverTest, RequestsTogetherEqualRequestsAlone) {
  Pair pair(GetParam(), 128, 256);
  for (int round = 0; round < 2; ++round) {
    std::vector<Request> requests(12);
    for (int i = 0; i < 12; ++i)
      requests[i].Open(&pair, FakeRequest(FakePrompt(30 + 25 * i, i), 50));
    Lead(&pair, &requests);
    for (int i = 0; i < 12; ++i) {
      EXPECT_EQ(requests[i].Ids(0, 30 + 25 * i), GreedyIds(FakePrompt(30 + 25 * i, i), 50)) << i;
    }
  }
  EXPECT_TRUE(pair.WaitUntilIdle());
}

// Cases 3.1 and 11.3: cancels at every moment; freed blocks are poisoned; survivors are not touched
// and nothing leaks.
TEST_P(HandOverTest, CancelsAtAnyMomentLeakNothingAndDisturbNobody) {
  const unsigned seed = 20240607;
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  Pair pair(GetParam(), 96, 96);
  for (int round = 0; round < 12; ++round) {
    std::vector<Request> requests(6);
    std::vector<bool> cancelled(6, false);
    for (int i = 0; i < 6; ++i)
      requests[i].Open(&pair, FakeRequest(FakePrompt(50 + 40 * i, round * 10 + i), 30));
    const absl::Time until = absl::Now() + absl::Microseconds(random() % 6000);
    while (absl::Now() < until) {
      for (Request& request : requests) request.Poll(&pair);
    }
    for (int i = 0; i < 6; i += 2) {
      cancelled[i] = true;
      pair.prefill_loop->Cancel(requests[i].prefill_id, absl::CancelledError("client left"));
      pair.decode_loop->Cancel(requests[i].decode_id, absl::CancelledError("client left"));
    }
    Lead(&pair, &requests);
    for (int i = 0; i < 6; ++i) {
      if (cancelled[i] || !requests[i].decode->status().ok()) continue;
      EXPECT_EQ(requests[i].Ids(0, 50 + 40 * i),
                GreedyIds(FakePrompt(50 + 40 * i, round * 10 + i), 30));
    }
    for (int i = 1; i < 6; i += 2)
      EXPECT_TRUE(requests[i].decode->status().ok()) << requests[i].decode->status();
    ASSERT_TRUE(pair.WaitUntilIdle());
  }
}

}  // namespace
}  // namespace baton
