// Peers that are other processes, and peers that are stuck: what the end of a process proves, and
// what silence does not.

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvtransfer/data_connection.h"
#include "kvtransfer/transport.h"
#include "tests/unit/kvtransfer/handoff_pair.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;
using Kind = ReceiverEvent::Kind;

void SendBytes(int fd, const std::string& bytes) {
  const uint32_t size = static_cast<uint32_t>(bytes.size());
  ASSERT_EQ(write(fd, &size, sizeof(size)), static_cast<ssize_t>(sizeof(size)));
  ASSERT_EQ(write(fd, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
}

std::string ReceiveBytes(int fd) {
  uint32_t size = 0;
  if (read(fd, &size, sizeof(size)) != sizeof(size)) _exit(2);
  std::string bytes(size, '\0');
  if (read(fd, bytes.data(), size) != static_cast<ssize_t>(size)) _exit(2);
  return bytes;
}

// A prefill process that opens a hand-over, says so, and then writes and writes. Never returns.
[[noreturn]] void WriteUntilKilled(int from_test, int to_test) {
  worker::v1::TransportEndpoint endpoint;
  worker::v1::Handoff handoff;
  endpoint.ParseFromString(ReceiveBytes(from_test));
  handoff.ParseFromString(ReceiveBytes(from_test));
  ConnectOptions options;
  options.layout = TestLayout(kv::KvFormat::kFp8, 16);
  options.timeout = kPatience;
  TestPool pool(endpoint.name(), options.layout.pool_bytes());
  options.pool = pool.host();
  options.device_pool = pool.device();
  auto transport = ConnectTo(endpoint, options);
  if (!transport.ok()) _exit(3);
  (*transport)->Open({handoff.reservation_id(), handoff.epoch()});
  std::vector<PutTransport::Reply> replies;
  while (replies.empty()) {
    if (!(*transport)->Write().ok() || !(*transport)->Read(&replies).ok()) _exit(4);
  }
  UnitFrame unit;
  unit.reservation_id = handoff.reservation_id();
  unit.epoch = handoff.epoch();
  unit.rect = {0, 1, 0, 1, 0, 2};
  unit.bytes = BytesOf(unit.rect, {64, 0}, options.layout);
  const std::vector<ByteRange> to = RangesOf(unit.rect, {64, 0}, options.layout, {5});
  if (write(to_test, "o", 1) != 1) _exit(5);
  for (uint8_t value = 0;; ++value) {
    pool.Fill(value, unit.bytes);
    if (!(*transport)->busy()) (*transport)->Put(unit, {{0, unit.bytes}}, to);
    if (!PeerWrites(endpoint.name())) usleep(1000);
    if (!(*transport)->Write().ok()) pause();  // refused, but not gone
  }
}

class PeerProcessTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All,
                         PeerProcessTest,
                         ::testing::ValuesIn(CrossProcessTransports()),
                         [](const auto& info) { return info.param; });

// Cases 11.1 and 11.3: kill -9 in the middle of writing gives the blocks back, SIGSTOP does not
// while the process could still write.
TEST_P(PeerProcessTest, StoppedIsNotQuietAndKilledIs) {
  int to_child[2], from_child[2];
  ASSERT_EQ(pipe(to_child), 0);
  ASSERT_EQ(pipe(from_child), 0);
  const pid_t child = fork();
  if (child == 0) WriteUntilKilled(to_child[0], from_child[1]);

  DecodeSide decode(GetParam(), TestLayout(kv::KvFormat::kFp8, 16));
  MemoryLink link;
  worker::v1::Hello hello;
  hello.set_role("prefill");
  *hello.mutable_fingerprint() = TestFingerprint(decode.layout());
  SessionId session = 0;
  const auto answer = decode.receiver().OnPeerHello(hello, &link, &session);
  ASSERT_TRUE(answer.ok());
  const auto handoff = decode.Reserve(64, 0, {5});
  SendBytes(to_child[1], answer->transports(0).SerializeAsString());
  SendBytes(to_child[1], handoff.SerializeAsString());
  char opened = 0;
  ASSERT_EQ(read(from_child[0], &opened, 1), 1);

  ASSERT_EQ(kill(child, SIGSTOP), 0);
  int state = 0;
  ASSERT_EQ(waitpid(child, &state, WUNTRACED), child);
  ASSERT_TRUE(WIFSTOPPED(state));
  decode.receiver().Revoke(handoff.reservation_id(), "client left");
  decode.receiver().OnPeerGone(session);
  if (PeerWrites(GetParam())) {
    // The transfer thread has been round when another session's connection has been served and
    // refused.
    ConnectOptions options;
    TestPool pool(GetParam(), decode.layout().pool_bytes());
    options.pool = pool.host();
    options.device_pool = pool.device();
    options.layout = decode.layout();
    worker::v1::TransportEndpoint nobody = answer->transports(0);
    nobody.set_token("x");
    EXPECT_FALSE(ConnectTo(nobody, options).ok());
    EXPECT_EQ(decode.events_waiting(), 0u) << "a stopped process can still write";
  }
  ASSERT_EQ(kill(child, SIGKILL), 0);
  const ReceiverEvent event = decode.NextEvent();
  EXPECT_EQ(event.reservation_id, handoff.reservation_id());
  EXPECT_NE(event.kind, Kind::kLanded);
  const std::vector<uint8_t> at_event = decode.pool().Read();
  ASSERT_EQ(waitpid(child, &state, 0), child);
  EXPECT_TRUE(at_event == decode.pool().Read()) << "written after the event";
  for (int fd : {to_child[0], to_child[1], from_child[0], from_child[1]}) close(fd);
}

// A decode worker that grants and then neither reads nor answers.
class StuckDecode : private DataSink {
 public:
  StuckDecode(const std::string& transport, const kv::KvLayout& layout)
      : layout_(layout), pool_(transport, layout.pool_bytes()) {}
  worker::v1::Hello Start(const std::string& transport) {
    ListenOptions options;
    options.pool = pool_.host();
    options.device_pool = pool_.device();
    options.layout = layout_;
    options.tcp_host = "127.0.0.1";
    listener_ = *ListenOn(transport, options);
    worker::v1::Hello hello;
    hello.set_incarnation("stuck");
    *hello.mutable_fingerprint() = TestFingerprint(layout_);
    hello.add_transports()->set_name(transport);
    hello.mutable_transports(0)->set_address(listener_->address());
    thread_ = std::thread([this] { Serve(); });
    return hello;
  }
  ~StuckDecode() override {
    if (thread_.joinable()) thread_.join();
  }

 private:
  void Serve() {
    pollfd entry{listener_->fd(), POLLIN, 0};
    poll(&entry, 1, static_cast<int>(absl::ToInt64Milliseconds(kPatience)));
    DataSink* sink = this;
    connection_ = std::make_unique<DataConnection>(*listener_->Accept(), listener_.get(), sink,
                                                   pool_.host(), absl::ZeroDuration());
    while (!granted_) {
      entry = {connection_->fd(), POLLIN, 0};
      const timespec wait = absl::ToTimespec(std::min(kPatience, connection_->poll_interval()));
      ppoll(&entry, 1, &wait, nullptr);
      if (!connection_->OnReadable().ok() || !connection_->Advance().ok()) return;
    }
    // Stuck from now on; the connection stays open.
  }

  absl::StatusOr<uint64_t> Attach(const PutListener&, absl::string_view) override { return 1; }
  GrantFrame Open(uint64_t, const OpenFrame& open, const PutListener&) override {
    granted_ = true;
    GrantFrame grant;
    grant.reservation_id = open.reservation_id;
    grant.prompt_tokens = 16 * 64;
    for (kv::BlockId block = 0; block < 16; ++block) grant.blocks.push_back(block);
    return grant;
  }
  std::optional<std::vector<ByteRange>> BeginUnit(uint64_t, const UnitFrame&) override {
    return std::nullopt;
  }
  bool Wants(uint64_t) override { return false; }
  void EndUnit(const UnitFrame&, const absl::Status&) override {}
  void Report(uint64_t, double) override {}

  kv::KvLayout layout_;
  TestPool pool_;
  std::unique_ptr<PutListener> listener_;
  std::unique_ptr<DataConnection> connection_;
  bool granted_ = false;
  std::thread thread_;
};

class StuckPeerTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All,
                         StuckPeerTest,
                         ::testing::ValuesIn(TransportsUnderTest()),
                         [](const auto& info) { return info.param; });

// Case 11.2: prefill gets its blocks back when the decode worker hangs, whether a unit is half-way
// (tcp, nccl: more bytes than the way holds) or written and not acknowledged (shm, cuda_ipc).
TEST_P(StuckPeerTest, StallEndsTheTransferInBoundedTime) {
  const kv::KvLayout layout{.num_layers = 4,
                            .num_kv_heads = 2,
                            .head_dim = 1024,
                            .num_blocks = 16,
                            .format = kv::KvFormat::kBf16};
  StuckDecode decode(GetParam(), layout);
  TestPool pool(GetParam(), layout.pool_bytes());
  base::BoundedQueue<TransferResult> results(4);
  MemoryLink link;
  SenderOptions options;
  options.pool = pool.host();
  options.device_pool = pool.device();
  options.layout = layout;
  *options.hello.mutable_fingerprint() = TestFingerprint(layout);
  options.stall_timeout_min = absl::Milliseconds(100);
  auto sender = Sender::Create(options, decode.Start(GetParam()), &link);
  ASSERT_TRUE(sender.ok()) << sender.status();
  TransferSpec spec;
  spec.handoff.set_decode_incarnation("stuck");
  spec.handoff.set_reservation_id(1);
  spec.prompt_tokens = 16 * 64;
  for (kv::BlockId block = 0; block < 16; ++block) spec.peer_blocks.push_back(block);
  const std::vector<kv::BlockId> blocks = spec.peer_blocks;
  spec.on_done = [&](TransferResult result) { results.TryPush(std::move(result)); };
  const TransferId id = (*sender)->Begin(std::move(spec));
  (*sender)->Push(id, 0, 16, 0, 4, blocks);
  (*sender)->Commit(id, {});
  const auto result = results.PopFor(kPatience);
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(result->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(result->status.message()), HasSubstr("stalled"));
  sender->reset();
  EXPECT_EQ(results.size(), 0u);
}

TEST(HeartbeatTest, SilentPeerIsSuspectUntilItSpeaks) {
  base::FakeClock clock;
  const kv::KvLayout layout = TestLayout(kv::KvFormat::kFp8, 4);
  base::Buffer pool = *base::Buffer::AllocateShared("test", layout.pool_bytes());
  ReceiverOptions options;
  options.clock = &clock;
  options.pool = &pool;
  options.layout = layout;
  options.fingerprint = TestFingerprint(layout);
  options.transports = {"shm"};
  auto receiver = *Receiver::Create(options, [](ReceiverEvent) {});
  worker::v1::Hello hello;
  hello.set_role("prefill");
  *hello.mutable_fingerprint() = options.fingerprint;
  MemoryLink link;
  SessionId session = 0;
  ASSERT_TRUE(receiver->OnPeerHello(hello, &link, &session).ok());
  clock.Advance(absl::Milliseconds(2900));
  EXPECT_FALSE(receiver->peers().at(0).suspect);
  clock.Advance(absl::Milliseconds(200));
  EXPECT_TRUE(receiver->peers().at(0).suspect);
  worker::v1::PeerMessage heartbeat;
  heartbeat.mutable_heartbeat()->set_sequence(1);
  receiver->OnMessage(session, heartbeat);
  EXPECT_FALSE(receiver->peers().at(0).suspect);
  receiver->OnPeerGone(session);
  EXPECT_TRUE(receiver->peers().empty());
}

}  // namespace
}  // namespace baton::kvtransfer
