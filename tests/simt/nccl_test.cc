// What is particular to pairs that meet over NCCL: a library that may not be there, two ends that
// must do the same, and a peer that does nothing any more. (The contract of all transports:
// tests/unit/kvtransfer, compiled into this program too.)

#include <poll.h>

#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "engine/base/clock.h"
#include "engine/base/nccl_library.h"
#include "kvtransfer/nccl_link.h"
#include "kvtransfer/transport.h"
#include "tests/simt/fake_cudart.h"
#include "tests/simt/fake_nccl.h"
#include "tests/unit/kvtransfer/handoff_pair.h"

namespace baton::kvtransfer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Kind = ReceiverEvent::Kind;
using simt::FakeNcclConfig;
using simt::GetFakeNcclStats;

constexpr int kVersion = 22809;

// The library is there in this program, for all its tests.
const bool kInstalled = [] {
  simt::GetFakeNcclConfig().version = kVersion;
  return true;
}();

size_t OpenFiles() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

class NcclTest : public ::testing::Test {
 protected:
  ~NcclTest() override {
    Configure([&](FakeNcclConfig* config) { *config = saved_; });
    simt::GetRuntimeConfig() = saved_runtime_;
    EXPECT_EQ(GetFakeNcclStats().misuses, 0);
  }

  // While nobody uses it.
  template <typename Change>
  static void Configure(Change change) {
    const std::lock_guard<std::recursive_mutex> lock(simt::RuntimeMutex());
    change(&simt::GetFakeNcclConfig());
  }
  static void WaitForCommunicators(int count) {
    while (GetFakeNcclStats().communicators != count) std::this_thread::yield();
  }

  const FakeNcclConfig saved_ = simt::GetFakeNcclConfig();
  const simt::RuntimeConfig saved_runtime_ = simt::GetRuntimeConfig();
};

// A decode worker with these limits, and what it needs to be met.
class Decode {
 public:
  explicit Decode(std::vector<std::string> transports = {"nccl"})
      : device_("nccl", layout_.pool_bytes()), host_("shm", layout_.pool_bytes()) {
    device_.Fill(0xee);
    options_.device_pool = device_.device();
    options_.pool = host_.host();
    options_.layout = layout_;
    options_.fingerprint = TestFingerprint(layout_);
    options_.transports = std::move(transports);
    options_.clock = &clock_;
  }
  absl::Status Start() {
    auto receiver = Receiver::Create(
        options_, [this](ReceiverEvent event) { events_.TryPush(std::move(event)); });
    if (receiver.ok()) receiver_ = *std::move(receiver);
    return receiver.status();
  }
  worker::v1::Hello Meet(MemoryLink* link, SessionId* session) {
    worker::v1::Hello hello;
    hello.set_role("prefill");
    *hello.mutable_fingerprint() = options_.fingerprint;
    return *receiver_->OnPeerHello(hello, link, session);
  }
  SenderOptions Sending() {
    SenderOptions send;
    send.device_pool = device_.device();
    send.pool = host_.host();
    send.layout = layout_;
    send.hello.set_role("prefill");
    *send.hello.mutable_fingerprint() = options_.fingerprint;
    return send;
  }
  std::optional<ReceiverEvent> NextEvent(absl::Duration patience = kPatience) {
    return events_.PopFor(patience);
  }
  // Longer than a peer may take for anything; this one is not silent meanwhile.
  void LetTimePass(SessionId session) {
    worker::v1::PeerMessage heartbeat;
    heartbeat.mutable_heartbeat();
    receiver_->OnMessage(session, heartbeat);
    clock_.Advance(options_.peer_timeout + absl::Seconds(1));
  }
  worker::v1::Handoff Reserve() {
    Reservation reservation;
    reservation.prompt_tokens = 64;
    reservation.blocks = {5};
    return receiver_->Reserve(std::move(reservation));
  }
  Receiver& receiver() { return *receiver_; }
  ReceiverOptions& options() { return options_; }
  TestPool& device() { return device_; }

 private:
  const kv::KvLayout layout_ = TestLayout(kv::KvFormat::kFp8, 16);
  TestPool device_, host_;
  base::FakeClock clock_;
  ReceiverOptions options_;
  base::BoundedQueue<ReceiverEvent> events_{64};
  std::unique_ptr<Receiver> receiver_;
};

// A peer that speaks by hand, up to the name of a communicator.
class HandPeer {
 public:
  explicit HandPeer(Decode* decode) : decode_(decode) {
    const worker::v1::Hello hello = decode->Meet(&link_, &session_);
    socket_ = *ConnectTcp(hello.transports(0).address(), kPatience);
    Send(Encode(AttachFrame{hello.transports(0).token()}));
  }
  ~HandPeer() { decode_->receiver().OnPeerGone(session_); }
  NcclOfferFrame ReadOffer() {
    EXPECT_TRUE(ParseWelcome(*ReceiveFrame(socket_.get(), kPatience, nullptr)).ok());
    return *ParseNcclOffer(*ReceiveFrame(socket_.get(), kPatience, nullptr));
  }
  void Join() {
    base::NcclUniqueId id;
    ASSERT_EQ(base::LoadNccl()->unique_id(&id), base::kNcclSuccess);
    Send(Encode(NcclJoinFrame{id.bytes}));
  }
  void Send(const std::string& bytes) {
    EXPECT_TRUE(SendAll(socket_.get(), bytes, kPatience).ok());
  }
  void HangUp() { socket_.Reset(); }
  bool session_closed() const { return link_.closed(); }
  // What came instead of another frame.
  absl::Status NextFrame(absl::Duration patience = kPatience) {
    return ReceiveFrame(socket_.get(), patience, nullptr).status();
  }
  // Until the decode worker has had enough of it.
  void ExpectGivenUp() {
    pollfd entry{socket_.get(), POLLIN, 0};
    int found = 0;
    for (int i = 0; i < 200 && found == 0; ++i) {
      decode_->LetTimePass(session_);
      found = poll(&entry, 1, 100);
    }
    EXPECT_EQ(found, 1);
    EXPECT_EQ(NextFrame().code(), absl::StatusCode::kUnavailable);
  }

 private:
  Decode* decode_;
  MemoryLink link_;
  SessionId session_ = 0;
  UniqueFd socket_;
};

TEST_F(NcclTest, AHostWithoutTheLibrarySaysSo) {
  TestPool pool("nccl", 4096);
  ListenOptions listen;
  listen.device_pool = pool.device();
  ConnectOptions connect;
  connect.device_pool = pool.device();
  worker::v1::TransportEndpoint endpoint;
  endpoint.set_name("nccl");
  Configure([](FakeNcclConfig* config) { config->version = 0; });
  for (const absl::Status& status :
       {ListenOn("nccl", listen).status(), ConnectTo(endpoint, connect).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("libnccl.so.2 cannot be loaded"));
  }
}

TEST_F(NcclTest, ALibraryThatLacksSomethingOrIsTooOldIsRefusedByName) {
  Configure([](FakeNcclConfig* config) { config->missing = "ncclCommAbort"; });
  EXPECT_EQ(base::LoadNccl().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(base::LoadNccl().status().message()), HasSubstr("has no ncclCommAbort"));
  Configure([](FakeNcclConfig* config) {
    config->missing = "";
    config->version = 21604;
  });
  EXPECT_EQ(base::LoadNccl().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(base::LoadNccl().status().message()),
              HasSubstr("is version 2.16.4, needed is 2.18.0 or later"));
}

TEST_F(NcclTest, PoolsOnTheHostAreRefused) {
  base::Buffer pool = *base::Buffer::AllocateShared("host", 4096);
  ListenOptions listen;
  listen.pool = &pool;
  EXPECT_EQ(ListenOn("nccl", listen).status().code(), absl::StatusCode::kFailedPrecondition);
  worker::v1::TransportEndpoint endpoint;
  endpoint.set_name("nccl");
  EXPECT_EQ(ConnectTo(endpoint, {}).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(NcclTest, WithoutTheLibraryTheDecodeWorkerOffersTheRest) {
  Configure([](FakeNcclConfig* config) { config->version = 0; });
  Decode decode({"nccl", "shm"});
  ASSERT_TRUE(decode.Start().ok());
  MemoryLink link;
  SessionId session = 0;
  const worker::v1::Hello hello = decode.Meet(&link, &session);
  ASSERT_EQ(hello.transports_size(), 1);
  EXPECT_EQ(hello.transports(0).name(), "shm");
  decode.receiver().OnPeerGone(session);
  decode.options().required_transport = "nccl";
  EXPECT_THAT(std::string(decode.Start().message()), HasSubstr("libnccl.so.2"));
}

TEST_F(NcclTest, TwoVersionsDoNotPair) {
  Decode decode;
  ASSERT_TRUE(decode.Start().ok());
  Configure([](FakeNcclConfig* config) { config->version = 23004; });
  MemoryLink link;
  SessionId session = 0;
  SenderOptions send = decode.Sending();
  send.required_transport = "nccl";
  const absl::Status status = Sender::Create(send, decode.Meet(&link, &session), &link).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("nccl: version 2.30.4 here and 2.28.9 at the decode worker at 127.0.0.1:"));
  decode.receiver().OnPeerGone(session);
}

TEST_F(NcclTest, ACommunicatorThatCannotBeJoinedIsLeftForTheNextTransport) {
  Configure([](FakeNcclConfig* config) { config->init_result = 5; });
  Decode decode({"nccl", "shm"});
  ASSERT_TRUE(decode.Start().ok());
  MemoryLink link;
  SessionId session = 0;
  {
    auto sender = Sender::Create(decode.Sending(), decode.Meet(&link, &session), &link);
    ASSERT_TRUE(sender.ok()) << sender.status();
    EXPECT_EQ((*sender)->transport_name(), "shm");
    EXPECT_FALSE(link.closed()) << "the session goes on";
    decode.receiver().OnPeerGone(session);
  }
  WaitForCommunicators(0);
  SenderOptions send = decode.Sending();
  send.required_transport = "nccl";
  const absl::Status refused = Sender::Create(send, decode.Meet(&link, &session), &link).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("decode worker at 127.0.0.1:"), HasSubstr("invalid usage")));
  decode.receiver().OnPeerGone(session);
}

TEST_F(NcclTest, JoiningThatNeverEndsIsGivenUpByThePrefillWorker) {
  Configure([](FakeNcclConfig* config) { config->init_never_ends = true; });
  Decode decode;
  ASSERT_TRUE(decode.Start().ok());
  MemoryLink link;
  SessionId session = 0;
  SenderOptions send = decode.Sending();
  send.reply_timeout = absl::Milliseconds(500);
  const absl::Status status = Sender::Create(send, decode.Meet(&link, &session), &link).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("nccl: decode worker at 127.0.0.1:"),
                    HasSubstr("has not joined the communicator in 3s")));
  WaitForCommunicators(0);  // the decode worker's too
  decode.receiver().OnPeerGone(session);
}

// Each waits where the real library would hang for ever.
TEST_F(NcclTest, APeerThatStopsOrDiesBeforeItHasJoinedIsGivenUp) {
  Decode decode;
  ASSERT_TRUE(decode.Start().ok());
  {
    HandPeer says_nothing(&decode);
    EXPECT_EQ(says_nothing.ReadOffer().version, static_cast<uint32_t>(kVersion));
    says_nothing.ExpectGivenUp();
  }
  {
    HandPeer does_not_come(&decode);
    does_not_come.ReadOffer();
    does_not_come.Join();
    does_not_come.ExpectGivenUp();
  }
  WaitForCommunicators(0);
  {
    const int aborted = GetFakeNcclStats().aborted;
    HandPeer dies(&decode);
    dies.ReadOffer();
    dies.Join();
    dies.HangUp();
    while (GetFakeNcclStats().aborted == aborted) std::this_thread::yield();
  }
  // ... and others are served.
  MemoryLink link;
  SessionId session = 0;
  SenderOptions send = decode.Sending();
  send.reply_timeout = kPatience;
  auto sender = Sender::Create(send, decode.Meet(&link, &session), &link);
  EXPECT_TRUE(sender.ok()) << sender.status();
  sender->reset();
  decode.receiver().OnPeerGone(session);
}

TEST_F(NcclTest, FramesThatDoNotFitEndTheConnection) {
  Decode decode;
  ASSERT_TRUE(decode.Start().ok());
  const auto expect_end = [&](const std::function<void(HandPeer*)>& act) {
    HandPeer peer(&decode);
    const NcclOfferFrame offer = peer.ReadOffer();
    EXPECT_GE(offer.slot_bytes, kProbeBytes);
    act(&peer);
    EXPECT_EQ(peer.NextFrame().code(), absl::StatusCode::kUnavailable);
  };
  expect_end([](HandPeer* peer) { peer->Send(Encode(ProbeFrame{100})); });
  expect_end([](HandPeer* peer) {
    peer->Join();
    peer->Join();
  });
  expect_end([](HandPeer* peer) {
    peer->Join();
    peer->Send(Encode(ProbeFrame{kMaxUnitBytes}));
  });
  expect_end([](HandPeer* peer) {
    peer->Join();
    for (int i = 0; i < 257; ++i) peer->Send(Encode(ProbeFrame{100}));
  });
  expect_end([](HandPeer* peer) { peer->Send(Encode(NcclJoinFrame{})); });  // no id of NCCL's
}

TEST_F(NcclTest, PairsHaveALimit) {
  Decode decode;
  ASSERT_TRUE(decode.Start().ok());
  std::vector<std::unique_ptr<HandPeer>> peers;
  for (int i = 0; i < 32; ++i) {
    peers.push_back(std::make_unique<HandPeer>(&decode));
    peers.back()->ReadOffer();
  }
  HandPeer one_more(&decode);
  EXPECT_EQ(one_more.NextFrame().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(one_more.session_closed()) << "it may try another transport";
}

// Case 11.2, at the other end: what is announced and does not come.
TEST_F(NcclTest, AUnitThatNeverArrivesEndsTheConnectionByName) {
  Decode decode;
  ASSERT_TRUE(decode.Start().ok());
  MemoryLink link;
  SessionId session = 0;
  SenderOptions send = decode.Sending();
  send.stall_timeout_min = send.reply_timeout = kPatience;
  auto sender = *Sender::Create(send, decode.Meet(&link, &session), &link);
  Configure([](FakeNcclConfig* config) { config->hold = true; });
  base::BoundedQueue<TransferResult> results(4);
  TransferSpec spec;
  spec.handoff = decode.Reserve();
  spec.prompt_tokens = 64;
  spec.peer_blocks = {5};
  spec.on_done = [&](TransferResult result) { results.TryPush(std::move(result)); };
  const TransferId id = sender->Begin(std::move(spec));
  sender->Push(id, 0, 1, 0, 3, std::vector<kv::BlockId>{2});
  std::optional<ReceiverEvent> event;
  for (int i = 0; i < 200 && !event.has_value(); ++i) {
    decode.LetTimePass(session);
    event = decode.NextEvent(absl::Milliseconds(100));
  }
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->kind, Kind::kFailed);
  EXPECT_EQ(event->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(event->status.message()),
              AllOf(HasSubstr("prefill worker at 127.0.0.1:"),
                    HasSubstr("has not sent what it announced in 30s")));
  const auto result = results.PopFor(kPatience);
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(result->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(decode.device().Read() == std::vector<uint8_t>(decode.device().size(), 0xee));
  sender.reset();
  decode.receiver().OnPeerGone(session);
}

TEST_F(NcclTest, AnAsynchronousErrorEndsBothSidesWithWhatTheLibrarySays) {
  HandoffPair pair("nccl", kv::KvFormat::kFp8);
  Configure([](FakeNcclConfig* config) { config->fail = true; });
  const auto handoff = pair.decode().Reserve(64, 0, {5});
  const TransferId id = pair.Begin(handoff, 64, 0, {5});
  pair.sender().Push(id, 0, 1, 0, 3, std::vector<kv::BlockId>{2});
  const TransferResult result = pair.NextResult();
  EXPECT_EQ(result.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(result.status.message()), HasSubstr("decode worker at 127.0.0.1:"));
  const ReceiverEvent event = pair.decode().NextEvent();
  EXPECT_EQ(event.kind, Kind::kFailed);
  EXPECT_EQ(event.status.code(), absl::StatusCode::kUnavailable);
  while (!pair.to_prefill().closed()) std::this_thread::yield();
}

TEST_F(NcclTest, DamageOnTheWayIsFoundByChecksums) {
  HandoffPair pair("nccl", kv::KvFormat::kFp8, [](SenderOptions* o) { o->checksums = true; });
  Configure([](FakeNcclConfig* config) { config->corrupt = true; });
  const auto handoff = pair.decode().Reserve(64, 0, {5});
  const TransferId id = pair.Begin(handoff, 64, 0, {5});
  pair.sender().Push(id, 0, 1, 0, 3, std::vector<kv::BlockId>{2});
  EXPECT_EQ(pair.decode().NextEvent().status.code(), absl::StatusCode::kDataLoss);
}

// The decode worker alone writes: what is still on its way when its blocks are taken back, and
// given to others, goes nowhere.
TEST_F(NcclTest, ARevokedUnitOnItsWayIsQuietAtOnceAndGoesNowhere) {
  HandoffPair pair("nccl", kv::KvFormat::kFp8);
  const auto handoff = pair.decode().Reserve(64, 0, {5});
  const TransferId id = pair.Begin(handoff, 64, 0, {5});
  // When this lands, that has been opened.
  const auto other = pair.decode().Reserve(64, 1, {9});
  pair.sender().Commit(pair.Begin(other, 64, 1, {9}), {});
  EXPECT_EQ(pair.decode().NextEvent().kind, Kind::kLanded);
  EXPECT_TRUE(pair.NextResult().status.ok());
  Configure([](FakeNcclConfig* config) { config->hold = true; });
  pair.to_prefill().Hold();
  pair.sender().Push(id, 0, 1, 0, 3, std::vector<kv::BlockId>{2});
  EXPECT_TRUE(pair.decode().receiver().Revoke(handoff.reservation_id(), "client left"));
  EXPECT_EQ(pair.decode().events_waiting(), 1u);
  EXPECT_EQ(pair.decode().NextEvent().kind, Kind::kQuiesced);
  // The blocks are somebody else's now.
  const auto next = pair.decode().Reserve(64, 0, {5});
  const TransferId next_id = pair.Begin(next, 64, 0, {5});
  pair.sender().Push(next_id, 0, 1, 0, 3, std::vector<kv::BlockId>{7});
  pair.sender().Commit(next_id, {});
  Configure([](FakeNcclConfig* config) { config->hold = false; });
  EXPECT_EQ(pair.decode().NextEvent().reservation_id, next.reservation_id());
  pair.ExpectLanded(64, 0, {7}, {5});
  pair.to_prefill().LetGo();
}

// However late streams run and however often must be asked.
TEST_F(NcclTest, LazinessChangesNothingThatLands) {
  simt::GetRuntimeConfig().lazy = true;
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    simt::GetRuntimeConfig().seed = seed;
    Configure([&](FakeNcclConfig* config) { config->seed = seed; });
    HandoffPair("nccl", kv::KvFormat::kFp8).ExpectThreeBlocksLand();
  }
}

// An abort waits for the device; nobody waits for it.
TEST_F(NcclTest, AnAbortThatTakesLongHoldsUpNobody) {
  Decode decode;
  ASSERT_TRUE(decode.Start().ok());
  MemoryLink link;
  SessionId session = 0;
  SenderOptions send = decode.Sending();
  send.stall_timeout_min = send.reply_timeout = kPatience;
  auto sender = *Sender::Create(send, decode.Meet(&link, &session), &link);
  const worker::v1::Handoff handoff = decode.Reserve();
  TransferSpec spec;
  spec.handoff = handoff;
  spec.prompt_tokens = 64;
  spec.peer_blocks = {5};
  base::BoundedQueue<TransferResult> results(4);
  spec.on_done = [&](TransferResult result) { results.TryPush(std::move(result)); };
  sender->Push(sender->Begin(std::move(spec)), 0, 1, 0, 3, std::vector<kv::BlockId>{2});
  Configure([](FakeNcclConfig* config) { config->abort_ms = 1000; });
  const int aborted = GetFakeNcclStats().aborted;
  sender.reset();
  EXPECT_TRUE(results.PopFor(kPatience).has_value());
  decode.receiver().Revoke(handoff.reservation_id(), "in case it was never opened");
  EXPECT_TRUE(decode.NextEvent().has_value());
  EXPECT_EQ(GetFakeNcclStats().aborted, aborted) << "both ends were told before";
  decode.receiver().OnPeerGone(session);
  EXPECT_TRUE(NcclLink::WaitForAborts(kPatience));
}

TEST_F(NcclTest, AnEndedPairLeavesNothingBehind) {
  { HandoffPair once("nccl", kv::KvFormat::kFp8); }
  EXPECT_EQ(GetFakeNcclStats().communicators, 0);
  const size_t files = OpenFiles();
  for (int i = 0; i < 3; ++i) HandoffPair pair("nccl", kv::KvFormat::kFp8);
  EXPECT_EQ(OpenFiles(), files);
  EXPECT_EQ(GetFakeNcclStats().communicators, 0);
}

}  // namespace
}  // namespace baton::kvtransfer
