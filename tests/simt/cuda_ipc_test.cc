// What is particular to memory of devices: how it is named, who may open it, and when its writer is
// quiet. (The contract of all transports: tests/unit/kvtransfer, compiled into this program too.)

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvtransfer/device_memory.h"
#include "kvtransfer/private_socket.h"
#include "kvtransfer/transport.h"
#include "tests/simt/device_memory.h"
#include "tests/simt/fake_cudart.h"
#include "tests/unit/kvtransfer/handoff_pair.h"

namespace baton::kvtransfer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Kind = ReceiverEvent::Kind;
using simt::GetRuntimeConfig;

size_t OpenDescriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

size_t Mappings() {
  size_t count = 0;
  FILE* maps = fopen("/proc/self/maps", "r");
  char line[512];
  while (fgets(line, sizeof(line), maps) != nullptr)
    count += strstr(line, "baton-emulated-device") != nullptr;
  fclose(maps);
  return count;
}

class CudaIpcTest : public ::testing::Test {
 protected:
  ~CudaIpcTest() override { GetRuntimeConfig() = saved_; }

  absl::Status Open(const ExportedMemory& exported, size_t need = 4096) {
    const base::CudaDevice device = *base::CudaDevice::Open(0);
    return ImportedMemory::Open(device, exported.entry, &exported.descriptor, need).status();
  }

  const simt::RuntimeConfig saved_ = GetRuntimeConfig();
};

std::string Refusal(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  return std::string(status.message());
}

TEST_F(CudaIpcTest, MemoryIsNamedByDescriptorWhereTheDeviceCan) {
  TestPool pool("cuda_ipc", 10000);
  const ExportedMemory exported = *ExportMemory(pool.device()->data() + 512, 1000);
  EXPECT_EQ(exported.entry.method, DeviceMemoryEntry::kDescriptor);
  EXPECT_TRUE(exported.descriptor.valid());
  EXPECT_EQ(exported.entry.offset, 512u);
  EXPECT_EQ(exported.entry.allocation_bytes, size_t{2} << 20) << "whole granules";
  EXPECT_TRUE(Open(exported, 1000).ok());
}

TEST_F(CudaIpcTest, MemoryWithoutADescriptorHasALegacyHandleThatNamesItsAllocation) {
  TestPool pool(kLegacyIpc, 10000);
  const ExportedMemory exported = *ExportMemory(pool.device()->data() + 512, 1000);
  EXPECT_EQ(exported.entry.method, DeviceMemoryEntry::kLegacyHandle);
  EXPECT_FALSE(exported.descriptor.valid());
  EXPECT_EQ(exported.entry.offset, 512u);
  // Only another process may open it.
  EXPECT_THAT(Refusal(Open(exported, 1000)),
              AllOf(HasSubstr("CUDA_ERROR_INVALID_CONTEXT"), HasSubstr("PID namespace")));
}

TEST_F(CudaIpcTest, HostMemoryIsRefused) {
  base::Buffer pool = *base::Buffer::AllocateShared("host", 4096);
  EXPECT_THAT(Refusal(ExportMemory(pool.data(), 4096).status()), HasSubstr("not lie on a device"));
  ListenOptions options;
  options.pool = &pool;
  EXPECT_THAT(Refusal(ListenOn("cuda_ipc", options).status()), HasSubstr("on a device"));
  EXPECT_THAT(Refusal(ConnectTo(
                          [] {
                            worker::v1::TransportEndpoint endpoint;
                            endpoint.set_name("cuda_ipc");
                            return endpoint;
                          }(),
                          {})
                          .status()),
              HasSubstr("on a device"));
}

// Case 16.4: other visible devices than the decode worker's.
TEST_F(CudaIpcTest, ADeviceThatIsNotVisibleIsRefusedByName) {
  TestPool pool("cuda_ipc", 4096);
  const ExportedMemory exported = *ExportMemory(pool.device()->data(), 4096);
  GetRuntimeConfig().device_number = 3;
  EXPECT_THAT(Refusal(Open(exported)),
              AllOf(HasSubstr("GPU-656d756c-6174-6564-0000-000000000000 is not visible here"),
                    HasSubstr("visible: GPU-656d756c-6174-6564-0000-000000000003")));
}

// Case 16.4: mismatched device order. The second of our devices is the decode worker's.
TEST_F(CudaIpcTest, AnotherDeviceIsOpenedOnlyWithPeerAccess) {
  TestPool pool("cuda_ipc", 4096);
  ExportedMemory exported = *ExportMemory(pool.device()->data(), 4096);
  exported.entry.uuid[15] = 1;
  GetRuntimeConfig().num_devices = 2;
  EXPECT_TRUE(Open(exported).ok());
  GetRuntimeConfig().peer_access = false;
  EXPECT_THAT(Refusal(Open(exported)), HasSubstr("has no peer access"));
}

TEST_F(CudaIpcTest, RefusedImportsAreRefusalsAndNothingLeaks) {
  TestPool pool("cuda_ipc", 4096);
  ExportedMemory exported = *ExportMemory(pool.device()->data(), 4096);
  const size_t descriptors = OpenDescriptors(), mappings = Mappings();
  {
    ExportedMemory other = {exported.entry, UniqueFd(open("/dev/zero", O_RDWR))};
    EXPECT_THAT(Refusal(Open(other)), HasSubstr("import device memory"));
    ExportedMemory none = {exported.entry, UniqueFd()};
    EXPECT_EQ(Open(none).code(), absl::StatusCode::kInvalidArgument);
    ExportedMemory longer = {exported.entry, UniqueFd(dup(exported.descriptor.get()))};
    longer.entry.allocation_bytes *= 2;  // more than there is: the driver does not map it
    EXPECT_THAT(Refusal(Open(longer)), HasSubstr("map device memory"));
    ExportedMemory beyond = {exported.entry, UniqueFd(dup(exported.descriptor.get()))};
    beyond.entry.offset = beyond.entry.allocation_bytes - 100;
    EXPECT_EQ(Open(beyond).code(), absl::StatusCode::kInvalidArgument);
    beyond.entry.offset = UINT64_MAX - 100;
    EXPECT_EQ(Open(beyond).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(Open(exported, 5000).code(), absl::StatusCode::kInvalidArgument) << "too small";
  }
  EXPECT_EQ(OpenDescriptors(), descriptors);
  EXPECT_EQ(Mappings(), mappings);
}

TEST_F(CudaIpcTest, AnEndedPairLeavesNothingBehind) {
  { HandoffPair once("cuda_ipc", kv::KvFormat::kFp8); }
  const size_t descriptors = OpenDescriptors(), mappings = Mappings();
  for (int i = 0; i < 3; ++i) HandoffPair pair("cuda_ipc", kv::KvFormat::kFp8);
  EXPECT_EQ(OpenDescriptors(), descriptors);
  EXPECT_EQ(Mappings(), mappings);
}

// A unit is announced when the device has copied it, not when it was told to.
TEST_F(CudaIpcTest, LazyStreamsChangeNothingThatLands) {
  GetRuntimeConfig().lazy = true;
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    GetRuntimeConfig().seed = seed;
    HandoffPair("cuda_ipc", kv::KvFormat::kFp8).ExpectThreeBlocksLand();
  }
}

TEST_F(CudaIpcTest, DamageIsFoundByChecksumsOfDeviceMemory) {
  HandoffPair pair("cuda_ipc", kv::KvFormat::kFp8, [](SenderOptions* o) { o->checksums = true; });
  const auto handoff = pair.decode().Reserve(64, 0, {5});
  const TransferId id = pair.Begin(handoff, 64, 0, {5});
  pair.sender().Push(id, 0, 1, 0, 3, std::vector<kv::BlockId>{2});
  pair.sender().Commit(id, {});
  EXPECT_EQ(pair.decode().NextEvent().kind, Kind::kLanded);
}

// A peer that speaks by hand and does not say farewell.
class SilentPeer {
 public:
  explicit SilentPeer(DecodeSide* decode) {
    worker::v1::Hello hello;
    hello.set_role("prefill");
    *hello.mutable_fingerprint() = TestFingerprint(decode->layout());
    const worker::v1::Hello answer = *decode->receiver().OnPeerHello(hello, &link_, &session_);
    socket_ = *ConnectPrivate(answer.transports(0).address(), kPatience);
    Send(Encode(AttachFrame{answer.transports(0).token()}));
    std::vector<UniqueFd> descriptors;
    EXPECT_TRUE(ParseWelcome(*ReceiveFrame(socket_.get(), kPatience, &descriptors)).ok());
    EXPECT_TRUE(ParseDeviceMemory(*ReceiveFrame(socket_.get(), kPatience, &descriptors)).ok());
    EXPECT_EQ(descriptors.size(), 2u);
  }
  GrantFrame Open(const worker::v1::Handoff& handoff) {
    Send(Encode(OpenFrame{handoff.reservation_id(), handoff.epoch()}));
    return *ParseGrant(*ReceiveFrame(socket_.get(), kPatience, nullptr));
  }
  void Send(const std::string& bytes) {
    EXPECT_TRUE(SendAll(socket_.get(), bytes, kPatience).ok());
  }
  void HangUp() { socket_.Reset(); }
  bool closed() const { return link_.closed(); }

 private:
  MemoryLink link_;
  SessionId session_ = 0;
  UniqueFd socket_;
};

// When something has landed on another session, the transfer thread has been round.
void GoRound(DecodeSide* decode) {
  SilentPeer other(decode);
  const auto handoff = decode->Reserve(64, 0, {0});
  EXPECT_TRUE(other.Open(handoff).status.ok());
  other.Send(EncodeFarewell());
  other.HangUp();
  const ReceiverEvent event = decode->NextEvent();
  EXPECT_EQ(event.reservation_id, handoff.reservation_id());
}

// A put that is under way cannot be called back: blocks stay quarantined until its writer has said
// farewell, or its process has ended.
TEST_F(CudaIpcTest, TheEndOfTheSocketIsNoProofWhileTheProcessLives) {
  DecodeSide decode("cuda_ipc", TestLayout(kv::KvFormat::kFp8, 16));
  SilentPeer peer(&decode);
  const auto handoff = decode.Reserve(64, 0, {5});
  ASSERT_TRUE(peer.Open(handoff).status.ok());
  peer.HangUp();
  decode.receiver().Revoke(handoff.reservation_id(), "client left");
  GoRound(&decode);
  EXPECT_TRUE(peer.closed()) << "its control channel is of no use any more";
  EXPECT_EQ(decode.events_waiting(), 0u) << "this process lives, so its device may go on writing";
  decode.DestroyReceiver();
  EXPECT_EQ(decode.NextEvent().kind, Kind::kFailed);
}

TEST_F(CudaIpcTest, AFarewellIsProof) {
  DecodeSide decode("cuda_ipc", TestLayout(kv::KvFormat::kFp8, 16));
  SilentPeer peer(&decode);
  const auto handoff = decode.Reserve(64, 0, {5});
  ASSERT_TRUE(peer.Open(handoff).status.ok());
  peer.Send(EncodeFarewell());
  peer.HangUp();
  EXPECT_EQ(decode.NextEvent().reservation_id, handoff.reservation_id());
}

// As when a worker is told to go away and answers in good order after its copies have ended.
TEST_F(CudaIpcTest, AFarewellIsHeardOnAConnectionThatWasShut) {
  DecodeSide decode("cuda_ipc", TestLayout(kv::KvFormat::kFp8, 16));
  SilentPeer peer(&decode);
  const auto handoff = decode.Reserve(64, 0, {5});
  ASSERT_TRUE(peer.Open(handoff).status.ok());
  peer.Send(Encode(WelcomeFrame{}));  // nonsense
  GoRound(&decode);
  EXPECT_EQ(decode.events_waiting(), 0u);
  peer.Send(EncodeFarewell());
  peer.HangUp();
  EXPECT_EQ(decode.NextEvent().reservation_id, handoff.reservation_id());
}

// The transport that does not do is left for the next one in the same session (case 16.4).
TEST_F(CudaIpcTest, ARefusedImportFallsBackOrIsRefused) {
  const kv::KvLayout layout = TestLayout(kv::KvFormat::kFp8, 16);
  TestPool device("cuda_ipc", layout.pool_bytes()), host("shm", layout.pool_bytes());
  ReceiverOptions receive;
  receive.pool = host.host();
  receive.device_pool = device.device();
  receive.layout = layout;
  receive.fingerprint = TestFingerprint(layout);
  receive.transports = {"cuda_ipc", "shm", "tcp"};
  auto receiver = *Receiver::Create(receive, [](ReceiverEvent) {});
  SenderOptions send;
  send.pool = host.host();
  send.device_pool = device.device();
  send.layout = layout;
  send.hello.set_role("prefill");
  *send.hello.mutable_fingerprint() = receive.fingerprint;
  GetRuntimeConfig().device_number = 3;  // from now on: the receiver has described its own
  MemoryLink link;
  SessionId session = 0;
  {
    auto sender = Sender::Create(send, *receiver->OnPeerHello(send.hello, &link, &session), &link);
    ASSERT_TRUE(sender.ok()) << sender.status();
    EXPECT_EQ((*sender)->transport_name(), "shm");
    EXPECT_FALSE(link.closed()) << "the session goes on";
    receiver->OnPeerGone(session);
  }
  send.required_transport = "cuda_ipc";
  const absl::Status refused =
      Sender::Create(send, *receiver->OnPeerHello(send.hello, &link, &session), &link).status();
  EXPECT_THAT(Refusal(refused),
              AllOf(HasSubstr("is not visible here"),
                    HasSubstr("prefill offers cuda_ipc, nccl, shm, tcp and requires cuda_ipc"),
                    HasSubstr("decode offers cuda_ipc, shm, tcp")));
  receiver->OnPeerGone(session);
}

TEST_F(CudaIpcTest, WithoutADriverThatCanTheDecodeWorkerOffersTheRest) {
  const kv::KvLayout layout = TestLayout(kv::KvFormat::kFp8, 16);
  TestPool host("shm", layout.pool_bytes());
  base::Buffer no_device = *base::Buffer::Allocate(layout.pool_bytes());
  ReceiverOptions receive;
  receive.pool = host.host();
  receive.device_pool = &no_device;  // the driver does not know it
  receive.layout = layout;
  receive.fingerprint = TestFingerprint(layout);
  receive.transports = {"cuda_ipc", "shm"};
  auto receiver = Receiver::Create(receive, [](ReceiverEvent) {});
  ASSERT_TRUE(receiver.ok()) << receiver.status();
  worker::v1::Hello hello;
  hello.set_role("prefill");
  *hello.mutable_fingerprint() = receive.fingerprint;
  MemoryLink link;
  SessionId session = 0;
  const auto answer = (*receiver)->OnPeerHello(hello, &link, &session);
  ASSERT_EQ(answer->transports_size(), 1);
  EXPECT_EQ(answer->transports(0).name(), "shm");
  (*receiver)->OnPeerGone(session);
  receive.required_transport = "cuda_ipc";
  EXPECT_THAT(Refusal(Receiver::Create(receive, [](ReceiverEvent) {}).status()),
              HasSubstr("not lie on a device"));
}

}  // namespace
}  // namespace baton::kvtransfer
