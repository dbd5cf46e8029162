#pragma once

// The states of hand-overs on the decode side, as a plain table: no threads, no sockets, no clock.
//
//   event \ state        reserved               filling                    ending
//   Open                 -> filling, grant      refused                    refused
//   unit                 ignored                counted, may land          ignored
//   Commit               ignored                kept, may land             ignored
//   Revoke (ours)        kQuiesced              -> ending (kQuiesced)      no change
//   Abort (peer's)       kFailed                -> quiet, kFailed          -> quiet
//   Quiesced (peer's)    ignored                ignored                    -> quiet
//   wrong unit, totals   -                      -> ending (kFailed)        -
//   session gone         -                      -> ending (kFailed)        no change
//   session quiet        -                      -> quiet, kFailed          -> quiet
//
// A hand-over leaves the table with its one terminal event: kLanded out of filling, the others out
// of reserved or out of ending once it is quiet: nobody writes into its blocks. What has left is
// unknown, and what is unknown is refused.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "baton/worker/v1/peer.pb.h"
#include "kvtransfer/frame.h"
#include "kvtransfer/receiver.h"
#include "kvtransfer/transfer_plan.h"

namespace baton::kvtransfer {

// What the table wants done, outside of any lock.
struct ReceiverEffects {
  std::vector<ReceiverEvent> events;
  std::vector<std::pair<SessionId, worker::v1::PeerMessage>> messages;
};

// Thread-compatible.
class ReceiverTable {
 public:
  ReceiverTable(const kv::KvLayout& layout, absl::string_view incarnation)
      : layout_(layout), incarnation_(incarnation) {}

  worker::v1::Handoff Reserve(Reservation reservation, uint64_t random_id);
  // False when there is nothing to revoke.
  bool Revoke(uint64_t reservation_id, absl::string_view reason, ReceiverEffects* effects);

  // A session asks to write. `peer_writes`: it does so itself (PutListener::peer_writes).
  GrantFrame Open(SessionId session,
                  const OpenFrame& open,
                  bool peer_writes,
                  absl::string_view transport);
  // A unit begins to arrive: where its bytes belong, in order. Nothing when nobody wants it: it
  // must be skipped, and EndUnit must not be called.
  std::optional<std::vector<ByteRange>> BeginUnit(SessionId session,
                                                  const UnitFrame& unit,
                                                  absl::Duration now,
                                                  ReceiverEffects* effects);
  // Between BeginUnit and EndUnit: whether it is still wanted.
  bool Wants(uint64_t reservation_id) const;
  // `arrived`: OK when all bytes are there; else what is wrong with them.
  void EndUnit(const UnitFrame& unit,
               const absl::Status& arrived,
               absl::Duration now,
               ReceiverEffects* effects);

  void OnCommit(SessionId session,
                const worker::v1::Commit& commit,
                absl::Duration now,
                ReceiverEffects* effects);
  void OnQuiesced(SessionId session,
                  const worker::v1::Quiesced& quiesced,
                  ReceiverEffects* effects);
  void OnAbort(SessionId session, const worker::v1::Abort& abort, ReceiverEffects* effects);
  // The session's control or data connection is lost: nothing more will land.
  void SessionGone(SessionId session, const absl::Status& reason, ReceiverEffects* effects);
  // ... and it is proved that nothing of it is written any more.
  void SessionQuiet(SessionId session, ReceiverEffects* effects);
  // The end of the worker: every hand-over fails.
  void FailAll(const absl::Status& reason, ReceiverEffects* effects);

  // Sessions that have been asked to come to rest and have not for `limit`, counted from the first
  // call that saw it.
  std::vector<SessionId> Restless(absl::Duration now, absl::Duration limit);

  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    Reservation reservation;
    HandoffShape shape;
    SessionId session = 0;  // 0: reserved
    std::string transport;
    std::optional<Coverage> coverage;  // from filling on
    uint32_t units = 0;
    uint64_t bytes = 0;
    std::optional<worker::v1::Commit> commit;
    absl::Duration commit_at;
    absl::Duration first_unit_at, last_unit_at;
    bool peer_quiet = true;  // the peer itself writes no more
    bool unit_open = false;  // between BeginUnit and EndUnit
    bool ending = false;
    ReceiverEvent::Kind end_kind = ReceiverEvent::Kind::kFailed;
    absl::Status end_status;
    std::optional<absl::Duration> restless_since;  // ending, as Restless saw it
  };

  worker::v1::Handoff HandoffOf(const Entry& entry) const;
  // The entry that `handoff` names, if it is this session's.
  Entry* Find(SessionId session, const worker::v1::Handoff& handoff);
  Entry* Find(uint64_t reservation_id);
  void End(Entry* entry,
           ReceiverEvent::Kind kind,
           const absl::Status& status,
           bool tell_peer,
           ReceiverEffects* effects);
  // May erase the entry.
  void FinishIfQuiet(Entry* entry, ReceiverEffects* effects);
  void LandIfComplete(Entry* entry, absl::Duration now, ReceiverEffects* effects);
  std::vector<uint64_t> IdsOf(SessionId session) const;

  const kv::KvLayout layout_;
  const std::string incarnation_;
  uint64_t epoch_ = 0;
  std::map<uint64_t, std::unique_ptr<Entry>> entries_;  // by reservation id; addresses stay
};

}  // namespace baton::kvtransfer
