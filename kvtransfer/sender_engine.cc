#include "kvtransfer/sender_engine.h"

#include <algorithm>
#include <variant>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "kvtransfer/heartbeat.h"

namespace baton::kvtransfer {
namespace {

SenderLimits Limits(const SenderOptions& options, double bytes_per_second) {
  SenderLimits limits;
  limits.stall_timeout_min = options.stall_timeout_min;
  limits.reply_timeout = options.reply_timeout;
  limits.bytes_per_second = std::max(bytes_per_second, 1e6);
  return limits;
}

}  // namespace

SenderEngine::SenderEngine(const SenderOptions& options,
                           absl::string_view peer_incarnation,
                           PeerLink* link,
                           std::unique_ptr<PutTransport> transport,
                           double bytes_per_second)
    : options_(options),
      transport_name_(transport->name()),
      probe_bytes_per_second_(bytes_per_second),
      link_(link),
      transport_(std::move(transport)),
      heard_at_(options.clock->Now()),
      table_(options.layout,
             transport_->peer_layout(),
             peer_incarnation,
             Limits(options, bytes_per_second)) {}

TransferId SenderEngine::Begin(TransferSpec spec) {
  TransferId id = 0;
  Change([&](SenderTable& table) { id = table.Begin(std::move(spec), clock().Now()); });
  return id;
}

void SenderEngine::Push(TransferId id,
                        int block_begin,
                        int block_end,
                        int layer_begin,
                        int layer_end,
                        absl::Span<const kv::BlockId> our_blocks) {
  Change([&](SenderTable& table) {
    table.Push(id, block_begin, block_end, layer_begin, layer_end, our_blocks);
  });
}

void SenderEngine::Commit(TransferId id, std::vector<worker::v1::Token> first_tokens) {
  Change([&](SenderTable& table) { table.Commit(id, std::move(first_tokens), clock().Now()); });
}

void SenderEngine::Abort(TransferId id, absl::string_view reason) {
  Change([&](SenderTable& table) { table.Abort(id, reason); });
}

void SenderEngine::OnMessage(const worker::v1::PeerMessage& message) {
  Change([&](SenderTable& table) {
    if (message.has_landed()) table.OnLanded(message.landed());
    if (message.has_revoke()) table.OnRevoke(message.revoke());
  });
  base::MutexLock lock(&mutex_);
  heard_at_ = clock().Now();
  unheard_ = 0;
}

void SenderEngine::OnPeerGone(const absl::Status& reason) {
  link_.Drop();
  {
    base::MutexLock lock(&mutex_);
    if (gone_.ok())
      gone_ = absl::UnavailableError(absl::StrCat("decode worker is gone: ", reason.message()));
  }
  Wake();
}

bool SenderEngine::suspect() const {
  base::MutexLock lock(&mutex_);
  return clock().Now() - heard_at_ > kSuspectAfter;
}

size_t SenderEngine::num_transfers() const {
  base::MutexLock lock(&mutex_);
  return table_.size();
}

bool SenderEngine::Step() {
  absl::Status gone;
  {
    base::MutexLock lock(&mutex_);
    gone = gone_;
  }
  if (!gone.ok() && transport_ != nullptr) Break(gone);
  Heartbeat();
  return Work();
}

bool SenderEngine::Work() {
  absl::Status status;
  SenderEffects effects;
  std::optional<IssuedUnit> unit;
  {
    base::MutexLock lock(&mutex_);
    const absl::Duration now = clock().Now();
    if (unit_in_flight_ && transport_ != nullptr && !transport_->busy()) {
      table_.UnitWritten(now);
      unit_in_flight_ = false;
    }
    status = table_.CheckTimers(now);
    if (status.ok() && transport_ != nullptr) unit = table_.NextUnit(now);
    effects = table_.TakeEffects();
  }
  bool worked = !effects.empty() || unit.has_value();
  Deliver(std::move(effects));
  if (unit.has_value()) Issue(*std::move(unit));
  if (status.ok() && transport_ != nullptr) {
    absl::StatusOr<bool> moved = MoveBytes();
    status = moved.status();
    worked = worked || (moved.ok() && *moved);
  }
  if (!status.ok()) Break(status);
  return worked || !status.ok();
}

void SenderEngine::Issue(IssuedUnit unit) {
  if (options_.checksums) {
    const absl::StatusOr<uint64_t> checksum = transport_->Checksum(options_.pool, unit.from);
    if (!checksum.ok()) return Break(checksum.status());
    unit.frame.has_checksum = true;
    unit.frame.checksum = *checksum;
  }
  transport_->Put(unit.frame, unit.from, unit.to);
  unit_in_flight_ = true;
}

absl::StatusOr<bool> SenderEngine::MoveBytes() {
  std::vector<PutTransport::Reply> replies;
  BATON_ASSIGN_OR_RETURN(const size_t written, transport_->Write());
  BATON_RETURN_IF_ERROR(transport_->Read(&replies));
  base::MutexLock lock(&mutex_);
  const absl::Duration now = clock().Now();
  if (written > 0) table_.OnProgress(now);
  for (const PutTransport::Reply& reply : replies) {
    if (const auto* grant = std::get_if<GrantFrame>(&reply)) table_.OnGrant(*grant, now);
    if (const auto* ack = std::get_if<AckFrame>(&reply))
      BATON_RETURN_IF_ERROR(table_.OnAck(*ack, now));
  }
  const bool unit_written = unit_in_flight_ && !transport_->busy();
  return written > 0 || !replies.empty() || unit_written;
}

void SenderEngine::Break(const absl::Status& reason) {
  if (transport_ != nullptr && !absl::IsCancelled(reason)) {
    BATON_LOG(Warning, "hand-over connection ended ", LogField("transport", transport_name_), " ",
              LogField("reason", reason.message()));
  }
  transport_.reset();  // from here on nothing is read from our pool or written into the peer's
  unit_in_flight_ = false;
  SenderEffects effects;
  {
    base::MutexLock lock(&mutex_);
    if (gone_.ok()) gone_ = reason;
    table_.FailAll(absl::IsCancelled(reason) ? reason : absl::UnavailableError(reason.message()));
    effects = table_.TakeEffects();
  }
  Deliver(std::move(effects));
  if (!absl::IsCancelled(reason))
    link_.Close();  // a control channel without a data connection is of no use
}

void SenderEngine::Stop() { Break(absl::CancelledError("prefill worker is shutting down")); }

void SenderEngine::Deliver(SenderEffects effects) {
  for (const OpenFrame& open : effects.opens) {
    if (transport_ != nullptr) transport_->Open(open);
  }
  for (worker::v1::PeerMessage& message : effects.messages) link_.Send(std::move(message));
  for (auto& [on_done, result] : effects.done) on_done(std::move(result));
}

absl::Duration SenderEngine::NextTimer() const {
  base::MutexLock lock(&mutex_);
  const absl::Duration next = table_.NextTimer();
  return transport_ == nullptr ? next : std::min(next, heartbeat_at_);
}

void SenderEngine::Heartbeat() {
  const absl::Duration now = clock().Now();
  if (transport_ == nullptr || now < heartbeat_at_) return;
  heartbeat_at_ = now + kHeartbeatInterval;
  worker::v1::PeerMessage heartbeat;
  heartbeat.mutable_heartbeat()->set_sequence(++heartbeats_);
  link_.Send(std::move(heartbeat));
  base::MutexLock lock(&mutex_);
  if (++unheard_ > kMissedHeartbeatsMax && gone_.ok())
    gone_ = absl::UnavailableError("decode worker is silent: no heartbeat");
}

}  // namespace baton::kvtransfer
