#pragma once

// The prefill side of hand-overs to one decode worker: window, order, totals. One Sender per peer.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "baton/worker/v1/common.pb.h"
#include "baton/worker/v1/peer.pb.h"
#include "engine/base/buffer.h"
#include "engine/base/clock.h"
#include "engine/kv/kv_layout.h"
#include "kvtransfer/peer_link.h"
#include "kvtransfer/transport_terms.h"

namespace baton::kvtransfer {

using TransferId = uint64_t;

class UnreachableTransports;

struct SenderOptions {
  const base::Clock* clock = &base::Clock::Real();
  // The prefill worker's KV pool, outlives the sender: on the host, on a device, or both, of which
  // transports between devices read the latter. Null: there is none.
  const base::Buffer* pool = nullptr;
  const base::Buffer* device_pool = nullptr;
  kv::KvLayout layout;      // of that pool
  worker::v1::Hello hello;  // ours
  // "auto": first of the peer's list that works here. Else exactly that one is offered and used, or
  // Create fails.
  std::string transport = "auto";
  // This one or none, whatever else is offered: no silent fallback. Empty: any.
  std::string required_transport;
  // What Create knows and notes of transports that nobody answered. Null: each meeting waits for
  // all of them.
  UnreachableTransports* unreachable = nullptr;
  // Create has taken another transport than the best one. Called in it; may be empty.
  std::function<void(const TransportFallback&)> on_fallback;
  // A unit without progress for max(this, 3x the predicted time) is stalled.
  absl::Duration stall_timeout_min = absl::Milliseconds(250);
  // For connecting, and for the peer's answers to the opening and to the Commit of a hand-over.
  absl::Duration reply_timeout = absl::Seconds(5);
  bool checksums = false;  // XXH3-64 of every unit, verified by the peer
};

// How one hand-over ended on this side. Delivered exactly once per Begin, from the sender's thread.
struct TransferResult {
  absl::Status status;  // OK: the peer said Landed
  uint32_t units_sent = 0;
  uint64_t bytes = 0;
  absl::Duration busy;  // time spent writing
};

struct TransferSpec {
  worker::v1::Handoff handoff;
  int prompt_tokens = 0;
  int first_missing_block = 0;                  // earlier blocks are not sent
  std::vector<kv::BlockId> peer_blocks;         // the peer's id of each prompt block, from block 0
  std::function<void(TransferResult)> on_done;  // after it, the source blocks are not read any more
};

// Thread-safe. Calls return at once; bytes move on the sender's own thread.
class Sender {
 public:
  // Connects the data plane after both Hellos are known and measures it with a probe copy.
  // Errors: FAILED_PRECONDITION naming the fingerprint field that differs, or when the transport
  // that must be used cannot be, with both sides' offers and the reason; UNAVAILABLE when none
  // works, with the reason of each.
  static absl::StatusOr<std::unique_ptr<Sender>> Create(const SenderOptions& options,
                                                        const worker::v1::Hello& peer,
                                                        PeerLink* link);
  virtual ~Sender() = default;

  virtual TransferId Begin(TransferSpec spec) = 0;
  // Blocks [block_begin, block_end) of the prompt are complete in layers [layer_begin, layer_end)
  // of our pool. `our_blocks` is our id of each prompt block, from block 0. The prompt's last block
  // is sent with its valid rows only.
  virtual void Push(TransferId id,
                    int block_begin,
                    int block_end,
                    int layer_begin,
                    int layer_end,
                    absl::Span<const kv::BlockId> our_blocks) = 0;
  // Everything has been pushed. `first_tokens` travel in the Commit.
  virtual void Commit(TransferId id, std::vector<worker::v1::Token> first_tokens) = 0;
  // Gives up: nothing is read from the source blocks after on_done.
  virtual void Abort(TransferId id, absl::string_view reason) = 0;

  // From the control channel: Landed, Revoke, Heartbeat. None may be under way or follow when the
  // sender is destroyed.
  virtual void OnMessage(const worker::v1::PeerMessage& message) = 0;
  // The peer or the link is gone: every open transfer ends with UNAVAILABLE.
  virtual void OnPeerGone(const absl::Status& reason) = 0;

  virtual std::string transport_name() const = 0;
  virtual double probe_bytes_per_second() const = 0;
  // Nothing heard for three heartbeats: no new hand-overs.
  virtual bool suspect() const { return false; }
};

}  // namespace baton::kvtransfer
