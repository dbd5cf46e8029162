// What every transport promises between our own Sender and Receiver, run over each of them.

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "kvtransfer/socket.h"
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
INSTANTIATE_TEST_SUITE_P(All,
                         TransportContractTest,
                         ::testing::ValuesIn(TransportsUnderTest()),
                         [](const auto& info) { return info.param; });

class FormatContractTest : public ::testing::TestWithParam<std::tuple<std::string, kv::KvFormat>> {
};
INSTANTIATE_TEST_SUITE_P(All,
                         FormatContractTest,
                         ::testing::Combine(::testing::ValuesIn(TransportsUnderTest()),
                                            ::testing::Values(kv::KvFormat::kFp8,
                                                              kv::KvFormat::kFp8Dynamic,
                                                              kv::KvFormat::kBf16,
                                                              kv::KvFormat::kF32)),
                         [](const auto& info) {
                           return absl::StrCat(
                               std::get<0>(info.param), "_",
                               std::string(kv::KvFormatName(std::get<1>(info.param))));
                         });

void ExpectEveryLengthLands(const std::string& transport,
                            kv::KvFormat format,
                            const TestRanks& ranks) {
  HandoffPair pair(
      transport, format, [](auto* options) { options->checksums = true; }, ranks);
  for (const int prompt_tokens : {1, 2, 63, 64, 65, 128, 300}) {
    SCOPED_TRACE(prompt_tokens);
    pair.decode().pool().Fill(0xee);
    const int blocks = kv::BlocksFor(prompt_tokens);
    std::vector<kv::BlockId> ours, peers;
    for (int i = 0; i < blocks; ++i) {  // scattered differently on both sides
      ours.push_back((i * 7 + 3) % 24);
      peers.push_back((i * 11 + 5) % 32);
    }
    const auto handoff = pair.decode().Reserve(prompt_tokens, 0, peers);
    const TransferId id = pair.Begin(handoff, prompt_tokens, 0, peers);
    for (int layer = 0; layer < 3; ++layer)
      pair.sender().Push(id, 0, blocks, layer, layer + 1, ours);
    pair.sender().Commit(id, OneToken(42));
    const ReceiverEvent event = pair.decode().NextEvent();
    ASSERT_EQ(event.kind, Kind::kLanded) << event.status;
    EXPECT_EQ(event.reservation_id, handoff.reservation_id());
    ASSERT_EQ(event.first_tokens.size(), 1u);
    EXPECT_EQ(event.first_tokens[0].id(), 42u);
    EXPECT_EQ(event.transport, transport);
    const TransferResult result = pair.NextResult();
    EXPECT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.bytes, event.bytes);
    // A layer is a unit, or two: one for each rank that sends or receives.
    EXPECT_EQ(result.units_sent, 3u * std::max(ranks.prefill, ranks.decode));
    pair.ExpectLanded(prompt_tokens, 0, ours, peers);
  }
}

// Lengths around the block edges; only valid rows travel, only into the reserved blocks.
TEST_P(FormatContractTest, EveryPromptLengthLandsExactly) {
  ExpectEveryLengthLands(std::get<0>(GetParam()), std::get<1>(GetParam()), {});
}

TEST_P(FormatContractTest, EveryPromptLengthLandsExactlyWhateverTheRanks) {
  for (const TestRanks& ranks : {TestRanks{1, 2}, TestRanks{2, 1}, TestRanks{2, 2}}) {
    SCOPED_TRACE(absl::StrCat("tp ", ranks.prefill, " -> ", ranks.decode));
    ExpectEveryLengthLands(std::get<0>(GetParam()), std::get<1>(GetParam()), ranks);
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
      for (int block = 0; block < 4; ++block)
        pair.sender().Push(id, block, block + 1, layer, layer + 1, Ids(5 * i, 4));
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

// Case 11.3: blocks are quiet only when the writer has said so (shm, cuda_ipc), or when we have
// stopped writing (tcp, nccl).
TEST_P(TransportContractTest, RevokedBlocksAreQuietOnlyWhenNobodyWritesThem) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  const auto handoff = pair.decode().Reserve(300, 0, Ids(0, 5));
  const TransferId id = pair.Begin(handoff, 300, 0, Ids(0, 5));
  pair.sender().Push(id, 0, 4, 0, 3, Ids(0, 5));
  const auto landed_before =
      pair.decode().Reserve(64, 1, {9});  // when this lands, the units before it are there
  pair.sender().Commit(pair.Begin(landed_before, 64, 1, {9}), {});
  EXPECT_EQ(pair.decode().NextEvent().kind, Kind::kLanded);
  EXPECT_TRUE(pair.NextResult().status.ok());

  pair.to_prefill().Hold();  // the Revoke is on its way
  EXPECT_TRUE(pair.decode().receiver().Revoke(handoff.reservation_id(), "client left"));
  EXPECT_EQ(pair.decode().events_waiting(), PeerWrites(GetParam()) ? 0u : 1u);
  pair.to_prefill().LetGo();
  EXPECT_EQ(pair.decode().NextEvent().kind, Kind::kQuiesced);
  EXPECT_EQ(pair.NextResult().status.code(), absl::StatusCode::kCancelled);
  pair.decode().pool().Fill(0xee);
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
  EXPECT_EQ(pair.NextResult().status.code(), absl::StatusCode::kUnavailable)
      << "a broken sender still answers";
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

// Blocks of one hand-over after another in the same place, cancelled at random moments: what lands
// is always right.
TEST_P(TransportContractTest, ReusedBlocksNeverShowAStrangersBytes) {
  HandoffPair pair(GetParam(), kv::KvFormat::kFp8);
  std::mt19937 random(3);
  int landed = 0;
  for (int round = 0; round < 200; ++round) {
    pair.decode().pool().Fill(0xee);
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

TEST(ShmTransportTest, AFolderOfOthersIsRefused) {
  const std::string dir = absl::StrCat(::testing::TempDir(), "/baton-open-", getpid());
  base::Buffer pool = *base::Buffer::AllocateShared("test", 4096);
  ListenOptions options;
  options.pool = &pool;
  options.socket_dir = dir;
  ASSERT_EQ(mkdir(dir.c_str(), 0700), 0);
  EXPECT_TRUE(ListenOn("shm", options).ok());
  ASSERT_EQ(chmod(dir.c_str(), 0750), 0);
  EXPECT_EQ(ListenOn("shm", options).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_EQ(chmod(dir.c_str(), 0700), 0);
  options.socket_dir = dir + "-link";
  ASSERT_EQ(symlink(dir.c_str(), options.socket_dir.c_str()), 0);
  EXPECT_EQ(ListenOn("shm", options).status().code(), absl::StatusCode::kFailedPrecondition);
  unlink(options.socket_dir.c_str());
  rmdir(dir.c_str());
}

TEST(ShmTransportTest, TheOtherEndMustBeTheSameUser) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  EXPECT_TRUE(CheckSameUser(ends[0]).ok());
  if (geteuid() == 0) {
    // The socket's other end remembers who made it.
    const auto listener = ListenUnix(absl::StrCat("@baton-test-", getpid()));
    ASSERT_TRUE(listener.ok()) << listener.status();
    const pid_t child = fork();
    if (child == 0) {
      const bool connected =
          setuid(65534) == 0 &&
          ConnectUnix(absl::StrCat("@baton-test-", getppid()), absl::Seconds(20)).ok();
      _exit(connected ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0);
    const auto accepted = AcceptSocket(listener->get());
    ASSERT_TRUE(accepted.ok()) << accepted.status();
    EXPECT_EQ(CheckSameUser(accepted->get()).code(), absl::StatusCode::kFailedPrecondition);
  }
  close(ends[0]);
  close(ends[1]);
}

TEST(ShmTransportTest, PrivateMemoryIsRefused) {
  base::Buffer pool = *base::Buffer::Allocate(4096);
  ListenOptions options;
  options.pool = &pool;
  EXPECT_EQ(ListenOn("shm", options).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(TransportFactoryTest, UnknownNameIsRefusedWithTheKnownOnes) {
  EXPECT_THAT(std::string(ListenOn("rdma", {}).status().message()),
              HasSubstr("accepted are cuda_ipc, nccl, shm, tcp"));
}

}  // namespace
}  // namespace baton::kvtransfer
