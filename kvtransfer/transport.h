#pragma once

// Data planes of the hand-over. The prefill side puts bytes into the decode side's pool; nothing is
// ever fetched. A transport moves byte ranges and knows nothing of reservations; sender.cc and
// receiver.cc decide what may be moved. Frames (frame.h) travel over a stream socket; bytes travel
// in it (tcp) or beside it (shm).

#include <cstddef>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "baton/worker/v1/peer.pb.h"
#include "engine/base/buffer.h"
#include "engine/kv/kv_layout.h"
#include "kvtransfer/frame.h"
#include "kvtransfer/socket.h"

namespace baton::kvtransfer {

inline constexpr size_t kProbeBytes = size_t{4} << 20;

// Prefill side: one connection to one decode worker. Used by one thread at a time. Nothing here
// waits but Probe. Its end is proof for the decode side that nothing more is written.
class PutTransport {
 public:
  using Reply = std::variant<GrantFrame, AckFrame>;

  virtual ~PutTransport() = default;
  virtual absl::string_view name() const = 0;
  // As the decode worker describes its pool.
  virtual const kv::KvLayout& peer_layout() const = 0;
  // Copies kProbeBytes a few times and tells the peer the result, in bytes a second. At connect
  // only: waits. Errors: UNAVAILABLE.
  virtual absl::StatusOr<double> Probe(absl::Duration timeout) = 0;

  virtual void Open(const OpenFrame& open) = 0;
  // Starts a unit: `from` ranges of our pool into `to` ranges of the peer's. Not while busy.
  virtual void Put(const UnitFrame& unit,
                   absl::Span<const ByteRange> from,
                   absl::Span<const ByteRange> to) = 0;
  // The source of the last Put is still being read.
  virtual bool busy() const = 0;
  // Writes what can be written now; returns the bytes. Errors: UNAVAILABLE: the connection is dead.
  virtual absl::StatusOr<size_t> Write() = 0;
  // Appends the answers that have arrived. Errors: UNAVAILABLE, INVALID_ARGUMENT (the peer talks
  // nonsense).
  virtual absl::Status Read(std::vector<Reply>* replies) = 0;

  // For poll.
  virtual int fd() const = 0;
  virtual bool wants_write() const = 0;
};

// Decode side: where prefill workers connect. One per transport and worker. Used by one thread.
class PutListener {
 public:
  virtual ~PutListener() = default;
  virtual absl::string_view name() const = 0;
  // For TransportEndpoint.address.
  virtual std::string address() const = 0;
  // True: the peer writes into our memory itself, so only its word or the end of its connection
  // proves it quiet. False: bytes come in the stream and we write them.
  virtual bool peer_writes() const = 0;
  virtual int fd() const = 0;
  // Errors: UNAVAILABLE; FAILED_PRECONDITION when that process may not connect.
  virtual absl::StatusOr<UniqueFd> Accept() = 0;
  // Lets a peer in that has presented its token.
  virtual absl::Status Welcome(int fd) = 0;
};

struct ListenOptions {
  base::Buffer* pool = nullptr;
  kv::KvLayout layout;
  std::string tcp_host;
  int tcp_port = 0;
  std::string tcp_advertise_host;
  std::string socket_dir;
};

struct ConnectOptions {
  const base::Buffer* pool = nullptr;
  kv::KvLayout layout;  // of our pool
  absl::Duration timeout = absl::Seconds(2);
};

// Names known here, in order of preference.
std::vector<std::string> KnownTransports();
// Errors: INVALID_ARGUMENT naming the known ones; UNAVAILABLE.
absl::StatusOr<std::unique_ptr<PutListener>> ListenOn(absl::string_view name,
                                                      const ListenOptions& options);
absl::StatusOr<std::unique_ptr<PutTransport>> ConnectTo(
    const worker::v1::TransportEndpoint& endpoint, const ConnectOptions& options);

// What the factory links. Errors as above.
absl::StatusOr<std::unique_ptr<PutListener>> ListenShm(const ListenOptions& options);
absl::StatusOr<std::unique_ptr<PutTransport>> ConnectShm(
    const worker::v1::TransportEndpoint& endpoint, const ConnectOptions& options);
absl::StatusOr<std::unique_ptr<PutListener>> ListenTcpTransport(const ListenOptions& options);
absl::StatusOr<std::unique_ptr<PutTransport>> ConnectTcpTransport(
    const worker::v1::TransportEndpoint& endpoint, const ConnectOptions& options);

}  // namespace baton::kvtransfer
