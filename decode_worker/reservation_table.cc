#include "decode_worker/reservation_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "kvtransfer/transport_terms.h"

namespace baton::decode {
namespace {

// Above this share of the pool in quarantine nothing is promised any more: a peer that does not
// come to rest must not eat the pool.
constexpr int kQuarantineDivisor = 20;  // 5 %

}  // namespace

ReservationTable::ReservationTable(runtime::KvMemory* memory,
                                   runtime::ModelRunner* runner,
                                   kvtransfer::Receiver* receiver,
                                   const base::Clock* clock)
    : memory_(*memory), runner_(*runner), receiver_(*receiver), clock_(*clock) {}

absl::Status ReservationTable::CheckQuarantine() const {
  // One request may always be in quarantine, however big.
  if (quarantined_.size() < 2) return absl::OkStatus();
  const int limit = memory_.pool().num_blocks() / kQuarantineDivisor;
  const int now = memory_.pool().counts().quarantined;
  if (now <= limit) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("kv reserve: quarantined_blocks=", now, " limit=", limit));
}

absl::StatusOr<worker::v1::Handoff> ReservationTable::Reserve(CallId call,
                                                              runtime::Sequence* prompt,
                                                              int headroom,
                                                              int keep_available) {
  BATON_RETURN_IF_ERROR(CheckQuarantine());
  const int prompt_blocks = kv::BlocksFor(prompt->num_tokens());
  // The prefill worker computes the last token, so every full block may come from the cache.
  memory_.MatchPrefix(prompt, prompt->num_tokens() / kv::kBlockTokens);
  const int cached = static_cast<int>(prompt->blocks.size());
  const int missing = prompt_blocks - cached;
  const int available = memory_.pool().num_available();
  absl::StatusOr<std::vector<kv::BlockId>> taken = absl::ResourceExhaustedError(
      absl::StrCat("kv reserve: need_blocks=", missing + headroom, " available_blocks=", available,
                   " kept_for_others=", keep_available));
  if (missing + headroom + keep_available <= available) {
    taken = memory_.pool().Allocate(missing + headroom, kv::BlockState::kReserved);
  }
  if (!taken.ok()) {
    memory_.Release(prompt);
    return taken.status();
  }
  Promise promise;
  promise.call = call;
  promise.missing.assign(taken->begin(), taken->begin() + missing);
  promise.headroom.assign(taken->begin() + missing, taken->end());
  promise.blocks = prompt->blocks;
  promise.blocks.insert(promise.blocks.end(), promise.missing.begin(), promise.missing.end());
  kvtransfer::Reservation reservation;
  reservation.prompt_tokens = prompt->num_tokens();
  reservation.first_missing_block = cached;
  reservation.blocks = promise.blocks;
  worker::v1::Handoff handoff = receiver_.Reserve(std::move(reservation));
  BATON_CHECK(promises_.emplace(handoff.reservation_id(), std::move(promise)).second);
  return handoff;
}

std::optional<CallId> ReservationTable::Find(uint64_t reservation_id) const {
  const auto found = promises_.find(reservation_id);
  if (found == promises_.end()) return std::nullopt;
  return found->second.call;
}

absl::Status ReservationTable::Land(const kvtransfer::ReceiverEvent& event,
                                    runtime::Sequence* prompt) {
  const auto found = promises_.find(event.reservation_id);
  const Promise& promise = found->second;
  if (!kvtransfer::IsBetweenDevices(event.transport)) {
    const absl::Status brought = runner_.BlocksLanded(promise.missing);
    if (!brought.ok()) {
      Drop(event.reservation_id);
      return brought;
    }
  }
  memory_.pool().Activate(promise.missing);
  memory_.pool().Release(promise.headroom);
  prompt->blocks = promise.blocks;
  prompt->num_computed = prompt->num_tokens();
  memory_.Publish(prompt);
  promises_.erase(found);
  return absl::OkStatus();
}

void ReservationTable::Drop(uint64_t reservation_id) {
  const auto found = promises_.find(reservation_id);
  if (found == promises_.end()) return;
  memory_.pool().Release(found->second.missing);
  memory_.pool().Release(found->second.headroom);
  promises_.erase(found);
}

bool ReservationTable::Revoke(uint64_t reservation_id,
                              absl::string_view reason,
                              absl::Duration asked_at) {
  const auto found = promises_.find(reservation_id);
  if (found == promises_.end()) return false;
  // False: it has landed or failed, the event is on its way here, and nobody writes any more.
  if (!receiver_.Revoke(reservation_id, reason)) {
    Drop(reservation_id);
    return false;
  }
  Promise promise = std::move(found->second);
  promises_.erase(found);
  memory_.pool().Quarantine(promise.missing);
  memory_.pool().Release(promise.headroom);
  quarantined_.emplace(reservation_id,
                       Quarantine{std::move(promise.missing), clock_.Now(), asked_at});
  return true;
}

std::optional<ReservationTable::Quiet> ReservationTable::EndQuarantine(uint64_t reservation_id) {
  const auto found = quarantined_.find(reservation_id);
  if (found == quarantined_.end()) return std::nullopt;
  const absl::Duration now = clock_.Now();
  const Quiet quiet{now - found->second.since, now - found->second.asked_at};
  memory_.pool().EndQuarantine(found->second.blocks);
  quarantined_.erase(found);
  return quiet;
}

}  // namespace baton::decode
