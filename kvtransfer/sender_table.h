#pragma once

// The states of hand-overs on the prefill side, as a plain table: no threads, no sockets; time is
// passed in.
//
//   event \ state        opening              sending                       committed
//   Grant                -> sending, or done  ignored                       ignored
//   Push, Commit         kept                 kept; commit sent when all    ignored
//                                             units are written -> committed
//   Landed               ignored              ignored                       done OK
//   Revoke               Quiesced, done CANCELLED (in every state)
//   Abort (ours)         Abort, done CANCELLED (in every state)
//   no answer in time    Abort, done UNAVAILABLE (opening: no grant; committed: no Landed)
//   stall                Abort, done UNAVAILABLE (in every state with units that are not
//   acknowledged) link or peer gone    done UNAVAILABLE (in every state)
//
// A transfer whose unit is being written ends only after that write: its source is read until then.
// What has ended is unknown, and messages about the unknown change nothing, except that a Revoke is
// always answered with Quiesced.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "baton/worker/v1/peer.pb.h"
#include "kvtransfer/frame.h"
#include "kvtransfer/sender.h"
#include "kvtransfer/transfer_plan.h"

namespace baton::kvtransfer {

struct SenderLimits {
  size_t unit_bytes =
      size_t{4} << 20;  // a unit's size: bounds the time until a revoked transfer is quiet
  size_t window_bytes = size_t{64} << 20;  // written but not acknowledged
  size_t window_units = 64;
  size_t pending_units = size_t{1} << 20;  // pushed but not written, of one transfer
  absl::Duration stall_timeout_min = absl::Milliseconds(250);
  absl::Duration reply_timeout = absl::Seconds(5);  // for Grant and Landed
  double bytes_per_second = 1e9;  // measured by the probe; predicts how long units take
};

// What the table wants done, by the sender's thread.
struct SenderEffects {
  std::vector<OpenFrame> opens;
  std::vector<worker::v1::PeerMessage> messages;
  std::vector<std::pair<std::function<void(TransferResult)>, TransferResult>> done;
  bool empty() const { return opens.empty() && messages.empty() && done.empty(); }
};

// A unit to write now.
struct IssuedUnit {
  UnitFrame frame;
  std::vector<ByteRange> from;  // in our pool
  std::vector<ByteRange> to;    // in the peer's
};

// Thread-compatible.
class SenderTable {
 public:
  SenderTable(const kv::KvLayout& layout,
              const kv::KvLayout& peer_layout,
              absl::string_view peer_incarnation,
              const SenderLimits& limits)
      : layout_(layout),
        peer_layout_(peer_layout),
        peer_incarnation_(peer_incarnation),
        limits_(limits) {}

  // As Sender's calls of these names.
  TransferId Begin(TransferSpec spec, absl::Duration now);
  void Push(TransferId id,
            int block_begin,
            int block_end,
            int layer_begin,
            int layer_end,
            absl::Span<const kv::BlockId> our_blocks);
  void Commit(TransferId id, std::vector<worker::v1::Token> first_tokens, absl::Duration now);
  void Abort(TransferId id, absl::string_view reason);

  void OnGrant(const GrantFrame& grant, absl::Duration now);
  // Errors: INVALID_ARGUMENT when it is not the oldest unit's: the peer talks nonsense.
  absl::Status OnAck(const AckFrame& ack, absl::Duration now);
  void OnLanded(const worker::v1::Landed& landed);
  void OnRevoke(const worker::v1::Revoke& revoke);

  // The next unit, if the window has room: transfers take turns. The caller writes it, then calls
  // UnitWritten.
  std::optional<IssuedUnit> NextUnit(absl::Duration now);
  void UnitWritten(absl::Duration now);
  // Bytes have moved, of whatever unit.
  void OnProgress(absl::Duration now) { progress_at_ = now; }
  // Ends what has waited too long.
  // Errors: UNAVAILABLE when a unit is stuck half-way: the connection must be given up.
  absl::Status CheckTimers(absl::Duration now);
  // When CheckTimers has something to do next; InfiniteDuration if nothing is waited for.
  absl::Duration NextTimer() const;
  // The connection is closed, nothing is being written: all end with `reason`, and so does what
  // begins later.
  void FailAll(const absl::Status& reason);

  SenderEffects TakeEffects() { return std::exchange(effects_, {}); }
  size_t size() const { return transfers_.size(); }

 private:
  enum class State { kOpening, kSending, kCommitted };
  enum class Goodbye { kNone, kQuiesced, kAbort };

  struct PendingUnit {
    UnitRect rect;
    std::vector<kv::BlockId> our_blocks;  // of rect's blocks
  };
  struct Transfer {
    TransferSpec spec;
    HandoffShape shape;
    State state = State::kOpening;
    std::deque<PendingUnit> pending;
    size_t bytes_pushed = 0;
    uint32_t units_sent = 0;
    uint64_t bytes_sent = 0;
    uint32_t unacked = 0;
    bool commit_wanted = false;
    std::vector<worker::v1::Token> first_tokens;
    absl::Duration waiting_since;  // for Grant or Landed
    absl::Duration busy;
    bool ending = false;
    Goodbye goodbye = Goodbye::kNone;
    absl::Status end_status;
  };
  struct Outstanding {
    uint64_t reservation_id;
    uint32_t sequence;
    size_t bytes;
    TransferId transfer;
  };

  Transfer* Find(TransferId id);
  TransferId IdOf(const worker::v1::Handoff& handoff) const;  // 0: unknown
  void End(TransferId id, const absl::Status& status, Goodbye goodbye);
  void Finish(TransferId id);
  void CommitIfDone(TransferId id, absl::Duration now);
  absl::Status CheckSpec(const TransferSpec& spec) const;
  absl::Duration StallAfter() const;

  const kv::KvLayout layout_;
  const kv::KvLayout peer_layout_;
  const std::string peer_incarnation_;
  const SenderLimits limits_;

  std::map<TransferId, Transfer> transfers_;
  absl::flat_hash_map<uint64_t, TransferId> by_reservation_;
  std::deque<Outstanding> outstanding_;  // written or being written, not acknowledged, oldest first
  size_t outstanding_bytes_ = 0;
  TransferId writing_ = 0;  // whose unit is being written
  absl::Duration writing_since_;
  absl::Duration progress_at_;
  TransferId last_id_ = 0;
  TransferId last_served_ = 0;
  absl::Status broken_;  // not OK after FailAll
  SenderEffects effects_;
};

}  // namespace baton::kvtransfer
