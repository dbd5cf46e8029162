// What the decode side does with peers that do not keep to the protocol, over each transport.

#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "kvtransfer/transport.h"
#include "tests/unit/kvtransfer/raw_peer.h"

namespace baton::kvtransfer {
namespace {

using Kind = ReceiverEvent::Kind;

class BadPeerTest : public ::testing::TestWithParam<std::string> {
 protected:
  BadPeerTest() : decode_(GetParam(), TestLayout(kv::KvFormat::kFp8, 16)), peer_(&decode_) {
    EXPECT_TRUE(peer_.Connect().ok());
  }
  uint64_t LayerBytes() const { return decode_.layout().payload_bytes(); }
  bool peer_writes() const { return PeerWrites(GetParam()); }
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
INSTANTIATE_TEST_SUITE_P(All,
                         BadPeerTest,
                         ::testing::ValuesIn(TransportsUnderTest()),
                         [](const auto& info) { return info.param; });

TEST_P(BadPeerTest, MissingUnitNeverLands) {
  const auto handoff = decode_.Reserve(64, 0, {5});
  ASSERT_TRUE(peer_.Open(handoff).status.ok());
  peer_.Put(peer_.Unit(handoff, 0, 0), 5);
  peer_.Put(peer_.Unit(handoff, 1, 1), 5);
  peer_.Commit(handoff, 3,
               3 * LayerBytes());  // the third is still on its way, as far as anyone knows
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
  peer_.transport().Put(unit, {{0, unit.bytes}},
                        {{decode_.layout().BlockOffset(0, 5), unit.bytes}});
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
  if (!peer_writes()) {  // a transport whose peer writes itself trusts it with the memory, but not
                         // with the account
    peer_.Put(peer_.Unit(opened_by_other, 0, 0), 5);
    UnitFrame stale = peer_.Unit(handoff, 0, 0);
    stale.epoch += 1;
    peer_.Put(stale, 6);
    ASSERT_TRUE(decode_.pool().Read() == std::vector<uint8_t>(decode_.pool().size(), 0xee));
  }
  for (uint32_t layer = 0; layer < 3; ++layer)
    peer_.Put(peer_.Unit(opened_by_other, layer, layer), 5);
  peer_.Commit(opened_by_other, 3, 3 * LayerBytes());
  EXPECT_EQ(decode_.events_waiting(), 0u);
  for (uint32_t layer = 0; layer < 3; ++layer)
    other.Put(other.Unit(opened_by_other, layer, layer), 5);
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
  TestPool pool(GetParam(), decode_.layout().pool_bytes());
  options.pool = pool.host();
  options.device_pool = pool.device();
  options.layout = decode_.layout();
  EXPECT_EQ(ConnectTo(peer_.answer().transports(0), options).status().code(),
            absl::StatusCode::kUnavailable);
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

// The control channel is gone, but the peer still holds the memory: only the end of its data
// connection frees the blocks.
TEST_P(BadPeerTest, PeerThatStillWritesKeepsItsBlocks) {
  const auto handoff = decode_.Reserve(64, 0, {5});
  ASSERT_TRUE(peer_.Open(handoff).status.ok());
  decode_.receiver().OnPeerGone(peer_.session());
  decode_.receiver().Revoke(handoff.reservation_id(), "client left");
  if (peer_writes()) {
    // Another session's hand-over lands meanwhile: the transfer thread has been round, and the
    // blocks are still kept.
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
  // Closed a moment after the event; a link that stays open ends in the test's time-out.
  while (!peer_.link().closed()) std::this_thread::yield();
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
  // Seen through a mapping of our own, as another process would.
  const base::Buffer view =
      *base::Buffer::MapShared(decode.pool().host()->fd(), decode.layout().pool_bytes());
  const uint8_t* end_of_half = view.data() + decode.layout().BlockOffset(0, 5) + half.size();
  while (__atomic_load_n(end_of_half - 1, __ATOMIC_RELAXED) != 0x22) {  // until it has arrived
  }
  EXPECT_TRUE(decode.receiver().Revoke(handoff.reservation_id(), "client left"));
  EXPECT_EQ(decode.NextEvent().kind, Kind::kQuiesced);
  ASSERT_TRUE(SendAll(peer.transport().fd(), half, kPatience).ok());
  EXPECT_EQ(std::get<AckFrame>(peer.NextReply()).sequence, 0u);
  for (size_t i = 0; i < half.size(); ++i)
    ASSERT_EQ(end_of_half[i], 0xee) << "written after quiesced";
}

TEST(TcpTransportTest, PeerThatDiesInTheMiddleOfAUnitFailsItsHandover) {
  DecodeSide decode("tcp", TestLayout(kv::KvFormat::kFp8, 16));
  RawPeer peer(&decode);
  ASSERT_TRUE(peer.Connect().ok());
  const auto handoff = decode.Reserve(64, 0, {5});
  ASSERT_TRUE(peer.Open(handoff).status.ok());
  ASSERT_TRUE(
      SendAll(peer.transport().fd(), Encode(peer.Unit(handoff, 0, 0)) + "part", kPatience).ok());
  peer.HangUp();
  const ReceiverEvent event = decode.NextEvent();
  EXPECT_EQ(event.kind, Kind::kFailed);
  EXPECT_EQ(event.status.code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace baton::kvtransfer
