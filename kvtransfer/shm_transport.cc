// Shared memory on one machine. The decode worker's pool is a memfd; its descriptor goes, over a
// private Unix socket, to the session that presents its token. The prefill worker copies into its
// mapping, then announces the unit on the socket.
//
// Why the end of the socket is proof that nothing more is written: the only thread that copies also
// closes it, and when the process is killed, the kernel closes descriptors after its last thread
// has left user mode.

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "kvtransfer/private_socket.h"
#include "kvtransfer/stream_put.h"

namespace baton::kvtransfer {
namespace {

class ShmListener : public PutListener {
 public:
  explicit ShmListener(const ListenOptions& options)
      : pool_(*options.pool), layout_(options.layout) {}

  absl::Status Listen(const std::string& socket_dir) {
    if (pool_.fd() < 0)
      return absl::InvalidArgumentError("shm transport: the KV pool is not in shared memory");
    BATON_ASSIGN_OR_RETURN(probe_area_,
                           base::Buffer::AllocateShared("baton-kv-probe", kProbeBytes));
    return socket_.Listen(socket_dir);
  }

  absl::string_view name() const override { return "shm"; }
  std::string address() const override { return socket_.address(); }
  bool peer_writes() const override { return true; }
  int fd() const override { return socket_.fd(); }
  absl::StatusOr<UniqueFd> Accept() override { return socket_.Accept(); }

  absl::Status Welcome(int fd) override {
    return SendWithDescriptors(fd, Encode(WelcomeOf(layout_)), {pool_.fd(), probe_area_.fd()});
  }

 private:
  const base::Buffer& pool_;
  const kv::KvLayout layout_;
  base::Buffer probe_area_;
  PrivateSocket socket_;
};

class ShmPut : public StreamPut {
 public:
  absl::Status Connect(const worker::v1::TransportEndpoint& endpoint,
                       const ConnectOptions& options) {
    pool_ = options.pool;
    BATON_ASSIGN_OR_RETURN(UniqueFd fd, ConnectPrivate(endpoint.address(), options.timeout));
    std::vector<UniqueFd> descriptors;
    BATON_RETURN_IF_ERROR(Attach(std::move(fd), endpoint.token(), options, &descriptors));
    if (descriptors.size() != 2) {
      return absl::InvalidArgumentError(
          absl::StrCat("shm transport: descriptors=", descriptors.size(), " wanted=2"));
    }
    BATON_ASSIGN_OR_RETURN(
        peer_pool_, base::Buffer::MapShared(descriptors[0].get(), peer_layout().pool_bytes()));
    BATON_ASSIGN_OR_RETURN(probe_area_, base::Buffer::MapShared(descriptors[1].get(), kProbeBytes));
    return absl::OkStatus();
  }

  absl::string_view name() const override { return "shm"; }

  void Put(const UnitFrame& unit,
           absl::Span<const ByteRange> from,
           absl::Span<const ByteRange> to) override {
    CopyRanges(pool_->data(), from, peer_pool_.data(), to);
    Queue(Encode(unit));
  }

 protected:
  absl::Status MoveProbe(absl::Span<const uint8_t> bytes, absl::Duration timeout) override {
    std::memcpy(probe_area_.data(), bytes.data(), bytes.size());
    return SendAll(fd(), Encode(ProbeFrame{bytes.size()}), timeout);
  }

 private:
  const base::Buffer* pool_ = nullptr;
  base::Buffer peer_pool_;
  base::Buffer probe_area_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PutListener>> ListenShm(const ListenOptions& options) {
  if (options.pool == nullptr)
    return absl::FailedPreconditionError("shm transport: there is no KV pool on the host");
  auto listener = std::make_unique<ShmListener>(options);
  BATON_RETURN_IF_ERROR(listener->Listen(options.socket_dir));
  return listener;
}

absl::StatusOr<std::unique_ptr<PutTransport>> ConnectShm(
    const worker::v1::TransportEndpoint& endpoint, const ConnectOptions& options) {
  if (options.pool == nullptr)
    return absl::FailedPreconditionError("shm transport: there is no KV pool on the host");
  auto transport = std::make_unique<ShmPut>();
  BATON_RETURN_IF_ERROR(transport->Connect(endpoint, options));
  return transport;
}

}  // namespace baton::kvtransfer
