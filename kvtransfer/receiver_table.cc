#include "kvtransfer/receiver_table.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"

namespace baton::kvtransfer {
namespace {

worker::v1::PeerMessage RevokeMessage(worker::v1::Handoff handoff, absl::string_view reason) {
  worker::v1::PeerMessage message;
  *message.mutable_revoke()->mutable_handoff() = std::move(handoff);
  message.mutable_revoke()->set_reason(std::string(reason));
  return message;
}

}  // namespace

worker::v1::Handoff ReceiverTable::Reserve(Reservation reservation, uint64_t random_id) {
  BATON_CHECK(static_cast<int>(reservation.blocks.size()) ==
              kv::BlocksFor(reservation.prompt_tokens));
  BATON_CHECK(reservation.first_missing_block >= 0 &&
              reservation.first_missing_block <= static_cast<int>(reservation.blocks.size()));
  for (kv::BlockId block : reservation.blocks)
    BATON_CHECK(block >= 0 && block < layout_.num_blocks, "block=", block);
  auto entry = std::make_unique<Entry>();
  reservation.reservation_id = random_id;
  reservation.epoch = ++epoch_;
  entry->shape = {reservation.prompt_tokens, reservation.first_missing_block};
  entry->reservation = std::move(reservation);
  worker::v1::Handoff handoff = HandoffOf(*entry);
  BATON_CHECK(entries_.emplace(random_id, std::move(entry)).second, "reservation id drawn twice");
  return handoff;
}

bool ReceiverTable::Revoke(uint64_t reservation_id,
                           absl::string_view reason,
                           ReceiverEffects* effects) {
  Entry* entry = Find(reservation_id);
  if (entry == nullptr) return false;
  End(entry, ReceiverEvent::Kind::kQuiesced, absl::CancelledError(reason), /*tell_peer=*/true,
      effects);
  return true;
}

GrantFrame ReceiverTable::Open(SessionId session,
                               const OpenFrame& open,
                               bool peer_writes,
                               absl::string_view transport) {
  GrantFrame grant;
  grant.reservation_id = open.reservation_id;
  Entry* entry = Find(open.reservation_id);
  if (entry == nullptr) {
    grant.status = absl::NotFoundError("hand-over: no such reservation");
  } else if (entry->reservation.epoch != open.epoch) {
    grant.status = absl::FailedPreconditionError(
        absl::StrCat("hand-over: epoch=", open.epoch, " current=", entry->reservation.epoch));
  } else if (entry->session != 0) {
    grant.status = absl::FailedPreconditionError("hand-over: opened before");
  }
  if (!grant.status.ok()) return grant;
  entry->session = session;
  entry->transport = std::string(transport);
  entry->peer_quiet = !peer_writes;
  entry->coverage.emplace(entry->shape, layout_.num_layers, layout_.num_kv_heads);
  grant.prompt_tokens = static_cast<uint32_t>(entry->shape.prompt_tokens);
  grant.first_missing_block = static_cast<uint32_t>(entry->shape.first_missing_block);
  grant.blocks = entry->reservation.blocks;
  return grant;
}

std::optional<std::vector<ByteRange>> ReceiverTable::BeginUnit(SessionId session,
                                                               const UnitFrame& unit,
                                                               absl::Duration now,
                                                               ReceiverEffects* effects) {
  Entry* entry = Find(unit.reservation_id);
  if (entry == nullptr || entry->session != session || entry->ending ||
      entry->reservation.epoch != unit.epoch) {
    return std::nullopt;
  }
  absl::Status status = CheckRect(unit.rect, entry->shape, layout_);
  if (status.ok() && unit.sequence != entry->units) {
    status = absl::DataLossError(
        absl::StrCat("hand-over: unit=", unit.sequence, " expected=", entry->units));
  }
  if (status.ok() && unit.bytes != BytesOf(unit.rect, entry->shape, layout_)) {
    status =
        absl::DataLossError(absl::StrCat("hand-over: unit_bytes=", unit.bytes,
                                         " expected=", BytesOf(unit.rect, entry->shape, layout_)));
  }
  if (status.ok()) status = entry->coverage->Add(unit.rect);
  if (!status.ok()) {
    End(entry, ReceiverEvent::Kind::kFailed, absl::DataLossError(status.message()),
        /*tell_peer=*/true, effects);
    return std::nullopt;
  }
  entry->unit_open = true;
  if (entry->units == 0) entry->first_unit_at = now;
  const absl::Span<const kv::BlockId> table = entry->reservation.blocks;
  return RangesOf(unit.rect, entry->shape, layout_, table.subspan(unit.rect.block_begin));
}

bool ReceiverTable::Wants(uint64_t reservation_id) const {
  const auto found = entries_.find(reservation_id);
  return found != entries_.end() && !found->second->ending;
}

void ReceiverTable::EndUnit(const UnitFrame& unit,
                            const absl::Status& arrived,
                            absl::Duration now,
                            ReceiverEffects* effects) {
  Entry* entry = Find(unit.reservation_id);
  if (entry == nullptr) return;  // FailAll
  entry->unit_open = false;
  if (entry->ending) {
    FinishIfQuiet(entry, effects);
  } else if (!arrived.ok()) {
    End(entry, ReceiverEvent::Kind::kFailed, arrived, /*tell_peer=*/true, effects);
  } else {
    ++entry->units;
    entry->last_unit_at = now;
    entry->bytes += unit.bytes;
    LandIfComplete(entry, now, effects);
  }
}

void ReceiverTable::OnCommit(SessionId session,
                             const worker::v1::Commit& commit,
                             absl::Duration now,
                             ReceiverEffects* effects) {
  Entry* entry = Find(session, commit.handoff());
  if (entry == nullptr || entry->session == 0 || entry->ending || entry->commit.has_value()) return;
  entry->commit = commit;
  entry->commit_at = now;
  LandIfComplete(entry, now, effects);
}

void ReceiverTable::LandIfComplete(Entry* entry, absl::Duration now, ReceiverEffects* effects) {
  if (!entry->commit.has_value() || entry->unit_open) return;
  const worker::v1::Commit& commit = *entry->commit;
  if (entry->units < commit.units_sent()) return;  // the control channel was faster
  if (entry->units > commit.units_sent() || entry->bytes != commit.bytes() ||
      !entry->coverage->complete()) {
    End(entry, ReceiverEvent::Kind::kFailed,
        absl::DataLossError(absl::StrCat(
            "hand-over: units=", entry->units, " committed_units=", commit.units_sent(),
            " bytes=", entry->bytes, " committed_bytes=", commit.bytes(),
            " missing=", entry->coverage->missing())),
        /*tell_peer=*/true, effects);
    return;
  }
  ReceiverEvent event;
  event.kind = ReceiverEvent::Kind::kLanded;
  event.reservation_id = entry->reservation.reservation_id;
  event.first_tokens.assign(commit.first_tokens().begin(), commit.first_tokens().end());
  event.bytes = entry->bytes;
  event.exposed = now - entry->commit_at;
  event.arrival = entry->last_unit_at - entry->first_unit_at;
  event.transport = entry->transport;
  effects->events.push_back(std::move(event));
  worker::v1::PeerMessage landed;
  *landed.mutable_landed()->mutable_handoff() = HandoffOf(*entry);
  effects->messages.emplace_back(entry->session, std::move(landed));
  entries_.erase(entry->reservation.reservation_id);
}

void ReceiverTable::OnQuiesced(SessionId session,
                               const worker::v1::Quiesced& quiesced,
                               ReceiverEffects* effects) {
  Entry* entry = Find(session, quiesced.handoff());
  if (entry == nullptr || !entry->ending) return;
  entry->peer_quiet = true;
  FinishIfQuiet(entry, effects);
}

void ReceiverTable::OnAbort(SessionId session,
                            const worker::v1::Abort& abort,
                            ReceiverEffects* effects) {
  Entry* entry = Find(session, abort.handoff());
  if (entry == nullptr) return;
  entry->peer_quiet = true;  // a sender aborts after its last write
  End(entry, ReceiverEvent::Kind::kFailed,
      absl::UnavailableError(
          absl::StrCat("hand-over aborted by the prefill worker: ", abort.reason())),
      /*tell_peer=*/false, effects);
}

void ReceiverTable::SessionGone(SessionId session,
                                const absl::Status& reason,
                                ReceiverEffects* effects) {
  for (uint64_t id : IdsOf(session)) {
    End(Find(id), ReceiverEvent::Kind::kFailed, reason, /*tell_peer=*/false, effects);
  }
}

void ReceiverTable::SessionQuiet(SessionId session, ReceiverEffects* effects) {
  for (uint64_t id : IdsOf(session)) {
    Entry* entry = Find(id);
    entry->peer_quiet = true;
    End(entry, ReceiverEvent::Kind::kFailed, absl::UnavailableError("prefill worker is gone"),
        /*tell_peer=*/false, effects);
  }
}

void ReceiverTable::FailAll(const absl::Status& reason, ReceiverEffects* effects) {
  for (auto& [id, entry] : entries_) {
    ReceiverEvent event;
    event.kind = ReceiverEvent::Kind::kFailed;
    event.reservation_id = id;
    event.status = reason;
    effects->events.push_back(std::move(event));
  }
  entries_.clear();
}

std::vector<SessionId> ReceiverTable::Restless(absl::Duration now, absl::Duration limit) {
  std::vector<SessionId> sessions;
  for (auto& [id, entry] : entries_) {
    if (!entry->ending) continue;
    if (!entry->restless_since.has_value()) entry->restless_since = now;
    if (now - *entry->restless_since < limit) continue;
    if (std::find(sessions.begin(), sessions.end(), entry->session) == sessions.end())
      sessions.push_back(entry->session);
  }
  return sessions;
}

worker::v1::Handoff ReceiverTable::HandoffOf(const Entry& entry) const {
  worker::v1::Handoff handoff;
  handoff.set_decode_incarnation(incarnation_);
  handoff.set_reservation_id(entry.reservation.reservation_id);
  handoff.set_epoch(entry.reservation.epoch);
  return handoff;
}

ReceiverTable::Entry* ReceiverTable::Find(uint64_t reservation_id) {
  const auto found = entries_.find(reservation_id);
  return found == entries_.end() ? nullptr : found->second.get();
}

ReceiverTable::Entry* ReceiverTable::Find(SessionId session, const worker::v1::Handoff& handoff) {
  Entry* entry = Find(handoff.reservation_id());
  if (entry == nullptr || handoff.decode_incarnation() != incarnation_ ||
      handoff.epoch() != entry->reservation.epoch) {
    return nullptr;
  }
  // One that is not opened yet belongs to whoever knows its name.
  return entry->session == session || entry->session == 0 ? entry : nullptr;
}

void ReceiverTable::End(Entry* entry,
                        ReceiverEvent::Kind kind,
                        const absl::Status& status,
                        bool tell_peer,
                        ReceiverEffects* effects) {
  if (!entry->ending) {
    entry->ending = true;
    entry->end_kind = kind;
    entry->end_status = status;
    if (tell_peer && entry->session != 0) {
      effects->messages.emplace_back(entry->session,
                                     RevokeMessage(HandoffOf(*entry), status.message()));
    }
  }
  FinishIfQuiet(entry, effects);
}

void ReceiverTable::FinishIfQuiet(Entry* entry, ReceiverEffects* effects) {
  if (!entry->peer_quiet || entry->unit_open) return;
  ReceiverEvent event;
  event.kind = entry->end_kind;
  event.reservation_id = entry->reservation.reservation_id;
  event.status = entry->end_status;
  event.bytes = entry->bytes;
  event.transport = entry->transport;
  effects->events.push_back(std::move(event));
  entries_.erase(entry->reservation.reservation_id);
}

std::vector<uint64_t> ReceiverTable::IdsOf(SessionId session) const {
  std::vector<uint64_t> ids;
  for (const auto& [id, entry] : entries_) {
    if (entry->session == session) ids.push_back(id);
  }
  return ids;
}

}  // namespace baton::kvtransfer
