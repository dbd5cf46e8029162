#pragma once

// Data planes of the hand-over. The prefill side puts bytes into the decode side's pool; nothing is
// ever fetched. A transport moves byte ranges and knows nothing of reservations; sender.cc and
// receiver.cc decide what may be moved. Frames (frame.h) travel over a stream socket; bytes travel
// in it (tcp), beside it into the peer's pool (shm, cuda_ipc), or beside it into memory from which
// the peer takes them (nccl).

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
#include "engine/base/clock.h"
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
  // Nothing that poll could wait for tells when busy ends: Write again after this long.
  virtual absl::Duration poll_interval() const { return absl::InfiniteDuration(); }
  // XXH3-64 of ranges of our pool, which is `pool` where that is on the host.
  virtual absl::StatusOr<uint64_t> Checksum(const base::Buffer* pool,
                                            absl::Span<const ByteRange> ranges) {
    return ChecksumOf(pool->data(), ranges);
  }
  // Appends the answers that have arrived. Errors: UNAVAILABLE, INVALID_ARGUMENT (the peer talks
  // nonsense).
  virtual absl::Status Read(std::vector<Reply>* replies) = 0;

  // For poll.
  virtual int fd() const = 0;
  virtual bool wants_write() const = 0;
};

// Decode side of a connection whose payload comes neither in the stream nor by the peer's own hand:
// it arrives, in the order of the frames that announce it, in memory of the port, from where we put
// it into the pool. One thread at a time; nothing waits but the end, for our own copies.
class PayloadPort {
 public:
  virtual ~PayloadPort() = default;
  // The peer's word on how payload is to come. Errors: INVALID_ARGUMENT; UNAVAILABLE.
  virtual absl::Status Join(const NcclJoinFrame& join) = 0;
  // A payload of that size is announced.
  // Errors: INVALID_ARGUMENT (too large, or Join has not been said), RESOURCE_EXHAUSTED (too many).
  virtual absl::Status Expect(uint64_t bytes) = 0;
  // Takes what is under way further.
  // Errors: UNAVAILABLE naming the peer, also when it is late; INTERNAL (device).
  virtual absl::Status Poll() = 0;
  // The first payload of those expected is here.
  virtual bool arrived() const = 0;
  // Begins to copy it into `ranges` of the pool.
  virtual absl::Status Place(absl::Span<const ByteRange> ranges) = 0;
  // The copy has ended.
  virtual absl::StatusOr<bool> Placed() = 0;
  // The first payload, which is here, has been placed or is not wanted: the next one is the first.
  virtual void Pop() = 0;
  // As PutTransport's.
  virtual absl::Duration poll_interval() const = 0;
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
  // What the peer has begun may go on when its connection has ended: only its farewell or the end
  // of its process proves it quiet.
  virtual bool writes_outlive_socket() const { return false; }
  // As PutTransport's, of our pool.
  virtual absl::StatusOr<uint64_t> Checksum(const base::Buffer* pool,
                                            absl::Span<const ByteRange> ranges) {
    return ChecksumOf(pool->data(), ranges);
  }
  virtual int fd() const = 0;
  // Errors: UNAVAILABLE; FAILED_PRECONDITION when that process may not connect.
  virtual absl::StatusOr<UniqueFd> Accept() = 0;
  // Lets a peer in that has presented its token.
  virtual absl::Status Welcome(int fd) = 0;
  // For a peer that has been let in; null where payload needs none. Ports end before the listener.
  // Errors: RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<std::unique_ptr<PayloadPort>> OpenPort(int fd) { return nullptr; }
};

struct ListenOptions {
  const base::Clock* clock = &base::Clock::Real();
  base::Buffer* pool = nullptr;         // on the host; null: there is none
  base::Buffer* device_pool = nullptr;  // on a device; null: there is none
  kv::KvLayout layout;
  std::string tcp_host;
  int tcp_port = 0;
  std::string tcp_advertise_host;
  std::string socket_dir;
  // nccl: how long a peer may take to join, and announced bytes to arrive.
  absl::Duration peer_timeout = absl::Seconds(30);
};

struct ConnectOptions {
  const base::Buffer* pool = nullptr;         // on the host; null: there is none
  const base::Buffer* device_pool = nullptr;  // on a device; null: there is none
  kv::KvLayout layout;                        // of our pool
  absl::Duration timeout = absl::Seconds(2);
};

// Names known here, in order of preference.
std::vector<std::string> KnownTransports();
// Errors: INVALID_ARGUMENT naming the known ones; UNAVAILABLE.
absl::StatusOr<std::unique_ptr<PutListener>> ListenOn(absl::string_view name,
                                                      const ListenOptions& options);
absl::StatusOr<std::unique_ptr<PutTransport>> ConnectTo(
    const worker::v1::TransportEndpoint& endpoint, const ConnectOptions& options);

// The layout as a frame says it.
WelcomeFrame WelcomeOf(const kv::KvLayout& layout);

// What the factory links. Errors as above.
absl::StatusOr<std::unique_ptr<PutListener>> ListenShm(const ListenOptions& options);
absl::StatusOr<std::unique_ptr<PutTransport>> ConnectShm(
    const worker::v1::TransportEndpoint& endpoint, const ConnectOptions& options);
// Errors besides: FAILED_PRECONDITION when there is no pool on a device or it cannot be shared,
// and, at the other end, when it cannot be opened.
absl::StatusOr<std::unique_ptr<PutListener>> ListenCudaIpc(const ListenOptions& options);
absl::StatusOr<std::unique_ptr<PutTransport>> ConnectCudaIpc(
    const worker::v1::TransportEndpoint& endpoint, const ConnectOptions& options);
// Errors besides: FAILED_PRECONDITION when there is no pool on a device, and, at the other end,
// when the two libraries are of different versions; UNAVAILABLE naming what the host's lacks.
absl::StatusOr<std::unique_ptr<PutListener>> ListenNccl(const ListenOptions& options);
absl::StatusOr<std::unique_ptr<PutTransport>> ConnectNccl(
    const worker::v1::TransportEndpoint& endpoint, const ConnectOptions& options);
absl::StatusOr<std::unique_ptr<PutListener>> ListenTcpTransport(const ListenOptions& options);
absl::StatusOr<std::unique_ptr<PutTransport>> ConnectTcpTransport(
    const worker::v1::TransportEndpoint& endpoint, const ConnectOptions& options);

}  // namespace baton::kvtransfer
