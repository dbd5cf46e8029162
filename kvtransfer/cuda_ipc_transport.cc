// Memory of devices on one machine. The decode worker's pool lies on its device; a description of
// it goes, over a private Unix socket, to the session that presents its token: a file descriptor of
// the physical memory, or a legacy handle where it has none. The prefill worker maps it, lets its
// device copy and announces a unit on the socket when the copies have ended.
//
// A device goes on copying by itself, so here the end of the socket proves nothing: a prefill
// worker that ends the connection waits for its copies and says so (farewell); one that dies is
// quiet when its process has ended, which the kernel reports after the driver has taken its
// channels down.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "kvtransfer/device_memory.h"
#include "kvtransfer/private_socket.h"
#include "kvtransfer/stream_put.h"
#include "kvtransfer/transport_terms.h"

namespace baton::kvtransfer {
namespace {

constexpr absl::Duration kPollInterval = absl::Microseconds(50);
constexpr absl::Duration kFarewellTimeout = absl::Milliseconds(200);

class CudaIpcListener : public PutListener {
 public:
  explicit CudaIpcListener(const ListenOptions& options)
      : pool_(*options.device_pool), layout_(options.layout) {}

  absl::Status Listen(const std::string& socket_dir) {
    BATON_ASSIGN_OR_RETURN(DeviceCopier copier, DeviceCopier::Create(pool_.data()));
    copier_.emplace(std::move(copier));
    BATON_ASSIGN_OR_RETURN(exported_pool_, ExportMemory(pool_.data(), layout_.pool_bytes()));
    // Peers may fill it with anything. Shared the way the pool is, as that is what probes are for.
    const auto allocate = exported_pool_.entry.method == DeviceMemoryEntry::kDescriptor
                              ? &base::AllocateExportable
                              : &base::AllocateOnDevice;
    BATON_ASSIGN_OR_RETURN(probe_area_, allocate(copier_->device().ordinal(), kProbeBytes));
    BATON_ASSIGN_OR_RETURN(exported_probe_, ExportMemory(probe_area_.data(), kProbeBytes));
    return socket_.Listen(socket_dir);
  }

  absl::string_view name() const override { return kCudaIpc; }
  std::string address() const override { return socket_.address(); }
  bool peer_writes() const override { return true; }
  bool writes_outlive_socket() const override { return true; }
  int fd() const override { return socket_.fd(); }

  absl::StatusOr<UniqueFd> Accept() override {
    BATON_ASSIGN_OR_RETURN(UniqueFd fd, socket_.Accept());
    BATON_RETURN_IF_ERROR(PeerProcess(fd.get()).status());
    return fd;
  }

  absl::Status Welcome(int fd) override {
    const DeviceMemoryFrame memory{exported_pool_.entry, exported_probe_.entry};
    std::vector<int> descriptors;
    for (const ExportedMemory* exported : {&exported_pool_, &exported_probe_}) {
      if (exported->descriptor.valid()) descriptors.push_back(exported->descriptor.get());
    }
    return SendWithDescriptors(fd, Encode(WelcomeOf(layout_)) + Encode(memory), descriptors);
  }

  absl::StatusOr<uint64_t> Checksum(const base::Buffer*,
                                    absl::Span<const ByteRange> ranges) override {
    return copier_->ChecksumOf(pool_.data(), ranges);
  }

 private:
  const base::Buffer& pool_;
  const kv::KvLayout layout_;
  std::optional<DeviceCopier> copier_;
  base::Buffer probe_area_;
  ExportedMemory exported_pool_, exported_probe_;
  PrivateSocket socket_;
};

class CudaIpcPut : public StreamPut {
 public:
  absl::Status Connect(const worker::v1::TransportEndpoint& endpoint,
                       const ConnectOptions& options) {
    pool_ = options.device_pool;
    BATON_ASSIGN_OR_RETURN(DeviceCopier copier, DeviceCopier::Create(pool_->data()));
    BATON_ASSIGN_OR_RETURN(UniqueFd fd, ConnectPrivate(endpoint.address(), options.timeout));
    std::vector<UniqueFd> descriptors;
    BATON_RETURN_IF_ERROR(Attach(std::move(fd), endpoint.token(), options, &descriptors));
    BATON_ASSIGN_OR_RETURN(const Frame answer,
                           ReceiveFrame(this->fd(), options.timeout, &descriptors));
    BATON_ASSIGN_OR_RETURN(const DeviceMemoryFrame memory, ParseDeviceMemory(answer));
    BATON_RETURN_IF_ERROR(Import(copier.device(), memory, descriptors));
    copier_.emplace(std::move(copier));
    return absl::OkStatus();
  }

  // Nothing of ours is read and nothing of the peer's written once this has returned.
  ~CudaIpcPut() override {
    if (!copier_.has_value()) return;
    absl::Status quiet = copier_->Wait();
    // The peer waits for the end of this process if it does not get to hear it.
    if (quiet.ok()) quiet = SendRest(EncodeFarewell(), kFarewellTimeout);
    if (!quiet.ok())
      BATON_LOG(Info, "no farewell to the decode worker ", LogField("reason", quiet.message()));
  }

  absl::string_view name() const override { return kCudaIpc; }

  void Put(const UnitFrame& unit,
           absl::Span<const ByteRange> from,
           absl::Span<const ByteRange> to) override {
    failure_.Update(copier_->CopyRanges(pool_->data(), from, peer_pool_.data(), to));
    announce_ = Encode(unit);
  }
  bool busy() const override { return !announce_.empty(); }

  absl::StatusOr<size_t> Write() override {
    if (!announce_.empty()) {
      BATON_RETURN_IF_ERROR(failure_);
      absl::StatusOr<bool> idle = copier_->Idle();
      if (!idle.ok()) failure_ = absl::UnavailableError(idle.status().message());
      BATON_RETURN_IF_ERROR(failure_);
      if (*idle) Queue(std::exchange(announce_, ""));
    }
    return StreamPut::Write();
  }
  absl::Duration poll_interval() const override {
    return busy() ? kPollInterval : absl::InfiniteDuration();
  }

  absl::StatusOr<uint64_t> Checksum(const base::Buffer*,
                                    absl::Span<const ByteRange> ranges) override {
    return copier_->ChecksumOf(pool_->data(), ranges);
  }

 protected:
  absl::Status MoveProbe(absl::Span<const uint8_t> bytes, absl::Duration timeout) override {
    const ByteRange all{0, kProbeBytes};
    BATON_RETURN_IF_ERROR(
        copier_->CopyRanges(probe_source_.data(), {all}, peer_probe_.data(), {all}));
    BATON_RETURN_IF_ERROR(copier_->Wait());
    return SendAll(fd(), Encode(ProbeFrame{bytes.size()}), timeout);
  }

 private:
  absl::Status Import(const base::CudaDevice& device,
                      const DeviceMemoryFrame& memory,
                      const std::vector<UniqueFd>& descriptors) {
    const auto descriptor = [&](size_t i) {
      return i < descriptors.size() ? &descriptors[i] : nullptr;
    };
    BATON_ASSIGN_OR_RETURN(peer_pool_, ImportedMemory::Open(device, memory.pool, descriptor(0),
                                                            peer_layout().pool_bytes()));
    const size_t before = memory.pool.method == DeviceMemoryEntry::kDescriptor ? 1 : 0;
    BATON_ASSIGN_OR_RETURN(
        peer_probe_, ImportedMemory::Open(device, memory.probe, descriptor(before), kProbeBytes));
    BATON_ASSIGN_OR_RETURN(probe_source_, base::AllocateOnDevice(device.ordinal(), kProbeBytes));
    return absl::OkStatus();
  }

  const base::Buffer* pool_ = nullptr;
  std::optional<DeviceCopier> copier_;  // goes last: what follows is mapped in its context
  ImportedMemory peer_pool_, peer_probe_;
  base::Buffer probe_source_;
  std::string announce_;  // the unit whose copies are under way; empty: none
  absl::Status failure_;
};

absl::Status NoDevicePool() {
  return absl::FailedPreconditionError(
      "cuda_ipc transport: the KV pool does not lie on a device (--device)");
}

}  // namespace

absl::StatusOr<std::unique_ptr<PutListener>> ListenCudaIpc(const ListenOptions& options) {
  if (options.device_pool == nullptr) return NoDevicePool();
  auto listener = std::make_unique<CudaIpcListener>(options);
  BATON_RETURN_IF_ERROR(listener->Listen(options.socket_dir));
  return listener;
}

absl::StatusOr<std::unique_ptr<PutTransport>> ConnectCudaIpc(
    const worker::v1::TransportEndpoint& endpoint, const ConnectOptions& options) {
  if (options.device_pool == nullptr) return NoDevicePool();
  auto transport = std::make_unique<CudaIpcPut>();
  BATON_RETURN_IF_ERROR(transport->Connect(endpoint, options));
  return transport;
}

}  // namespace baton::kvtransfer
