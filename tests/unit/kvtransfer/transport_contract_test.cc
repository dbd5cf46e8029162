// What every transport promises, run over each of them: first with our own Sender, then with a peer that misbehaves.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "kvtransfer/transport.h"
#include "tests/unit/kvtransfer/handoff_pair.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;
using Kind = ReceiverEvent::Kind;

std::vector<kv::BlockId> Ids(int first, int count) {
  std::vector<kv::BlockId> ids(count);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

std::vector<worker::v1::Token> OneToken(uint32_t id) {
  std::vector<worker::v1::Token> tokens(1);
  tokens[0].set_id(id);
  return tokens;
}

class TransportContractTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, TransportContractTest, ::testing::Values("shm", "tcp"),
                         [](const auto& info) { return info.param; });

class FormatContractTest : public ::testing::TestWithParam<std::tuple<std::string, kv::KvFormat>> {};
INSTANTIATE_TEST_SUITE_P(All, FormatContractTest,
                         ::testing::Combine(::testing::Values("shm", "tcp"),
                                            ::testing::Values(kv::KvFormat::kFp8, kv::KvFormat::kFp8Dynamic,
                                                              kv::KvFormat::kBf16, kv::KvFormat::kF32)),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param), "_",
                                               std::string(kv::KvFormatName(std::get<1>(info.param))));
                         });

// Lengths around the block edges; only valid rows travel, only into the reserved blocks.
TEST_P(FormatContractTest, EveryPromptLengthLandsExactly) {
  HandoffPair pair(std::get<0>(GetParam()), std::get<1>(GetParam()), [](auto* options) { options->checksums = true; });
  for (const int prompt_tokens : {1, 2, 63, 64, 65, 128, 300}) {
    SCOPED_TRACE(prompt_tokens);
    std::memset(pair.decode().pool().data(), 0xee, pair.decode().pool().size());
    const int blocks = kv::BlocksFor(prompt_tokens);
    std::vector<kv::BlockId> ours, peers;
    for (int i = 0; i < blocks; ++i) {  // scattered differently on both sides
      ours.push_back((i * 7 + 3) % 24);
      peers.push_back((i * 11 + 5) % 32);
    }
    const auto handoff = pair.decode().Reserve(prompt_tokens, 0, peers);
    const TransferId id = pair.Begin(handoff, prompt_tokens, 0, peers);
    for (int layer = 0; layer < 3; ++layer) pair.sender().Push(id, 0, blocks, layer, layer + 1, ours);
    pair.sender().Commit(id, OneToken(42));
    const ReceiverEvent event = pair.decode().NextEvent();
    ASSERT_EQ(event.kind, Kind::kLanded) << event.status;
    EXPECT_EQ(event.reservation_id, handoff.reservation_id());
    ASSERT_EQ(event.first_tokens.size(), 1u);
    EXPECT_EQ(event.first_tokens[0].id(), 42u);
    EXPECT_EQ(event.transport, std::get<0>(GetParam()));
    const TransferResult result = pair.NextResult();
    EXPECT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.bytes, event.bytes);
    EXPECT_EQ(result.units_sent, 3u);
    pair.ExpectLanded(prompt_tokens, 0, ours, peers);
  }
}

TEST_P(TransportContractTest, BlocksThatTheDecodeSideHoldsAreNotSent) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  const auto handoff = pair.decode().Reserve(300, 3, Ids(10, 5));
  const TransferId id = pair.Begin(handoff, 300, 3, Ids(10, 5));
  pair.sender().Push(id, 0, 5, 0, 3, Ids(0, 5));
  pair.sender().Commit(id, {});
  EXPECT_EQ(pair.decode().NextEvent().kind, Kind::kLanded);
  pair.ExpectLanded(300, 3, Ids(0, 5), Ids(10, 5));
}

TEST_P(TransportContractTest, NothingToSendIsLegal) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  const auto handoff = pair.decode().Reserve(128, 2, {4, 9});
  const TransferId id = pair.Begin(handoff, 128, 2, {4, 9});
  pair.sender().Commit(id, OneToken(7));
  const ReceiverEvent event = pair.decode().NextEvent();
  ASSERT_EQ(event.kind, Kind::kLanded) << event.status;
  EXPECT_EQ(event.bytes, 0u);
  EXPECT_EQ(event.first_tokens[0].id(), 7u);
  EXPECT_TRUE(pair.NextResult().status.ok());
}

TEST_P(TransportContractTest, ManyHandoversShareTheConnection) {
  HandoffPair pair(GetParam(), kv::KvFormat::kBf16);
  for (int i = 0; i < 4; ++i) {
    const auto handoff = pair.decode().Reserve(200, 0, Ids(8 * i, 4));
    const TransferId id = pair.Begin(handoff, 200, 0, Ids(8 * i, 4));
    for (int layer = 0; layer < 3; ++layer) {
      for (int block = 0; block < 4; ++block) pair.sender().Push(id, block, block + 1, layer, layer + 1, Ids(5 * i, 4));
    }
    pair.sender().Commit(id, {});
  }
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(pair.decode().NextEvent().kind, Kind::kLanded);
    EXPECT_TRUE(pair.NextResult().status.ok());
  }
}

// A Commit that overtakes the units on its own channel waits for them.
TEST_P(TransportContractTest, CommitMayArriveBeforeTheUnits) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  const auto handoff = pair.decode().Reserve(64, 0, {3});
  worker::v1::PeerMessage commit;
  *commit.mutable_commit()->mutable_handoff() = handoff;
  commit.mutable_commit()->set_units_sent(1);
  commit.mutable_commit()->set_bytes(pair.layout().payload_bytes() * 3);
  const TransferId id = pair.Begin(handoff, 64, 0, {3});
  pair.to_decode().Hold();
  pair.sender().Push(id, 0, 1, 0, 3, Ids(6, 1));
  pair.sender().Commit(id, {});
  pair.to_decode().LetGo();
  EXPECT_EQ(pair.decode().NextEvent().kind, Kind::kLanded);
}

TEST_P(TransportContractTest, ConnectionIsMeasuredAndShownOnBothSides) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  EXPECT_EQ(pair.sender().transport_name(), GetParam());
  EXPECT_GT(pair.sender().probe_bytes_per_second(), 0);
  // Anything that lands proves that the report before it has been read.
  const auto handoff = pair.decode().Reserve(64, 1, {3});
  pair.sender().Commit(pair.Begin(handoff, 64, 1, {3}), {});
  pair.decode().NextEvent();
  const auto peers = pair.decode().receiver().peers();
  ASSERT_EQ(peers.size(), 1u);
  EXPECT_EQ(peers[0].incarnation, "prefill-incarntn");
  EXPECT_EQ(peers[0].transport, GetParam());
  EXPECT_NEAR(peers[0].probe_bytes_per_second, pair.sender().probe_bytes_per_second(), 1);
  EXPECT_FALSE(peers[0].suspect);
}

TEST_P(TransportContractTest, RevokeBeforeTheFirstUnitIsQuietAtOnce) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  const auto handoff = pair.decode().Reserve(64, 0, {3});
  EXPECT_TRUE(pair.decode().receiver().Revoke(handoff.reservation_id(), "test"));
  EXPECT_EQ(pair.decode().events_waiting(), 1u);
  EXPECT_EQ(pair.decode().NextEvent().kind, Kind::kQuiesced);
  EXPECT_FALSE(pair.decode().receiver().Revoke(handoff.reservation_id(), "again"));
  // The late sender is refused and has written nothing.
  const TransferId id = pair.Begin(handoff, 64, 0, {3});
  pair.sender().Push(id, 0, 1, 0, 3, Ids(0, 1));
  EXPECT_EQ(pair.NextResult().status.code(), absl::StatusCode::kNotFound);
  pair.ExpectLanded(64, 1, {0}, {3});
}

// Case 11.3: blocks are quiet only when the writer has said so (shm), or when we have stopped writing (tcp).
TEST_P(TransportContractTest, RevokedBlocksAreQuietOnlyWhenNobodyWritesThem) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  const auto handoff = pair.decode().Reserve(300, 0, Ids(0, 5));
  const TransferId id = pair.Begin(handoff, 300, 0, Ids(0, 5));
  pair.sender().Push(id, 0, 4, 0, 3, Ids(0, 5));
  const auto landed_before = pair.decode().Reserve(64, 1, {9});  // when this lands, the units before it are there
  pair.sender().Commit(pair.Begin(landed_before, 64, 1, {9}), {});
  EXPECT_EQ(pair.decode().NextEvent().kind, Kind::kLanded);
  EXPECT_TRUE(pair.NextResult().status.ok());

  pair.to_prefill().Hold();  // the Revoke is on its way
  EXPECT_TRUE(pair.decode().receiver().Revoke(handoff.reservation_id(), "client left"));
  EXPECT_EQ(pair.decode().events_waiting(), GetParam() == "shm" ? 0u : 1u);
  pair.to_prefill().LetGo();
  EXPECT_EQ(pair.decode().NextEvent().kind, Kind::kQuiesced);
  EXPECT_EQ(pair.NextResult().status.code(), absl::StatusCode::kCancelled);
  std::memset(pair.decode().pool().data(), 0xee, pair.decode().pool().size());
  pair.sender().Push(id, 4, 5, 0, 3, Ids(0, 5));  // too late: ignored
  const auto next = pair.decode().Reserve(64, 0, {20});
  const TransferId next_id = pair.Begin(next, 64, 0, {20});
  pair.sender().Push(next_id, 0, 1, 0, 3, Ids(7, 1));
  pair.sender().Commit(next_id, {});
  EXPECT_EQ(pair.decode().NextEvent().kind, Kind::kLanded);
  pair.ExpectLanded(64, 0, {7}, {20});
}

TEST_P(TransportContractTest, RevokeTwiceQuiescesOnce) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  const auto handoff = pair.decode().Reserve(64, 0, {3});
  pair.Begin(handoff, 64, 0, {3});
  pair.decode().receiver().Revoke(handoff.reservation_id(), "one");
  pair.decode().receiver().Revoke(handoff.reservation_id(), "two");
  EXPECT_EQ(pair.decode().NextEvent().kind, Kind::kQuiesced);
  EXPECT_FALSE(pair.NextResult().status.ok());
  EXPECT_EQ(pair.decode().events_waiting(), 0u);
  EXPECT_EQ(pair.results_waiting(), 0u);
}

TEST_P(TransportContractTest, AbortBySenderFailsBothSidesOnce) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  const auto handoff = pair.decode().Reserve(128, 0, {3, 4});
  const TransferId id = pair.Begin(handoff, 128, 0, {3, 4});
  pair.sender().Push(id, 0, 1, 0, 3, Ids(0, 2));
  pair.sender().Abort(id, "prompt too long");
  pair.sender().Abort(id, "again");
  EXPECT_EQ(pair.NextResult().status.code(), absl::StatusCode::kCancelled);
  const ReceiverEvent event = pair.decode().NextEvent();
  EXPECT_EQ(event.kind, Kind::kFailed);
  EXPECT_EQ(event.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(event.status.message()), HasSubstr("prompt too long"));
  EXPECT_FALSE(pair.decode().receiver().Revoke(handoff.reservation_id(), "late"));
  EXPECT_EQ(pair.results_waiting(), 0u);
}

TEST_P(TransportContractTest, ForgottenBlockIsFoundBeforeTheCommitIsSent) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  const auto handoff = pair.decode().Reserve(128, 0, {3, 4});
  const TransferId id = pair.Begin(handoff, 128, 0, {3, 4});
  pair.sender().Push(id, 0, 2, 0, 2, Ids(0, 2));
  pair.sender().Push(id, 0, 1, 2, 3, Ids(0, 2));
  pair.sender().Commit(id, {});
  EXPECT_EQ(pair.NextResult().status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(pair.decode().NextEvent().kind, Kind::kFailed);
}

TEST_P(TransportContractTest, BlockPushedTwiceIsDataLoss) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  const auto handoff = pair.decode().Reserve(128, 0, {3, 4});
  const TransferId id = pair.Begin(handoff, 128, 0, {3, 4});
  pair.sender().Push(id, 0, 2, 0, 2, Ids(0, 2));
  pair.sender().Push(id, 0, 2, 1, 2, Ids(0, 2));
  EXPECT_FALSE(pair.NextResult().status.ok());
  const ReceiverEvent event = pair.decode().NextEvent();
  EXPECT_EQ(event.kind, Kind::kFailed);
  EXPECT_EQ(event.status.code(), absl::StatusCode::kDataLoss);
}

TEST_P(TransportContractTest, StaleEpochAndGuessedIdAreRefused) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  worker::v1::Handoff handoff = pair.decode().Reserve(64, 0, {3});
  worker::v1::Handoff stale = handoff;
  stale.set_epoch(handoff.epoch() + 1);
  pair.Begin(stale, 64, 0, {3});
  EXPECT_EQ(pair.NextResult().status.code(), absl::StatusCode::kFailedPrecondition);
  worker::v1::Handoff guessed = handoff;
  guessed.set_reservation_id(handoff.reservation_id() ^ 1);
  pair.Begin(guessed, 64, 0, {3});
  EXPECT_EQ(pair.NextResult().status.code(), absl::StatusCode::kNotFound);
  worker::v1::Handoff restarted = handoff;
  restarted.set_decode_incarnation("another-incarnat");
  pair.Begin(restarted, 64, 0, {3});
  EXPECT_EQ(pair.NextResult().status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(pair.decode().events_waiting(), 0u) << "the reservation itself must be untouched";
}

TEST_P(TransportContractTest, TicketThatDiffersFromTheReservationIsRefused) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  const auto handoff = pair.decode().Reserve(64, 0, {3});
  const TransferId id = pair.Begin(handoff, 64, 0, {4});
  pair.sender().Push(id, 0, 1, 0, 3, Ids(0, 1));
  EXPECT_EQ(pair.NextResult().status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(pair.decode().NextEvent().kind, Kind::kFailed);
  pair.ExpectLanded(64, 1, {0}, {3});
}

TEST_P(TransportContractTest, EndOfTheSenderFailsItsHandovers) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  const auto handoff = pair.decode().Reserve(64, 0, {3});
  pair.Begin(handoff, 64, 0, {3});
  pair.to_decode().Hold();  // only the data connection's end tells
  pair.DestroySender();
  EXPECT_EQ(pair.NextResult().status.code(), absl::StatusCode::kCancelled);
  if (pair.decode().events_waiting() == 0) {
    // The Open may have been cut off: then nobody has ever written, and a Revoke is quiet at once.
    pair.decode().receiver().Revoke(handoff.reservation_id(), "test");
  }
  EXPECT_NE(pair.decode().NextEvent().kind, Kind::kLanded);
}

TEST_P(TransportContractTest, LostControlChannelEndsBothSides) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  const auto handoff = pair.decode().Reserve(300, 0, Ids(0, 5));
  const TransferId id = pair.Begin(handoff, 300, 0, Ids(0, 5));
  pair.sender().Push(id, 0, 4, 0, 3, Ids(0, 5));
  pair.decode().receiver().OnPeerGone(pair.session());
  pair.sender().OnPeerGone(absl::UnavailableError("stream broken"));
  EXPECT_EQ(pair.NextResult().status.code(), absl::StatusCode::kUnavailable);
  pair.decode().receiver().Revoke(handoff.reservation_id(), "in case it was never opened");
  EXPECT_NE(pair.decode().NextEvent().kind, Kind::kLanded);
  pair.Begin(handoff, 300, 0, Ids(0, 5));
  EXPECT_EQ(pair.NextResult().status.code(), absl::StatusCode::kUnavailable) << "a broken sender still answers";
}

TEST_P(TransportContractTest, EndOfTheReceiverEndsTheSendersHandovers) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  const auto handoff = pair.decode().Reserve(300, 0, Ids(0, 5));
  pair.Begin(handoff, 300, 0, Ids(0, 5));
  pair.to_decode().Connect(nullptr);
  pair.decode().DestroyReceiver();
  EXPECT_EQ(pair.NextResult().status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(pair.decode().NextEvent().kind, Kind::kFailed);
}

// Blocks of one hand-over after another in the same place, cancelled at random moments: what lands is always right.
TEST_P(TransportContractTest, ReusedBlocksNeverShowAStrangersBytes) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  std::mt19937 random(3);
  int landed = 0;
  for (int round = 0; round < 200; ++round) {
    std::memset(pair.decode().pool().data(), 0xee, pair.decode().pool().size());
    const auto ours = Ids(static_cast<int>(random() % 20), 4);
    const auto handoff = pair.decode().Reserve(250, 0, Ids(0, 4));
    const TransferId id = pair.Begin(handoff, 250, 0, Ids(0, 4));
    for (int layer = 0; layer < 3; ++layer) pair.sender().Push(id, 0, 4, layer, layer + 1, ours);
    if (random() % 4 == 0) pair.sender().Abort(id, "random");
    pair.sender().Commit(id, {});
    if (random() % 2 == 0) pair.decode().receiver().Revoke(handoff.reservation_id(), "random");
    const ReceiverEvent event = pair.decode().NextEvent();
    ASSERT_EQ(event.reservation_id, handoff.reservation_id());
    const TransferResult result = pair.NextResult();
    if (event.kind == Kind::kLanded) {
      ++landed;
      pair.ExpectLanded(250, 0, ours, Ids(0, 4));
    } else {
      EXPECT_FALSE(result.status.ok());
    }
  }
  EXPECT_GT(landed, 20);
}

// A peer that speaks the protocol by hand, and wrongly.
class RawPeer {
 public:
  explicit RawPeer(DecodeSide* decode) : decode_(decode) {
    worker::v1::Hello hello;
    hello.set_incarnation("raw");
    hello.set_role("prefill");
    *hello.mutable_fingerprint() = TestFingerprint(decode->layout());
    answer_ = *decode->receiver().OnPeerHello(hello, &link_, &session_);
    pool_ = *base::Buffer::Allocate(decode->layout().pool_bytes());
    std::memset(pool_.data(), 0x11, pool_.size());
  }
  ~RawPeer() { decode_->receiver().OnPeerGone(session_); }

  absl::Status Connect() {
    ConnectOptions options;
    options.pool = &pool_;
    options.layout = decode_->layout();
    options.timeout = kPatience;
    auto transport = ConnectTo(answer_.transports(0), options);
    if (!transport.ok()) return transport.status();
    transport_ = *std::move(transport);
    return absl::OkStatus();
  }
  GrantFrame Open(const worker::v1::Handoff& handoff) {
    transport_->Open({handoff.reservation_id(), handoff.epoch()});
    return std::get<GrantFrame>(NextReply());
  }
  // Sends the unit and waits until it has been consumed.
  void Put(const UnitFrame& unit, kv::BlockId block = 0) {
    const HandoffShape shape{64, 0};
    const std::vector<kv::BlockId> table(8, block);
    UnitRect rect = unit.rect;
    rect.layer_end = std::min<uint32_t>(rect.layer_end, 3);
    const auto ranges = RangesOf(rect, shape, decode_->layout(), table);
    transport_->Put(unit, ranges, ranges);
    NextReply();
  }
  UnitFrame Unit(const worker::v1::Handoff& handoff, uint32_t sequence, uint32_t layer) {
    UnitFrame unit;
    unit.reservation_id = handoff.reservation_id();
    unit.epoch = handoff.epoch();
    unit.sequence = sequence;
    unit.rect = {0, 1, layer, layer + 1, 0, 2};
    unit.bytes = BytesOf(unit.rect, {64, 0}, decode_->layout());
    return unit;
  }
  void Commit(const worker::v1::Handoff& handoff, uint32_t units, uint64_t bytes) {
    worker::v1::PeerMessage message;
    *message.mutable_commit()->mutable_handoff() = handoff;
    message.mutable_commit()->set_units_sent(units);
    message.mutable_commit()->set_bytes(bytes);
    decode_->receiver().OnMessage(session_, message);
  }
  void Quiesced(const worker::v1::Handoff& handoff) {
    worker::v1::PeerMessage message;
    *message.mutable_quiesced()->mutable_handoff() = handoff;
    decode_->receiver().OnMessage(session_, message);
  }
  PutTransport::Reply NextReply() {
    std::vector<PutTransport::Reply> replies;
    while (replies.empty()) {
      EXPECT_TRUE(transport_->Write().ok());
      const absl::Status status = transport_->Read(&replies);
      if (!status.ok()) {
        ADD_FAILURE() << status;
        return AckFrame{};
      }
    }
    return replies[0];
  }
  void HangUp() { transport_.reset(); }

  PutTransport& transport() { return *transport_; }
  const worker::v1::Hello& answer() const { return answer_; }
  MemoryLink& link() { return link_; }
  SessionId session() const { return session_; }

 private:
  DecodeSide* decode_;
  MemoryLink link_;
  SessionId session_ = 0;
  worker::v1::Hello answer_;
  base::Buffer pool_;
  std::unique_ptr<PutTransport> transport_;
};

class BadPeerTest : public ::testing::TestWithParam<std::string> {
 protected:
  BadPeerTest() : decode_(GetParam(), TestLayout(kv::KvFormat::kFp8, 16)), peer_(&decode_) {
    EXPECT_TRUE(peer_.Connect().ok());
  }
  uint64_t LayerBytes() const { return decode_.layout().payload_bytes(); }
  bool peer_writes() const { return GetParam() == "shm"; }
  // The event of a failed hand-over; a peer that writes itself must first say that it has stopped.
  ReceiverEvent NextFailure(const worker::v1::Handoff& handoff) {
    if (peer_writes()) {
      EXPECT_EQ(decode_.events_waiting(), 0u) << "the writer has not stopped yet";
      EXPECT_EQ(peer_.link().Count([](const auto& message) { return message.has_revoke(); }), 1);
      peer_.Quiesced(handoff);
    }
    ReceiverEvent event = decode_.NextEvent();
    EXPECT_EQ(event.kind, Kind::kFailed);
    return event;
  }

  DecodeSide decode_;
  RawPeer peer_;
};
INSTANTIATE_TEST_SUITE_P(All, BadPeerTest, ::testing::Values("shm", "tcp"),
                         [](const auto& info) { return info.param; });

TEST_P(BadPeerTest, MissingUnitNeverLands) {
  const auto handoff = decode_.Reserve(64, 0, {5});
  ASSERT_TRUE(peer_.Open(handoff).status.ok());
  peer_.Put(peer_.Unit(handoff, 0, 0), 5);
  peer_.Put(peer_.Unit(handoff, 1, 1), 5);
  peer_.Commit(handoff, 3, 3 * LayerBytes());  // the third is still on its way, as far as anyone knows
  EXPECT_EQ(decode_.events_waiting(), 0u);
  peer_.Put(peer_.Unit(handoff, 2, 2), 5);
  EXPECT_EQ(decode_.NextEvent().kind, Kind::kLanded);
}

TEST_P(BadPeerTest, CommitThatLeavesAUnitOutIsDataLoss) {
  const auto handoff = decode_.Reserve(64, 0, {5});
  ASSERT_TRUE(peer_.Open(handoff).status.ok());
  peer_.Put(peer_.Unit(handoff, 0, 0), 5);
  peer_.Put(peer_.Unit(handoff, 1, 1), 5);
  peer_.Commit(handoff, 2, 2 * LayerBytes());
  EXPECT_EQ(NextFailure(handoff).status.code(), absl::StatusCode::kDataLoss);
}

TEST_P(BadPeerTest, TotalsThatDisagreeAreDataLoss) {
  const auto handoff = decode_.Reserve(64, 0, {5});
  ASSERT_TRUE(peer_.Open(handoff).status.ok());
  for (uint32_t layer = 0; layer < 3; ++layer) peer_.Put(peer_.Unit(handoff, layer, layer), 5);
  peer_.Commit(handoff, 3, 3 * LayerBytes() - 1);
  EXPECT_EQ(NextFailure(handoff).status.code(), absl::StatusCode::kDataLoss);
}

TEST_P(BadPeerTest, DuplicateUnitIsDataLoss) {
  const auto handoff = decode_.Reserve(64, 0, {5});
  ASSERT_TRUE(peer_.Open(handoff).status.ok());
  peer_.Put(peer_.Unit(handoff, 0, 0), 5);
  peer_.Put(peer_.Unit(handoff, 1, 0), 5);
  EXPECT_EQ(NextFailure(handoff).status.code(), absl::StatusCode::kDataLoss);
}

TEST_P(BadPeerTest, UnitOutOfOrderIsDataLoss) {
  const auto handoff = decode_.Reserve(64, 0, {5});
  ASSERT_TRUE(peer_.Open(handoff).status.ok());
  peer_.Put(peer_.Unit(handoff, 1, 1), 5);
  EXPECT_EQ(NextFailure(handoff).status.code(), absl::StatusCode::kDataLoss);
}

TEST_P(BadPeerTest, WrongChecksumIsDataLoss) {
  const auto handoff = decode_.Reserve(64, 0, {5});
  ASSERT_TRUE(peer_.Open(handoff).status.ok());
  UnitFrame unit = peer_.Unit(handoff, 0, 0);
  unit.has_checksum = true;
  unit.checksum = 12345;
  peer_.Put(unit, 5);
  EXPECT_EQ(NextFailure(handoff).status.code(), absl::StatusCode::kDataLoss);
}

TEST_P(BadPeerTest, UnitOutsideOfItsReservationIsDataLoss) {
  const auto handoff = decode_.Reserve(64, 0, {5});
  ASSERT_TRUE(peer_.Open(handoff).status.ok());
  UnitFrame unit = peer_.Unit(handoff, 0, 0);
  unit.rect.layer_end = 9;
  peer_.transport().Put(unit, {{0, unit.bytes}}, {{decode_.layout().BlockOffset(0, 5), unit.bytes}});
  peer_.NextReply();
  EXPECT_EQ(NextFailure(handoff).status.code(), absl::StatusCode::kDataLoss);
}

TEST_P(BadPeerTest, UnitsOfOtherReservationsAreNotBelieved) {
  const auto opened_by_other = decode_.Reserve(64, 0, {5});
  RawPeer other(&decode_);
  ASSERT_TRUE(other.Connect().ok());
  ASSERT_TRUE(other.Open(opened_by_other).status.ok());
  EXPECT_EQ(peer_.Open(opened_by_other).status.code(), absl::StatusCode::kFailedPrecondition);
  const auto handoff = decode_.Reserve(64, 0, {6});
  ASSERT_TRUE(peer_.Open(handoff).status.ok());
  if (!peer_writes()) {  // a transport whose peer writes itself trusts it with the memory, but not with the account
    peer_.Put(peer_.Unit(opened_by_other, 0, 0), 5);
    UnitFrame stale = peer_.Unit(handoff, 0, 0);
    stale.epoch += 1;
    peer_.Put(stale, 6);
    for (size_t i = 0; i < decode_.pool().size(); ++i) ASSERT_EQ(decode_.pool().data()[i], 0xee);
  }
  for (uint32_t layer = 0; layer < 3; ++layer) peer_.Put(peer_.Unit(opened_by_other, layer, layer), 5);
  peer_.Commit(opened_by_other, 3, 3 * LayerBytes());
  EXPECT_EQ(decode_.events_waiting(), 0u);
  for (uint32_t layer = 0; layer < 3; ++layer) other.Put(other.Unit(opened_by_other, layer, layer), 5);
  other.Commit(opened_by_other, 3, 3 * LayerBytes());
  EXPECT_EQ(decode_.NextEvent().kind, Kind::kLanded);
}

TEST_P(BadPeerTest, CommitOfAnotherEpochOrOfNobodysReservationIsIgnored) {
  worker::v1::Handoff handoff = decode_.Reserve(64, 1, {5});  // nothing is missing
  worker::v1::Handoff stale = handoff;
  stale.set_epoch(stale.epoch() + 1);
  peer_.Commit(stale, 0, 0);
  peer_.Commit(handoff, 0, 0);  // not opened yet
  EXPECT_EQ(decode_.events_waiting(), 0u);
  ASSERT_TRUE(peer_.Open(handoff).status.ok());
  peer_.Commit(handoff, 0, 0);
  peer_.Commit(handoff, 0, 0);
  EXPECT_EQ(decode_.NextEvent().kind, Kind::kLanded);
  EXPECT_EQ(decode_.events_waiting(), 0u);
}

TEST_P(BadPeerTest, TokenIsUsedOnceAndCannotBeGuessed) {
  ConnectOptions options;
  base::Buffer pool = *base::Buffer::Allocate(decode_.layout().pool_bytes());
  options.pool = &pool;
  options.layout = decode_.layout();
  EXPECT_EQ(ConnectTo(peer_.answer().transports(0), options).status().code(), absl::StatusCode::kUnavailable);
  worker::v1::TransportEndpoint guessed = peer_.answer().transports(0);
  guessed.set_token(std::string(32, 'x'));
  EXPECT_EQ(ConnectTo(guessed, options).status().code(), absl::StatusCode::kUnavailable);
}

TEST_P(BadPeerTest, HangingUpFailsItsHandovers) {
  const auto handoff = decode_.Reserve(64, 0, {5});
  ASSERT_TRUE(peer_.Open(handoff).status.ok());
  peer_.Put(peer_.Unit(handoff, 0, 0), 5);
  peer_.HangUp();
  const ReceiverEvent event = decode_.NextEvent();
  EXPECT_EQ(event.kind, Kind::kFailed);
  EXPECT_EQ(event.status.code(), absl::StatusCode::kUnavailable);
}

// The control channel is gone, but the peer still holds the memory: only the end of its data connection frees the blocks.
TEST_P(BadPeerTest, PeerThatStillWritesKeepsItsBlocks) {
  const auto handoff = decode_.Reserve(64, 0, {5});
  ASSERT_TRUE(peer_.Open(handoff).status.ok());
  decode_.receiver().OnPeerGone(peer_.session());
  decode_.receiver().Revoke(handoff.reservation_id(), "client left");
  if (peer_writes()) {
    // Another session's hand-over lands meanwhile: the transfer thread has been round, and the blocks are still kept.
    RawPeer other(&decode_);
    ASSERT_TRUE(other.Connect().ok());
    const auto next = decode_.Reserve(64, 1, {7});
    ASSERT_TRUE(other.Open(next).status.ok());
    other.Commit(next, 0, 0);
    EXPECT_EQ(decode_.NextEvent().reservation_id, next.reservation_id());
    EXPECT_EQ(decode_.events_waiting(), 0u);
    peer_.HangUp();
  }
  const ReceiverEvent event = decode_.NextEvent();
  EXPECT_EQ(event.reservation_id, handoff.reservation_id());
  EXPECT_EQ(event.kind, Kind::kFailed);
}

TEST_P(BadPeerTest, NonsenseInTheStreamEndsTheSession) {
  const auto handoff = decode_.Reserve(64, 0, {5});
  ASSERT_TRUE(peer_.Open(handoff).status.ok());
  const std::string nonsense(64, 'z');
  ASSERT_TRUE(SendAll(peer_.transport().fd(), nonsense, kPatience).ok());
  if (peer_writes()) {  // we say that we are done with it; it must hang up
    std::vector<PutTransport::Reply> replies;
    while (peer_.transport().Read(&replies).ok()) {
    }
    EXPECT_EQ(decode_.events_waiting(), 0u);
    peer_.HangUp();
  }
  EXPECT_EQ(decode_.NextEvent().kind, Kind::kFailed);
  EXPECT_TRUE(peer_.link().closed());
}

// tcp only has units that are half there.
TEST(TcpTransportTest, RevokeInTheMiddleOfAUnitStopsTheWriting) {
  DecodeSide decode("tcp", TestLayout(kv::KvFormat::kFp8, 16));
  RawPeer peer(&decode);
  ASSERT_TRUE(peer.Connect().ok());
  const auto handoff = decode.Reserve(64, 0, {5});
  ASSERT_TRUE(peer.Open(handoff).status.ok());
  const UnitFrame unit = peer.Unit(handoff, 0, 0);
  const std::string half(unit.bytes / 2, '\x22');
  ASSERT_TRUE(SendAll(peer.transport().fd(), Encode(unit) + half, kPatience).ok());
  const uint8_t* end_of_half = decode.pool().data() + decode.layout().BlockOffset(0, 5) + half.size();
  // Until the half has been received; the pool is read while it is written, but only as whole bytes.
  while (__atomic_load_n(end_of_half - 1, __ATOMIC_RELAXED) != 0x22) {
  }
  EXPECT_TRUE(decode.receiver().Revoke(handoff.reservation_id(), "client left"));
  EXPECT_EQ(decode.NextEvent().kind, Kind::kQuiesced);
  ASSERT_TRUE(SendAll(peer.transport().fd(), half, kPatience).ok());
  EXPECT_EQ(std::get<AckFrame>(peer.NextReply()).sequence, 0u);
  for (size_t i = 0; i < half.size(); ++i) ASSERT_EQ(end_of_half[i], 0xee) << "written after quiesced";
}

TEST(TcpTransportTest, PeerThatDiesInTheMiddleOfAUnitFailsItsHandover) {
  DecodeSide decode("tcp", TestLayout(kv::KvFormat::kFp8, 16));
  RawPeer peer(&decode);
  ASSERT_TRUE(peer.Connect().ok());
  const auto handoff = decode.Reserve(64, 0, {5});
  ASSERT_TRUE(peer.Open(handoff).status.ok());
  ASSERT_TRUE(SendAll(peer.transport().fd(), Encode(peer.Unit(handoff, 0, 0)) + "part", kPatience).ok());
  peer.HangUp();
  const ReceiverEvent event = decode.NextEvent();
  EXPECT_EQ(event.kind, Kind::kFailed);
  EXPECT_EQ(event.status.code(), absl::StatusCode::kUnavailable);
}

TEST(ShmTransportTest, PathSocketIsPrivateAndRemoved) {
  const std::string dir = absl::StrCat(::testing::TempDir(), "/baton-shm-", getpid());
  base::Buffer pool = *base::Buffer::AllocateShared("test", 4096);
  ListenOptions options;
  options.pool = &pool;
  options.socket_dir = dir;
  auto listener = ListenOn("shm", options);
  ASSERT_TRUE(listener.ok()) << listener.status();
  const std::string path = (*listener)->address();
  EXPECT_EQ(access(path.c_str(), F_OK), 0);
  listener->reset();
  EXPECT_NE(access(path.c_str(), F_OK), 0);
  rmdir(dir.c_str());
}

TEST(ShmTransportTest, PrivateMemoryIsRefused) {
  base::Buffer pool = *base::Buffer::Allocate(4096);
  ListenOptions options;
  options.pool = &pool;
  EXPECT_EQ(ListenOn("shm", options).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(TransportFactoryTest, UnknownNameIsRefusedWithTheKnownOnes) {
  EXPECT_THAT(std::string(ListenOn("rdma", {}).status().message()), HasSubstr("accepted are shm, tcp"));
}

}  // namespace
}  // namespace baton::kvtransfer
