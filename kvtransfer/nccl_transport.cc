// From device to device over NCCL: between hosts (InfiniBand, RoCE, TCP) and between containers
// that share neither memory nor PIDs. Frames go over a TCP socket; on a communicator of the two
// workers alone the prefill worker sends a unit from staging memory into which its device has
// packed it, and the decode worker receives it in staging memory of its own when its frame has
// announced it.
//
// NCCL is two-sided, so the decode worker alone writes into its pool: it copies a unit from staging
// to where it belongs after it has looked at the reservation. What nobody wants any more is
// received all the same, since the two ranks' operations must match, and goes nowhere. So blocks
// are quiet as soon as that copy has ended, whatever the peer does, and no farewell is needed.
//
// NCCL itself hangs when a peer is dead or never posts. All its calls are of the kind that does not
// wait, each wait for their end has a limit or ends with the socket, and a communicator that is not
// wanted any more is aborted, never finalised.

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/nccl_library.h"
#include "engine/base/status_macros.h"
#include "kvtransfer/device_memory.h"
#include "kvtransfer/nccl_link.h"
#include "kvtransfer/nccl_port.h"
#include "kvtransfer/stream_put.h"
#include "kvtransfer/tcp_socket.h"
#include "kvtransfer/transport_terms.h"

namespace baton::kvtransfer {
namespace {

constexpr absl::Duration kNcclAbortTimeout = absl::Seconds(2);
constexpr absl::Duration kNcclReasonTimeout = absl::Milliseconds(200);
// Joining takes NCCL seconds where it looks at the host's network for the first time: so many times
// as long as an answer.
constexpr int kNcclJoinFactor = 6;
// Each pair takes device memory: staging here, buffers and connections within NCCL.
constexpr int kMaxNcclPairs = 32;

absl::Duration Now() { return base::Clock::Real().Now(); }

class NcclListener : public PutListener {
 public:
  explicit NcclListener(const ListenOptions& options) : options_(options) {}
  ~NcclListener() override {
    if (!NcclLink::WaitForAborts(kNcclAbortTimeout))
      BATON_LOG(Warning, "nccl transport: a communicator does not end");
  }

  absl::Status Listen() {
    BATON_ASSIGN_OR_RETURN(nccl_, base::LoadNccl());
    BATON_ASSIGN_OR_RETURN(DeviceCopier copier, DeviceCopier::Create(options_.device_pool->data()));
    copier_.emplace(std::move(copier));
    // The port itself is the tcp transport's.
    const int port = options_.tcp_port == 0 ? 0 : options_.tcp_port + 1;
    if (port > UINT16_MAX)
      return absl::InvalidArgumentError("nccl transport: there is no port after --kv-listen's");
    return socket_.Listen(options_.tcp_host, port, options_.tcp_advertise_host);
  }

  absl::string_view name() const override { return kNccl; }
  std::string address() const override { return socket_.address(); }
  bool peer_writes() const override { return false; }
  int fd() const override { return socket_.fd(); }
  absl::StatusOr<UniqueFd> Accept() override { return socket_.Accept(); }

  absl::Status Welcome(int fd) override {
    const NcclOfferFrame offer{static_cast<uint32_t>(nccl_.version),
                               NcclSlotBytes(options_.layout)};
    return SendWithDescriptors(fd, Encode(WelcomeOf(options_.layout)) + Encode(offer), {});
  }

  absl::StatusOr<std::unique_ptr<PayloadPort>> OpenPort(int fd) override {
    if (num_ports_ >= kMaxNcclPairs)
      return absl::UnavailableError(
          absl::StrCat("nccl transport: pairs=", num_ports_.load(), " limit=", kMaxNcclPairs));
    BATON_ASSIGN_OR_RETURN(DeviceCopier copier, DeviceCopier::Create(options_.device_pool->data()));
    return std::make_unique<NcclPort>(nccl_, options_, std::move(copier),
                                      absl::StrCat("prefill worker at ", PeerAddress(fd)),
                                      &num_ports_);
  }

  absl::StatusOr<uint64_t> Checksum(const base::Buffer*,
                                    absl::Span<const ByteRange> ranges) override {
    return copier_->ChecksumOf(options_.device_pool->data(), ranges);
  }

 private:
  const ListenOptions options_;
  base::NcclLibrary nccl_;
  std::optional<DeviceCopier> copier_;
  TcpSocket socket_;
  std::atomic<int> num_ports_{0};
};

class NcclPut : public StreamPut {
 public:
  explicit NcclPut(const std::string& address)
      : peer_(absl::StrCat("decode worker at ", address)) {}

  absl::Status Connect(const worker::v1::TransportEndpoint& endpoint,
                       const ConnectOptions& options) {
    pool_ = options.device_pool;
    BATON_ASSIGN_OR_RETURN(const base::NcclLibrary nccl, base::LoadNccl());
    BATON_ASSIGN_OR_RETURN(DeviceCopier copier, DeviceCopier::Create(pool_->data()));
    BATON_ASSIGN_OR_RETURN(UniqueFd socket, ConnectTcp(endpoint.address(), options.timeout));
    SetNoDelay(socket.get());
    BATON_RETURN_IF_ERROR(Attach(std::move(socket), endpoint.token(), options, nullptr));
    BATON_ASSIGN_OR_RETURN(const Frame answer, ReceiveFrame(fd(), options.timeout, nullptr));
    BATON_ASSIGN_OR_RETURN(const NcclOfferFrame offer, ParseNcclOffer(answer));
    BATON_RETURN_IF_ERROR(CheckOffer(offer, nccl, options.layout));
    slot_bytes_ = offer.slot_bytes;
    copier_.emplace(std::move(copier));
    return Join(nccl, options.timeout);
  }

  // Nothing of ours is read once this has returned: a unit on its way is in staging memory.
  ~NcclPut() override {
    if (!copier_.has_value()) return;
    const absl::Status quiet = copier_->Wait();
    if (!quiet.ok())
      BATON_LOG(Warning, "nccl transport: copies ", LogField("reason", quiet.message()));
  }

  absl::string_view name() const override { return kNccl; }

  void Put(const UnitFrame& unit,
           absl::Span<const ByteRange> from,
           absl::Span<const ByteRange>) override {
    announce_ = Encode(unit);
    from_.assign(from.begin(), from.end());
    bytes_ = 0;
    for (const ByteRange& range : from) bytes_ += range.size;
    if (bytes_ > slot_bytes_) {
      failure_ = absl::InternalError(
          absl::StrCat("nccl transport: unit_bytes=", bytes_, " limit=", slot_bytes_));
    }
  }
  bool busy() const override { return !announce_.empty(); }

  absl::StatusOr<size_t> Write() override {
    BATON_RETURN_IF_ERROR(failure_);
    failure_ = NamedNccl(peer_, Advance());
    BATON_RETURN_IF_ERROR(failure_);
    return StreamPut::Write();
  }
  absl::Duration poll_interval() const override {
    return busy() || link_->active() ? kNcclPollInterval : absl::InfiniteDuration();
  }

  absl::StatusOr<uint64_t> Checksum(const base::Buffer*,
                                    absl::Span<const ByteRange> ranges) override {
    return copier_->ChecksumOf(pool_->data(), ranges);
  }

 protected:
  absl::Status MoveProbe(absl::Span<const uint8_t> bytes, absl::Duration timeout) override {
    BATON_RETURN_IF_ERROR(SendAll(fd(), Encode(ProbeFrame{bytes.size()}), timeout));
    link_->Send(link_->TakeSlot(), bytes.size());
    return WaitUntil([this] { return !link_->active(); }, timeout, "has not taken the probe");
  }

 private:
  absl::Status CheckOffer(const NcclOfferFrame& offer,
                          const base::NcclLibrary& nccl,
                          const kv::KvLayout& layout) const {
    if (static_cast<int>(offer.version) != nccl.version) {
      return absl::FailedPreconditionError(
          absl::StrCat("nccl: version ", base::NcclVersionName(nccl.version), " here and ",
                       base::NcclVersionName(static_cast<int>(offer.version)), " at the ", peer_,
                       ": they must be the same"));
    }
    if (offer.slot_bytes >= NcclSlotBytes(layout)) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat("nccl transport: the ", peer_,
                                                      " takes units of bytes=", offer.slot_bytes,
                                                      " ours=", NcclSlotBytes(layout)));
  }

  absl::Status Join(const base::NcclLibrary& nccl, absl::Duration timeout) {
    BATON_RETURN_IF_ERROR(copier_->device().Use());
    base::NcclUniqueId id;
    BATON_RETURN_IF_ERROR(base::NcclStatus(nccl, nccl.unique_id(&id), nullptr, "unique id"));
    BATON_ASSIGN_OR_RETURN(
        link_, NcclLink::Join(nccl, id, NcclLink::kPrefill, pool_->data(), slot_bytes_));
    BATON_RETURN_IF_ERROR(SendAll(fd(), Encode(NcclJoinFrame{id.bytes}), timeout));
    return WaitUntil([this] { return link_->joined(); }, timeout * kNcclJoinFactor,
                     "has not joined the communicator");
  }

  // For the exchange at connect only.
  template <typename Condition>
  absl::Status WaitUntil(Condition condition, absl::Duration timeout, absl::string_view what) {
    absl::Duration deadline = Now() + timeout;
    std::string failing = absl::StrCat(what, " in ", absl::FormatDuration(timeout));
    bool closed = false;
    while (true) {
      BATON_RETURN_IF_ERROR(NamedNccl(peer_, link_->Poll()));
      if (condition()) return absl::OkStatus();
      if (Now() > deadline) return absl::UnavailableError(absl::StrCat(peer_, " ", failing));
      // The peer has nothing to say now; one that has died or given up shows here. Our end of the
      // communicator often learns why a moment later.
      pollfd entry{closed ? -1 : fd(), POLLRDHUP, 0};
      const timespec interval =
          absl::ToTimespec(link_->joined() ? kNcclPollInterval : kNcclWaitInterval);
      if (ppoll(&entry, 1, &interval, nullptr) <= 0) continue;
      closed = true;
      failing = "has closed the connection";
      deadline = std::min(deadline, Now() + kNcclReasonTimeout);
    }
  }

  // Packs the unit that waits, announces it and sends it: source and announcement are done with
  // when it lies in staging memory.
  absl::Status Advance() {
    if (busy() || link_->active()) BATON_RETURN_IF_ERROR(link_->Poll());
    if (!busy()) return absl::OkStatus();
    if (slot_ < 0) {
      slot_ = link_->TakeSlot();
      if (slot_ < 0) return absl::OkStatus();
      BATON_RETURN_IF_ERROR(
          copier_->CopyRanges(pool_->data(), from_, link_->slot(slot_), {{0, bytes_}}));
    }
    BATON_ASSIGN_OR_RETURN(const bool packed, copier_->Idle());
    if (!packed) return absl::OkStatus();
    Queue(std::exchange(announce_, ""));
    link_->Send(std::exchange(slot_, -1), bytes_);
    return link_->Poll();
  }

  const std::string peer_;
  const base::Buffer* pool_ = nullptr;
  size_t slot_bytes_ = 0;
  std::optional<DeviceCopier> copier_;  // packs
  std::unique_ptr<NcclLink> link_;      // goes first
  // The unit that is being packed; empty: none.
  std::string announce_;
  std::vector<ByteRange> from_;
  size_t bytes_ = 0;
  int slot_ = -1;  // where; -1: it waits for one
  absl::Status failure_;
};

absl::Status NcclNeedsDevicePool() {
  return absl::FailedPreconditionError(
      "nccl transport: the KV pool does not lie on a device (--device)");
}

}  // namespace

absl::StatusOr<std::unique_ptr<PutListener>> ListenNccl(const ListenOptions& options) {
  if (options.device_pool == nullptr) return NcclNeedsDevicePool();
  auto listener = std::make_unique<NcclListener>(options);
  BATON_RETURN_IF_ERROR(listener->Listen());
  return listener;
}

absl::StatusOr<std::unique_ptr<PutTransport>> ConnectNccl(
    const worker::v1::TransportEndpoint& endpoint, const ConnectOptions& options) {
  if (options.device_pool == nullptr) return NcclNeedsDevicePool();
  auto transport = std::make_unique<NcclPut>(endpoint.address());
  BATON_RETURN_IF_ERROR(transport->Connect(endpoint, options));
  return transport;
}

}  // namespace baton::kvtransfer
