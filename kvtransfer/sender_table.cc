#include "kvtransfer/sender_table.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::kvtransfer {

absl::Status SenderTable::CheckSpec(const TransferSpec& spec) const {
  if (!broken_.ok()) return broken_;
  if (spec.handoff.decode_incarnation() != peer_incarnation_) {
    return absl::UnavailableError("hand-over: the decode worker has been restarted");
  }
  if (spec.prompt_tokens < 1 || spec.first_missing_block < 0 ||
      spec.first_missing_block > kv::BlocksFor(spec.prompt_tokens) ||
      static_cast<int>(spec.peer_blocks.size()) != kv::BlocksFor(spec.prompt_tokens)) {
    return absl::InvalidArgumentError(
        absl::StrCat("hand-over: prompt_tokens=", spec.prompt_tokens, " first_missing_block=",
                     spec.first_missing_block, " block_table=", spec.peer_blocks.size()));
  }
  if (by_reservation_.contains(spec.handoff.reservation_id())) {
    return absl::FailedPreconditionError("hand-over: begun before");
  }
  return absl::OkStatus();
}

TransferId SenderTable::Begin(TransferSpec spec, absl::Duration now) {
  const TransferId id = ++last_id_;
  absl::Status status = CheckSpec(spec);
  if (!status.ok()) {
    effects_.done.emplace_back(std::move(spec.on_done), TransferResult{std::move(status)});
    return id;
  }
  effects_.opens.push_back({spec.handoff.reservation_id(), spec.handoff.epoch()});
  by_reservation_[spec.handoff.reservation_id()] = id;
  Transfer& transfer = transfers_[id];
  transfer.shape = {spec.prompt_tokens, spec.first_missing_block};
  transfer.spec = std::move(spec);
  transfer.waiting_since = now;
  return id;
}

void SenderTable::Push(TransferId id,
                       int block_begin,
                       int block_end,
                       int layer_begin,
                       int layer_end,
                       absl::Span<const kv::BlockId> our_blocks) {
  Transfer* transfer = Find(id);
  if (transfer == nullptr || transfer->ending || transfer->commit_wanted) return;
  block_begin = std::max(block_begin, transfer->shape.first_missing_block);
  if (block_begin >= block_end || layer_begin >= layer_end) return;  // the peer holds these blocks
  BATON_CHECK(block_end <= static_cast<int>(our_blocks.size()) && layer_begin >= 0);
  UnitRect rect;
  rect.block_begin = static_cast<uint32_t>(block_begin);
  rect.block_end = static_cast<uint32_t>(block_end);
  rect.layer_begin = static_cast<uint32_t>(layer_begin);
  rect.layer_end = static_cast<uint32_t>(layer_end);
  rect.head_end = static_cast<uint32_t>(layout_.num_kv_heads);
  absl::Status status = CheckRect(rect, transfer->shape, layout_);
  if (status.ok() && transfer->pending.size() >= limits_.pending_units) {
    status = absl::ResourceExhaustedError(
        absl::StrCat("hand-over: pending_units limit=", limits_.pending_units));
  }
  if (!status.ok()) {
    End(id, status, Goodbye::kAbort);
    return;
  }
  for (const UnitRect& slice : SplitByRanks(rect, layout_, peer_layout_)) {
    for (const UnitRect& part : SplitRect(slice, transfer->shape, layout_, limits_.unit_bytes)) {
      const auto ids = our_blocks.subspan(part.block_begin, part.block_end - part.block_begin);
      transfer->pending.push_back({part, {ids.begin(), ids.end()}});
      transfer->bytes_pushed += BytesOf(part, transfer->shape, layout_);
    }
  }
}

void SenderTable::Commit(TransferId id,
                         std::vector<worker::v1::Token> first_tokens,
                         absl::Duration now) {
  Transfer* transfer = Find(id);
  if (transfer == nullptr || transfer->ending || transfer->commit_wanted) return;
  const HandoffShape& shape = transfer->shape;
  size_t expected = 0;
  if (shape.first_missing_block < shape.num_blocks()) {
    const UnitRect all{static_cast<uint32_t>(shape.first_missing_block),
                       static_cast<uint32_t>(shape.num_blocks()),
                       0,
                       static_cast<uint32_t>(layout_.num_layers),
                       0,
                       static_cast<uint32_t>(layout_.num_kv_heads)};
    expected = BytesOf(all, shape, layout_);
  }
  if (transfer->bytes_pushed != expected) {
    End(id,
        absl::InternalError(absl::StrCat("hand-over: pushed_bytes=", transfer->bytes_pushed,
                                         " expected=", expected)),
        Goodbye::kAbort);
    return;
  }
  transfer->commit_wanted = true;
  transfer->first_tokens = std::move(first_tokens);
  CommitIfDone(id, now);
}

void SenderTable::CommitIfDone(TransferId id, absl::Duration now) {
  Transfer* transfer = Find(id);
  if (transfer == nullptr || !transfer->commit_wanted || transfer->state != State::kSending ||
      !transfer->pending.empty() || writing_ == id) {
    return;
  }
  transfer->state = State::kCommitted;
  transfer->waiting_since = now;
  worker::v1::PeerMessage message;
  worker::v1::Commit* commit = message.mutable_commit();
  *commit->mutable_handoff() = transfer->spec.handoff;
  commit->set_units_sent(transfer->units_sent);
  commit->set_bytes(transfer->bytes_sent);
  for (worker::v1::Token& token : transfer->first_tokens)
    *commit->add_first_tokens() = std::move(token);
  effects_.messages.push_back(std::move(message));
}

void SenderTable::Abort(TransferId id, absl::string_view reason) {
  if (Find(id) != nullptr) End(id, absl::CancelledError(reason), Goodbye::kAbort);
}

void SenderTable::OnGrant(const GrantFrame& grant, absl::Duration now) {
  const auto found = by_reservation_.find(grant.reservation_id);
  if (found == by_reservation_.end()) return;
  const TransferId id = found->second;
  Transfer* transfer = Find(id);
  if (transfer->state != State::kOpening || transfer->ending) return;
  if (!grant.status.ok()) {
    End(id, grant.status, Goodbye::kNone);
    return;
  }
  const bool agrees =
      grant.prompt_tokens == static_cast<uint32_t>(transfer->shape.prompt_tokens) &&
      grant.first_missing_block == static_cast<uint32_t>(transfer->shape.first_missing_block) &&
      grant.blocks == transfer->spec.peer_blocks;
  if (!agrees) {
    End(id,
        absl::DataLossError("hand-over: the ticket differs from the decode worker's reservation"),
        Goodbye::kAbort);
    return;
  }
  for (kv::BlockId block : grant.blocks) {
    if (block >= 0 && block < peer_layout_.num_blocks) continue;
    End(id,
        absl::DataLossError(
            absl::StrCat("hand-over: block=", block, " of ", peer_layout_.num_blocks)),
        Goodbye::kAbort);
    return;
  }
  transfer->state = State::kSending;
  CommitIfDone(id, now);
}

absl::Status SenderTable::OnAck(const AckFrame& ack, absl::Duration now) {
  if (outstanding_.empty() || outstanding_.front().reservation_id != ack.reservation_id ||
      outstanding_.front().sequence != ack.sequence) {
    return absl::InvalidArgumentError("data connection: acknowledged what is not the oldest unit");
  }
  progress_at_ = now;
  const Outstanding unit = outstanding_.front();
  outstanding_.pop_front();
  outstanding_bytes_ -= unit.bytes;
  Transfer* transfer = Find(unit.transfer);
  if (transfer == nullptr) return absl::OkStatus();
  --transfer->unacked;
  if (transfer->state == State::kCommitted) transfer->waiting_since = now;
  return absl::OkStatus();
}

void SenderTable::OnLanded(const worker::v1::Landed& landed) {
  const TransferId id = IdOf(landed.handoff());
  Transfer* transfer = Find(id);
  if (transfer == nullptr || transfer->state != State::kCommitted) return;
  End(id, absl::OkStatus(), Goodbye::kNone);
}

void SenderTable::OnRevoke(const worker::v1::Revoke& revoke) {
  const TransferId id = IdOf(revoke.handoff());
  if (id != 0) {
    End(id, absl::CancelledError(absl::StrCat("revoked by the decode worker: ", revoke.reason())),
        Goodbye::kQuiesced);
    return;
  }
  worker::v1::PeerMessage quiesced;
  *quiesced.mutable_quiesced()->mutable_handoff() = revoke.handoff();
  effects_.messages.push_back(std::move(quiesced));
}

std::optional<IssuedUnit> SenderTable::NextUnit(absl::Duration now) {
  if (writing_ != 0 || outstanding_.size() >= limits_.window_units) return std::nullopt;
  auto at = transfers_.upper_bound(last_served_);
  for (size_t tried = 0; tried < transfers_.size(); ++tried, ++at) {
    if (at == transfers_.end()) at = transfers_.begin();
    Transfer& transfer = at->second;
    if (transfer.state != State::kSending || transfer.ending || transfer.pending.empty()) continue;
    const PendingUnit& pending = transfer.pending.front();
    const size_t bytes = BytesOf(pending.rect, transfer.shape, layout_);
    if (!outstanding_.empty() && outstanding_bytes_ + bytes > limits_.window_bytes)
      return std::nullopt;

    IssuedUnit unit;
    unit.frame.reservation_id = transfer.spec.handoff.reservation_id();
    unit.frame.epoch = transfer.spec.handoff.epoch();
    unit.frame.sequence = transfer.units_sent++;
    unit.frame.rect = pending.rect;
    unit.frame.bytes = bytes;
    unit.from = RangesOf(pending.rect, transfer.shape, layout_, pending.our_blocks);
    const absl::Span<const kv::BlockId> peer_blocks = transfer.spec.peer_blocks;
    unit.to = RangesOf(pending.rect, transfer.shape, peer_layout_,
                       peer_blocks.subspan(pending.rect.block_begin));
    transfer.pending.pop_front();
    transfer.bytes_sent += bytes;
    ++transfer.unacked;
    if (outstanding_.empty()) progress_at_ = now;
    outstanding_.push_back({unit.frame.reservation_id, unit.frame.sequence, bytes, at->first});
    outstanding_bytes_ += bytes;
    writing_ = last_served_ = at->first;
    writing_since_ = now;
    return unit;
  }
  return std::nullopt;
}

void SenderTable::UnitWritten(absl::Duration now) {
  const TransferId id = std::exchange(writing_, 0);
  progress_at_ = now;
  Transfer* transfer = Find(id);
  if (transfer == nullptr) return;
  transfer->busy += now - writing_since_;
  if (transfer->ending) {
    Finish(id);
  } else {
    CommitIfDone(id, now);
  }
}

absl::Duration SenderTable::StallAfter() const {
  const absl::Duration predicted =
      absl::Seconds(static_cast<double>(outstanding_bytes_) / limits_.bytes_per_second);
  return std::max(limits_.stall_timeout_min, 3 * predicted);
}

absl::Status SenderTable::CheckTimers(absl::Duration now) {
  const bool stalled = !outstanding_.empty() && now - progress_at_ > StallAfter();
  if (stalled && writing_ != 0) {
    return absl::UnavailableError(absl::StrCat("hand-over: stalled in a unit, no progress for ",
                                               absl::FormatDuration(now - progress_at_)));
  }
  std::vector<std::pair<TransferId, std::string>> late;
  for (const auto& [id, transfer] : transfers_) {
    if (transfer.ending) continue;
    if (stalled && transfer.unacked > 0) {
      late.emplace_back(id, "stalled: units are not acknowledged");
    } else if (transfer.state != State::kSending &&
               now - transfer.waiting_since > limits_.reply_timeout) {
      late.emplace_back(id, transfer.state == State::kOpening
                                ? "the decode worker does not grant it"
                                : "the decode worker does not confirm it");
    }
  }
  for (const auto& [id, reason] : late) {
    End(id, absl::UnavailableError(absl::StrCat("hand-over: ", reason)), Goodbye::kAbort);
  }
  return absl::OkStatus();
}

absl::Duration SenderTable::NextTimer() const {
  absl::Duration next = absl::InfiniteDuration();
  bool unacked = writing_ != 0;
  for (const auto& [id, transfer] : transfers_) {
    if (transfer.state != State::kSending)
      next = std::min(next, transfer.waiting_since + limits_.reply_timeout);
    unacked = unacked || transfer.unacked > 0;
  }
  if (unacked && !outstanding_.empty()) next = std::min(next, progress_at_ + StallAfter());
  return next;
}

void SenderTable::FailAll(const absl::Status& reason) {
  broken_ = reason;
  writing_ = 0;
  outstanding_.clear();
  outstanding_bytes_ = 0;
  while (!transfers_.empty()) End(transfers_.begin()->first, reason, Goodbye::kAbort);
}

SenderTable::Transfer* SenderTable::Find(TransferId id) {
  const auto found = transfers_.find(id);
  return found == transfers_.end() ? nullptr : &found->second;
}

TransferId SenderTable::IdOf(const worker::v1::Handoff& handoff) const {
  const auto found = by_reservation_.find(handoff.reservation_id());
  if (found == by_reservation_.end()) return 0;
  const worker::v1::Handoff& ours = transfers_.at(found->second).spec.handoff;
  return ours.epoch() == handoff.epoch() &&
                 ours.decode_incarnation() == handoff.decode_incarnation()
             ? found->second
             : 0;
}

void SenderTable::End(TransferId id, const absl::Status& status, Goodbye goodbye) {
  Transfer* transfer = Find(id);
  if (!transfer->ending) {
    transfer->ending = true;
    transfer->end_status = status;
    transfer->goodbye = goodbye;
    transfer->pending.clear();
  } else if (goodbye == Goodbye::kQuiesced) {
    transfer->goodbye = goodbye;  // a Revoke is always answered
  }
  if (writing_ != id) Finish(id);
}

void SenderTable::Finish(TransferId id) {
  Transfer& transfer = transfers_.at(id);
  if (transfer.goodbye != Goodbye::kNone) {
    worker::v1::PeerMessage message;
    if (transfer.goodbye == Goodbye::kQuiesced) {
      *message.mutable_quiesced()->mutable_handoff() = transfer.spec.handoff;
    } else {
      *message.mutable_abort()->mutable_handoff() = transfer.spec.handoff;
      message.mutable_abort()->set_reason(std::string(transfer.end_status.message()));
    }
    effects_.messages.push_back(std::move(message));
  }
  TransferResult result;
  result.status = transfer.end_status;
  result.units_sent = transfer.units_sent;
  result.bytes = transfer.bytes_sent;
  result.busy = transfer.busy;
  effects_.done.emplace_back(std::move(transfer.spec.on_done), std::move(result));
  by_reservation_.erase(transfer.spec.handoff.reservation_id());
  transfers_.erase(id);
}

}  // namespace baton::kvtransfer
