// Plain TCP. Units travel in the stream and the decode worker receives them straight into its pool,
// at addresses that it works out from its own reservation: what the peer says can only be accepted
// or refused, never believed.

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "kvtransfer/stream_put.h"
#include "kvtransfer/tcp_socket.h"

namespace baton::kvtransfer {
namespace {

class TcpListener : public PutListener {
 public:
  explicit TcpListener(const kv::KvLayout& layout) : layout_(layout) {}

  absl::Status Listen(const ListenOptions& options) {
    return socket_.Listen(options.tcp_host, options.tcp_port, options.tcp_advertise_host);
  }

  absl::string_view name() const override { return "tcp"; }
  std::string address() const override { return socket_.address(); }
  bool peer_writes() const override { return false; }
  int fd() const override { return socket_.fd(); }
  absl::StatusOr<UniqueFd> Accept() override { return socket_.Accept(); }

  absl::Status Welcome(int fd) override {
    return SendWithDescriptors(fd, Encode(WelcomeOf(layout_)), {});
  }

 private:
  const kv::KvLayout layout_;
  TcpSocket socket_;
};

class TcpPut : public StreamPut {
 public:
  absl::Status Connect(const worker::v1::TransportEndpoint& endpoint,
                       const ConnectOptions& options) {
    pool_ = options.pool;
    BATON_ASSIGN_OR_RETURN(UniqueFd fd, ConnectTcp(endpoint.address(), options.timeout));
    return Attach(std::move(fd), endpoint.token(), options, nullptr);
  }

  absl::string_view name() const override { return "tcp"; }

  void Put(const UnitFrame& unit,
           absl::Span<const ByteRange> from,
           absl::Span<const ByteRange> to) override {
    Queue(Encode(unit));
    for (const ByteRange& range : from)
      QueueBorrowed(absl::MakeSpan(pool_->data() + range.offset, range.size));
  }

 protected:
  absl::Status MoveProbe(absl::Span<const uint8_t> bytes, absl::Duration timeout) override {
    BATON_RETURN_IF_ERROR(SendAll(fd(), Encode(ProbeFrame{bytes.size()}), timeout));
    return SendAll(fd(),
                   absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()),
                   timeout);
  }

 private:
  const base::Buffer* pool_ = nullptr;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PutListener>> ListenTcpTransport(const ListenOptions& options) {
  if (options.pool == nullptr)
    return absl::FailedPreconditionError("tcp transport: there is no KV pool on the host");
  auto listener = std::make_unique<TcpListener>(options.layout);
  BATON_RETURN_IF_ERROR(listener->Listen(options));
  return listener;
}

absl::StatusOr<std::unique_ptr<PutTransport>> ConnectTcpTransport(
    const worker::v1::TransportEndpoint& endpoint, const ConnectOptions& options) {
  if (options.pool == nullptr)
    return absl::FailedPreconditionError("tcp transport: there is no KV pool on the host");
  auto transport = std::make_unique<TcpPut>();
  BATON_RETURN_IF_ERROR(transport->Connect(endpoint, options));
  return transport;
}

}  // namespace baton::kvtransfer
