#include "kvtransfer/sender.h"

#include <poll.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/log.h"
#include "engine/base/mutex.h"
#include "engine/base/status_macros.h"
#include "kvtransfer/fingerprint.h"
#include "kvtransfer/link_slot.h"
#include "kvtransfer/sender_table.h"
#include "kvtransfer/transport.h"

namespace baton::kvtransfer {
namespace {

constexpr absl::Duration kHeartbeatInterval = absl::Seconds(1);
constexpr absl::Duration kSuspectAfter = absl::Seconds(3);

class SenderImpl : public Sender {
 public:
  SenderImpl(const SenderOptions& options,
             const worker::v1::Hello& peer,
             PeerLink* link,
             std::unique_ptr<PutTransport> transport,
             double probe_bytes_per_second)
      : options_(options),
        transport_name_(transport->name()),
        probe_bytes_per_second_(probe_bytes_per_second),
        link_(link),
        transport_(std::move(transport)),
        heard_at_(options.clock->Now()),
        table_(options.layout,
               transport_->peer_layout(),
               peer.incarnation(),
               Limits(options, probe_bytes_per_second)) {
    thread_ = std::thread([this] { Run(); });
  }

  ~SenderImpl() override {
    {
      base::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    wake_.Wake();
    thread_.join();
  }

  TransferId Begin(TransferSpec spec) override {
    TransferId id = 0;
    Change([&](SenderTable& table) { id = table.Begin(std::move(spec), options_.clock->Now()); });
    return id;
  }
  void Push(TransferId id,
            int block_begin,
            int block_end,
            int layer_begin,
            int layer_end,
            absl::Span<const kv::BlockId> our_blocks) override {
    Change([&](SenderTable& table) {
      table.Push(id, block_begin, block_end, layer_begin, layer_end, our_blocks);
    });
  }
  void Commit(TransferId id, std::vector<worker::v1::Token> first_tokens) override {
    Change([&](SenderTable& table) {
      table.Commit(id, std::move(first_tokens), options_.clock->Now());
    });
  }
  void Abort(TransferId id, absl::string_view reason) override {
    Change([&](SenderTable& table) { table.Abort(id, reason); });
  }

  void OnMessage(const worker::v1::PeerMessage& message) override {
    Change([&](SenderTable& table) {
      if (message.has_landed()) table.OnLanded(message.landed());
      if (message.has_revoke()) table.OnRevoke(message.revoke());
    });
    base::MutexLock lock(&mutex_);
    heard_at_ = options_.clock->Now();
  }

  void OnPeerGone(const absl::Status& reason) override {
    link_.Drop();
    {
      base::MutexLock lock(&mutex_);
      if (gone_.ok())
        gone_ = absl::UnavailableError(absl::StrCat("decode worker is gone: ", reason.message()));
    }
    wake_.Wake();
  }

  std::string transport_name() const override { return transport_name_; }
  double probe_bytes_per_second() const override { return probe_bytes_per_second_; }
  bool suspect() const override {
    base::MutexLock lock(&mutex_);
    return options_.clock->Now() - heard_at_ > kSuspectAfter;
  }

 private:
  static SenderLimits Limits(const SenderOptions& options, double bytes_per_second) {
    SenderLimits limits;
    limits.stall_timeout_min = options.stall_timeout_min;
    limits.reply_timeout = options.reply_timeout;
    limits.bytes_per_second = std::max(bytes_per_second, 1e6);
    return limits;
  }

  template <typename F>
  void Change(F change) {
    {
      base::MutexLock lock(&mutex_);
      change(table_);
    }
    wake_.Wake();
  }

  void Run();
  // One round: decides under the lock, acts outside of it. Returns whether anything happened.
  bool Step();
  // The connection cannot be used any more: every transfer ends.
  void Break(const absl::Status& reason);
  void Issue(IssuedUnit unit);
  void Deliver(SenderEffects effects);
  absl::StatusOr<bool> MoveBytes();
  void WaitForWork();
  void SendHeartbeat();

  const SenderOptions options_;
  const std::string transport_name_;
  const double probe_bytes_per_second_;
  LinkSlot link_;
  WakeFd wake_;

  // Transfer thread only, but for construction.
  std::unique_ptr<PutTransport> transport_;  // null once broken
  bool unit_in_flight_ = false;              // Put, and UnitWritten not yet said
  absl::Duration heartbeat_at_;
  uint64_t heartbeats_ = 0;

  mutable base::Mutex mutex_;
  absl::Duration heard_at_ ABSL_GUARDED_BY(mutex_);
  SenderTable table_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status gone_ ABSL_GUARDED_BY(mutex_);  // not OK: the peer or the link is gone

  std::thread thread_;
};

void SenderImpl::Run() {
  while (true) {
    absl::Status end;
    bool stopping;
    {
      base::MutexLock lock(&mutex_);
      stopping = stopping_;
      end = stopping ? absl::CancelledError("prefill worker is shutting down") : gone_;
    }
    if (!end.ok() && (transport_ != nullptr || stopping)) Break(end);
    if (stopping) return;
    SendHeartbeat();
    if (!Step()) WaitForWork();
  }
}

bool SenderImpl::Step() {
  absl::Status status;
  SenderEffects effects;
  std::optional<IssuedUnit> unit;
  {
    base::MutexLock lock(&mutex_);
    const absl::Duration now = options_.clock->Now();
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

void SenderImpl::Issue(IssuedUnit unit) {
  if (options_.checksums) {
    unit.frame.has_checksum = true;
    unit.frame.checksum = ChecksumOf(options_.pool->data(), unit.from);
  }
  transport_->Put(unit.frame, unit.from, unit.to);
  unit_in_flight_ = true;
}

absl::StatusOr<bool> SenderImpl::MoveBytes() {
  std::vector<PutTransport::Reply> replies;
  BATON_ASSIGN_OR_RETURN(const size_t written, transport_->Write());
  BATON_RETURN_IF_ERROR(transport_->Read(&replies));
  base::MutexLock lock(&mutex_);
  const absl::Duration now = options_.clock->Now();
  if (written > 0) table_.OnProgress(now);
  for (const PutTransport::Reply& reply : replies) {
    if (const auto* grant = std::get_if<GrantFrame>(&reply)) table_.OnGrant(*grant, now);
    if (const auto* ack = std::get_if<AckFrame>(&reply))
      BATON_RETURN_IF_ERROR(table_.OnAck(*ack, now));
  }
  const bool unit_written = unit_in_flight_ && !transport_->busy();
  return written > 0 || !replies.empty() || unit_written;
}

void SenderImpl::Break(const absl::Status& reason) {
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

void SenderImpl::Deliver(SenderEffects effects) {
  for (const OpenFrame& open : effects.opens) {
    if (transport_ != nullptr) transport_->Open(open);
  }
  for (worker::v1::PeerMessage& message : effects.messages) link_.Send(std::move(message));
  for (auto& [on_done, result] : effects.done) on_done(std::move(result));
}

void SenderImpl::WaitForWork() {
  absl::Duration until = heartbeat_at_ + kHeartbeatInterval;
  {
    base::MutexLock lock(&mutex_);
    until = std::min(until, table_.NextTimer());
  }
  pollfd entries[2] = {{wake_.fd(), POLLIN, 0}, {-1, 0, 0}};
  if (transport_ != nullptr) {
    entries[1] = {transport_->fd(),
                  static_cast<short>(transport_->wants_write() ? POLLIN | POLLOUT : POLLIN), 0};
  }
  const int64_t wait_ms = absl::ToInt64Milliseconds(until - options_.clock->Now());
  poll(entries, 2, static_cast<int>(std::clamp<int64_t>(wait_ms, 0, 1000) + 1));
  wake_.Drain();
}

void SenderImpl::SendHeartbeat() {
  const absl::Duration now = options_.clock->Now();
  if (now - heartbeat_at_ < kHeartbeatInterval) return;
  heartbeat_at_ = now;
  worker::v1::PeerMessage heartbeat;
  heartbeat.mutable_heartbeat()->set_sequence(++heartbeats_);
  link_.Send(std::move(heartbeat));
}

// The first of the peer's transports that works here, in its order, or exactly the one asked for.
absl::StatusOr<std::unique_ptr<PutTransport>> Connect(const SenderOptions& options,
                                                      const worker::v1::Hello& peer) {
  ConnectOptions connect;
  connect.pool = options.pool;
  connect.layout = options.layout;
  connect.timeout = options.reply_timeout;
  std::vector<std::string> reasons;
  for (const worker::v1::TransportEndpoint& endpoint : peer.transports()) {
    if (options.transport != "auto" && options.transport != endpoint.name()) continue;
    absl::StatusOr<std::unique_ptr<PutTransport>> transport = ConnectTo(endpoint, connect);
    if (transport.ok()) {
      for (const std::string& reason : reasons) BATON_LOG(Warning, "transport not usable ", reason);
      return transport;
    }
    if (absl::IsFailedPrecondition(transport.status()) && options.transport != "auto")
      return transport.status();
    reasons.push_back(absl::StrCat(endpoint.name(), ": ", transport.status().message()));
  }
  if (reasons.empty()) reasons.push_back("the peer does not offer it");
  return absl::UnavailableError(absl::StrCat("transport=", options.transport,
                                             ": none works: ", absl::StrJoin(reasons, "; ")));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Sender>> Sender::Create(const SenderOptions& options,
                                                       const worker::v1::Hello& peer,
                                                       PeerLink* link) {
  BATON_RETURN_IF_ERROR(CheckFingerprintOfPool(options.hello.fingerprint(), options.layout));
  BATON_RETURN_IF_ERROR(CompareFingerprints(options.hello.fingerprint(), peer.fingerprint()));
  if (options.pool == nullptr || options.pool->size() < options.layout.pool_bytes()) {
    return absl::InvalidArgumentError("hand-over: the KV pool is smaller than its layout");
  }
  BATON_ASSIGN_OR_RETURN(std::unique_ptr<PutTransport> transport, Connect(options, peer));
  BATON_ASSIGN_OR_RETURN(const double bytes_per_second, transport->Probe(options.reply_timeout));
  BATON_LOG(Info, "hand-over connection ready ", LogField("transport", transport->name()), " ",
            LogField("bytes_per_second", bytes_per_second));
  return std::make_unique<SenderImpl>(options, peer, link, std::move(transport), bytes_per_second);
}

}  // namespace baton::kvtransfer
