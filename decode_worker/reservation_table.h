#pragma once

// Blocks promised to requests whose prompt is computed elsewhere, from the promise until no peer
// can write into them.

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "engine/base/clock.h"
#include "engine/runtime/model_runner.h"
#include "engine/runtime/sequence.h"
#include "kvtransfer/receiver.h"

namespace baton::decode {

using CallId = uint64_t;

// A reservation is promised, then landed (gone from here), failed (gone) or revoked; revoked blocks
// are quarantined until the receiver says that no writer is left. There is no lease: a reservation
// lives as long as its call. Engine thread only.
class ReservationTable {
 public:
  // All outlive the table. `runner` has the blocks of `memory`; `clock` times the quarantine.
  ReservationTable(runtime::KvMemory* memory,
                   runtime::ModelRunner* runner,
                   kvtransfer::Receiver* receiver,
                   const base::Clock* clock);

  // Promises blocks for `prompt`, which has none: what the prefix cache holds is shared, the rest
  // and `headroom` blocks for the first tokens are reserved, and at least `keep_available` stay for
  // others. The prompt then has its cached blocks; the others come with Land. Errors:
  // RESOURCE_EXHAUSTED when blocks are short or too many are quarantined; nothing is taken then.
  absl::StatusOr<worker::v1::Handoff> Reserve(CallId call,
                                              runtime::Sequence* prompt,
                                              int headroom,
                                              int keep_available);
  // Every prompt block's id, from block 0.
  const std::vector<kv::BlockId>& blocks(uint64_t reservation_id) const {
    return promises_.at(reservation_id).blocks;
  }

  // The call that waits for it; nothing when it has been revoked or is not known.
  std::optional<CallId> Find(uint64_t reservation_id) const;
  // The blocks have landed: those that did not come to where steps read them are brought there,
  // `prompt` is computed, headroom is back in the pool. Errors: the device's; the reservation is
  // dropped then, and nobody finds the blocks.
  absl::Status Land(const kvtransfer::ReceiverEvent& event, runtime::Sequence* prompt);
  // No writer is left and the blocks are not usable: they are free.
  void Drop(uint64_t reservation_id);
  // The call has ended, as was asked for at `asked_at`. Blocks that a peer may still write into are
  // quarantined (true), the others are free.
  bool Revoke(uint64_t reservation_id, absl::string_view reason, absl::Duration asked_at);
  struct Quiet {
    absl::Duration quarantined;  // how long
    absl::Duration since_asked;
  };
  // The receiver says that a revoked reservation is quiet: its blocks are free. Nothing if it was
  // not revoked.
  std::optional<Quiet> EndQuarantine(uint64_t reservation_id);

  int num_promised() const { return static_cast<int>(promises_.size()); }
  int num_quarantined() const { return static_cast<int>(quarantined_.size()); }

 private:
  struct Promise {
    CallId call;
    std::vector<kv::BlockId> blocks;    // of the prompt, cached ones first
    std::vector<kv::BlockId> missing;   // of them: reserved
    std::vector<kv::BlockId> headroom;  // reserved
  };
  struct Quarantine {
    std::vector<kv::BlockId> blocks;
    absl::Duration since;
    absl::Duration asked_at;
  };

  absl::Status CheckQuarantine() const;

  runtime::KvMemory& memory_;
  runtime::ModelRunner& runner_;
  kvtransfer::Receiver& receiver_;
  const base::Clock& clock_;
  absl::flat_hash_map<uint64_t, Promise> promises_;        // by reservation id
  absl::flat_hash_map<uint64_t, Quarantine> quarantined_;  // by reservation id
};

}  // namespace baton::decode
