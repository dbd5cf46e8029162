#pragma once

// The decode side of hand-overs: reservation -> landed, revoked or expired. One Receiver per
// worker, many peers.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "baton/worker/v1/common.pb.h"
#include "baton/worker/v1/peer.pb.h"
#include "engine/base/buffer.h"
#include "engine/base/clock.h"
#include "engine/kv/kv_layout.h"
#include "kvtransfer/peer_link.h"

namespace baton::kvtransfer {

using SessionId = uint64_t;

struct ReceiverOptions {
  const base::Clock* clock = &base::Clock::Real();
  // The decode worker's KV pool, outlives the receiver: on the host (AllocateShared), on a device,
  // or both, of which transports between devices write the latter. Null: there is none.
  base::Buffer* pool = nullptr;
  base::Buffer* device_pool = nullptr;
  kv::KvLayout layout;
  worker::v1::LayoutFingerprint fingerprint;
  std::string incarnation;              // 16 random bytes
  std::vector<std::string> transports;  // in order of preference: "cuda_ipc", "nccl", "shm", "tcp"
  // Peers that do not offer this one are refused, and it alone is offered. Empty: any.
  std::string required_transport;
  std::string tcp_listen_host = "127.0.0.1";
  int tcp_listen_port = 0;         // 0: any; nccl takes the next one
  std::string tcp_advertise_host;  // empty: tcp_listen_host
  std::string socket_dir;          // private directory of the Unix socket; empty: an abstract name
  // nccl: how long a peer may take to join, and announced bytes to arrive.
  absl::Duration peer_timeout = absl::Seconds(30);
  // Names reservations: never 0, never twice the same, not to be guessed. Empty: the system's
  // random numbers.
  std::function<uint64_t()> random_id;
};

struct Reservation {
  uint64_t reservation_id = 0;  // set by Reserve: random
  uint64_t epoch = 0;           // set by Reserve
  int prompt_tokens = 0;
  int first_missing_block = 0;
  std::vector<kv::BlockId> blocks;  // one per prompt block, from block 0
};

// What happens to a reservation; delivered from the receiver's threads, which wait for nobody: push
// to a queue.
struct ReceiverEvent {
  enum class Kind {
    kLanded,    // complete and committed: the sequence may run
    kFailed,    // the sender gave up or died, or the totals disagree (DATA_LOSS): not usable, no
                // writer left (blocks may be freed)
    kQuiesced,  // after Revoke: no writer is left, the blocks may be freed
  };
  Kind kind = Kind::kFailed;
  uint64_t reservation_id = 0;
  absl::Status status;
  std::vector<worker::v1::Token> first_tokens;  // kLanded
  uint64_t bytes = 0;
  absl::Duration exposed;  // kLanded: from Commit's arrival to complete
  absl::Duration arrival;  // kLanded: from the first unit's begin to the last one's end
  std::string transport;
};

// Thread-safe.
class Receiver {
 public:
  static absl::StatusOr<std::unique_ptr<Receiver>> Create(
      const ReceiverOptions& options, std::function<void(ReceiverEvent)> on_event);
  virtual ~Receiver() = default;

  // Opens a hand-over. Nothing has been written yet, so a Revoke before the first unit is quiet at
  // once.
  virtual worker::v1::Handoff Reserve(Reservation reservation) = 0;
  // Takes it back. Exactly one kQuiesced (or kFailed) follows; until then the blocks must not be
  // used: quarantine. Idempotent; a Revoke of a landed or unknown reservation does nothing and
  // returns false.
  virtual bool Revoke(uint64_t reservation_id, absl::string_view reason) = 0;

  // A peer opened a control session with its Hello. Returns our Hello with endpoints that only this
  // session may use. Errors: FAILED_PRECONDITION naming the fingerprint field that differs, or when
  // no transport suits both, with both sides' offers.
  virtual absl::StatusOr<worker::v1::Hello> OnPeerHello(const worker::v1::Hello& peer,
                                                        PeerLink* link,
                                                        SessionId* session) = 0;
  // Commit, Quiesced, Abort, Heartbeat.
  virtual void OnMessage(SessionId session, const worker::v1::PeerMessage& message) = 0;
  virtual void OnPeerGone(SessionId session) = 0;

  struct PeerInfo {
    std::string incarnation;
    std::string transport;
    double probe_bytes_per_second = 0;
    bool suspect = false;  // nothing heard for three heartbeats: no new pairs
  };
  virtual std::vector<PeerInfo> peers() const = 0;
};

}  // namespace baton::kvtransfer
