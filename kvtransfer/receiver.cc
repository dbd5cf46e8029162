#include "kvtransfer/receiver.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/mutex.h"
#include "engine/base/status_macros.h"
#include "kvtransfer/data_connection.h"
#include "kvtransfer/fingerprint.h"
#include "kvtransfer/link_slot.h"
#include "kvtransfer/receiver_table.h"
#include "kvtransfer/transport.h"

namespace baton::kvtransfer {
namespace {

constexpr absl::Duration kAttachTimeout = absl::Seconds(5);
constexpr absl::Duration kHeartbeatInterval = absl::Seconds(1);
constexpr absl::Duration kSuspectAfter = absl::Seconds(3);
constexpr size_t kMaxConnections = 1024;

struct Session {
  std::string incarnation;
  std::map<std::string, std::string> tokens;  // by transport, until one is used
  std::string transport;                      // of its data connection
  double probe_bytes_per_second = 0;
  absl::Duration heard_at;
  bool gone = false;  // the control channel has ended
  bool lost = false;  // the data connection has ended
  // Shared with effects that are on their way while the session ends.
  std::shared_ptr<LinkSlot> link;
};

using Sessions = std::map<SessionId, Session>;

class ReceiverImpl : public Receiver, private DataSink {
 public:
  ReceiverImpl(const ReceiverOptions& options, std::function<void(ReceiverEvent)> on_event)
      : options_(options), on_event_(std::move(on_event)), table_(options.layout, options.incarnation) {}
  ~ReceiverImpl() override;

  absl::Status Start();

  worker::v1::Handoff Reserve(Reservation reservation) override;
  bool Revoke(uint64_t reservation_id, absl::string_view reason) override;
  absl::StatusOr<worker::v1::Hello> OnPeerHello(const worker::v1::Hello& peer, PeerLink* link,
                                                SessionId* session) override;
  void OnMessage(SessionId session, const worker::v1::PeerMessage& message) override;
  void OnPeerGone(SessionId session) override;
  std::vector<PeerInfo> peers() const override;

 private:
  // DataSink, on the transfer thread.
  absl::StatusOr<uint64_t> Attach(const PutListener& listener, absl::string_view token) override;
  GrantFrame Open(uint64_t session, const OpenFrame& open, const PutListener& listener) override;
  std::optional<std::vector<ByteRange>> BeginUnit(uint64_t session, const UnitFrame& unit) override;
  bool Wants(uint64_t reservation_id) override;
  void EndUnit(const UnitFrame& unit, const absl::Status& arrived) override;
  void Report(uint64_t session, double bytes_per_second) override;

  void Run();
  void PollOnce();
  void Accept(PutListener* listener);
  // Returns false when the connection has ended.
  bool Serve(DataConnection* connection, short events);
  void Lose(DataConnection* connection, const absl::Status& reason);
  void EndGoneSessions();
  void SendHeartbeats();
  // Changes the table under the lock, then does what it asks outside of it.
  template <typename Change>
  auto WithTable(Change change);
  void Deliver(ReceiverEffects effects);

  const ReceiverOptions options_;
  const std::function<void(ReceiverEvent)> on_event_;
  std::vector<std::unique_ptr<PutListener>> listeners_;
  WakeFd wake_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;

  // Transfer thread only.
  std::vector<std::unique_ptr<DataConnection>> connections_;
  absl::Duration heartbeat_at_;
  uint64_t heartbeats_ = 0;

  mutable base::Mutex mutex_;
  ReceiverTable table_ ABSL_GUARDED_BY(mutex_);
  Sessions sessions_ ABSL_GUARDED_BY(mutex_);
  SessionId last_session_ ABSL_GUARDED_BY(mutex_) = 0;
};

absl::Status ReceiverImpl::Start() {
  ListenOptions listen;
  listen.pool = options_.pool;
  listen.layout = options_.layout;
  listen.tcp_host = options_.tcp_listen_host;
  listen.tcp_port = options_.tcp_listen_port;
  listen.tcp_advertise_host = options_.tcp_advertise_host;
  listen.socket_dir = options_.socket_dir;
  for (const std::string& name : options_.transports) {
    BATON_ASSIGN_OR_RETURN(std::unique_ptr<PutListener> listener, ListenOn(name, listen));
    listeners_.push_back(std::move(listener));
  }
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

ReceiverImpl::~ReceiverImpl() {
  stopping_.store(true);
  wake_.Wake();
  if (thread_.joinable()) thread_.join();
}

template <typename Change>
auto ReceiverImpl::WithTable(Change change) {
  ReceiverEffects effects;
  auto result = [&] {
    base::MutexLock lock(&mutex_);
    return change(table_, sessions_, &effects);
  }();
  Deliver(std::move(effects));
  return result;
}

void ReceiverImpl::Deliver(ReceiverEffects effects) {
  for (ReceiverEvent& event : effects.events) on_event_(std::move(event));
  for (auto& [session, message] : effects.messages) {
    std::shared_ptr<LinkSlot> link;
    {
      base::MutexLock lock(&mutex_);
      const auto found = sessions_.find(session);
      if (found != sessions_.end()) link = found->second.link;
    }
    if (link != nullptr) link->Send(std::move(message));
  }
}

worker::v1::Handoff ReceiverImpl::Reserve(Reservation reservation) {
  base::MutexLock lock(&mutex_);
  return table_.Reserve(std::move(reservation), RandomId());
}

bool ReceiverImpl::Revoke(uint64_t reservation_id, absl::string_view reason) {
  const bool revoked = WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
    return table.Revoke(reservation_id, reason, effects);
  });
  if (revoked) wake_.Wake();  // it may be receiving just that
  return revoked;
}

absl::StatusOr<worker::v1::Hello> ReceiverImpl::OnPeerHello(const worker::v1::Hello& peer, PeerLink* link,
                                                            SessionId* session) {
  BATON_RETURN_IF_ERROR(CompareFingerprints(options_.fingerprint, peer.fingerprint()));
  if (peer.role() != "prefill") {
    return absl::FailedPreconditionError(absl::StrCat("hello: field=role peer=", peer.role(), " wanted=prefill"));
  }
  worker::v1::Hello hello;
  hello.set_incarnation(options_.incarnation);
  hello.set_role("decode");
  *hello.mutable_fingerprint() = options_.fingerprint;
  Session added;
  added.incarnation = peer.incarnation();
  added.link = std::make_shared<LinkSlot>(link);
  added.heard_at = options_.clock->Now();
  for (const auto& listener : listeners_) {
    worker::v1::TransportEndpoint* endpoint = hello.add_transports();
    endpoint->set_name(std::string(listener->name()));
    endpoint->set_address(listener->address());
    endpoint->set_token(RandomToken());
    added.tokens[endpoint->name()] = endpoint->token();
  }
  base::MutexLock lock(&mutex_);
  *session = ++last_session_;
  sessions_[*session] = std::move(added);
  return hello;
}

void ReceiverImpl::OnMessage(SessionId session, const worker::v1::PeerMessage& message) {
  const absl::Duration now = options_.clock->Now();
  WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
    const auto found = sessions.find(session);
    if (found == sessions.end() || found->second.gone) return false;
    found->second.heard_at = now;
    if (message.has_commit()) table.OnCommit(session, message.commit(), now, effects);
    if (message.has_quiesced()) table.OnQuiesced(session, message.quiesced(), effects);
    if (message.has_abort()) table.OnAbort(session, message.abort(), effects);
    return true;
  });
}

void ReceiverImpl::OnPeerGone(SessionId session) {
  std::shared_ptr<LinkSlot> link;
  WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
    const auto found = sessions.find(session);
    if (found == sessions.end() || found->second.gone) return false;
    found->second.gone = true;
    link = found->second.link;
    table.SessionGone(session, absl::UnavailableError("prefill worker is gone: its control channel ended"), effects);
    return true;
  });
  if (link != nullptr) link->Drop();
  wake_.Wake();
}

std::vector<Receiver::PeerInfo> ReceiverImpl::peers() const {
  const absl::Duration now = options_.clock->Now();
  std::vector<PeerInfo> infos;
  base::MutexLock lock(&mutex_);
  for (const auto& [id, session] : sessions_) {
    if (session.gone || session.lost) continue;
    PeerInfo info;
    info.incarnation = session.incarnation;
    info.transport = session.transport;
    info.probe_bytes_per_second = session.probe_bytes_per_second;
    info.suspect = now - session.heard_at > kSuspectAfter;
    infos.push_back(std::move(info));
  }
  return infos;
}

absl::StatusOr<uint64_t> ReceiverImpl::Attach(const PutListener& listener, absl::string_view token) {
  base::MutexLock lock(&mutex_);
  for (auto& [id, session] : sessions_) {
    const auto own = session.tokens.find(std::string(listener.name()));
    if (session.gone || own == session.tokens.end() || own->second != token) continue;
    session.tokens.clear();  // one data connection a session
    session.transport = std::string(listener.name());
    return id;
  }
  return absl::PermissionDeniedError("data connection: unknown token");
}

GrantFrame ReceiverImpl::Open(uint64_t session, const OpenFrame& open, const PutListener& listener) {
  return WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects*) {
    if (sessions.at(session).gone) {
      GrantFrame refused;
      refused.reservation_id = open.reservation_id;
      refused.status = absl::UnavailableError("hand-over: the session has ended");
      return refused;
    }
    return table.Open(session, open, listener.peer_writes(), listener.name());
  });
}

std::optional<std::vector<ByteRange>> ReceiverImpl::BeginUnit(uint64_t session, const UnitFrame& unit) {
  return WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
    return table.BeginUnit(session, unit, effects);
  });
}

bool ReceiverImpl::Wants(uint64_t reservation_id) {
  base::MutexLock lock(&mutex_);
  return table_.Wants(reservation_id);
}

void ReceiverImpl::EndUnit(const UnitFrame& unit, const absl::Status& arrived) {
  const absl::Duration now = options_.clock->Now();
  WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
    table.EndUnit(unit, arrived, now, effects);
    return true;
  });
}

void ReceiverImpl::Report(uint64_t session, double bytes_per_second) {
  base::MutexLock lock(&mutex_);
  sessions_.at(session).probe_bytes_per_second = bytes_per_second;
}

void ReceiverImpl::Run() {
  while (!stopping_.load()) {
    PollOnce();
    EndGoneSessions();
    SendHeartbeats();
  }
  connections_.clear();
  WithTable([](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
    table.FailAll(absl::CancelledError("decode worker is shutting down"), effects);
    return true;
  });
}

void ReceiverImpl::PollOnce() {
  std::vector<pollfd> entries;
  entries.push_back({wake_.fd(), POLLIN, 0});
  for (const auto& listener : listeners_) entries.push_back({listener->fd(), POLLIN, 0});
  for (const auto& connection : connections_) {
    entries.push_back({connection->fd(), static_cast<short>(connection->wants_write() ? POLLIN | POLLOUT : POLLIN), 0});
  }
  const absl::Duration until_heartbeat = heartbeat_at_ + kHeartbeatInterval - options_.clock->Now();
  const int64_t wait_ms = std::clamp<int64_t>(absl::ToInt64Milliseconds(until_heartbeat), 0, 1000) + 1;
  if (poll(entries.data(), entries.size(), static_cast<int>(wait_ms)) < 0) return;
  wake_.Drain();
  const size_t first_connection = 1 + listeners_.size();
  std::vector<std::unique_ptr<DataConnection>> kept;
  for (size_t i = 0; i < connections_.size(); ++i) {
    if (Serve(connections_[i].get(), entries[first_connection + i].revents)) kept.push_back(std::move(connections_[i]));
  }
  connections_ = std::move(kept);
  for (size_t i = 0; i < listeners_.size(); ++i) {
    if (entries[1 + i].revents != 0) Accept(listeners_[i].get());
  }
}

void ReceiverImpl::Accept(PutListener* listener) {
  absl::StatusOr<UniqueFd> fd = listener->Accept();
  if (!fd.ok()) {
    BATON_LOG(Warning, "data connection refused ", LogField("transport", listener->name()), " ",
              LogField("reason", fd.status().message()));
    return;
  }
  if (connections_.size() >= kMaxConnections) return;  // closed at once
  DataSink* sink = this;
  connections_.push_back(
      std::make_unique<DataConnection>(*std::move(fd), listener, sink, options_.pool, options_.clock->Now()));
}

bool ReceiverImpl::Serve(DataConnection* connection, short events) {
  connection->DropUnwantedUnit();
  absl::Status status;
  if ((events & POLLOUT) != 0) status = connection->OnWritable();
  if (status.ok() && (events & (POLLIN | POLLHUP | POLLERR)) != 0) status = connection->OnReadable();
  if (status.ok()) {
    const bool late = connection->session() == 0 && options_.clock->Now() - connection->accepted_at() > kAttachTimeout;
    return !late;
  }
  if (connection->session() == 0) {
    BATON_LOG(Warning, "data connection refused ", LogField("reason", status.message()));
    return false;
  }
  Lose(connection, status);
  // Whoever writes into our memory himself must hang up himself: then, and only then, is he quiet. UNAVAILABLE from a
  // read is exactly that; anything else is nonsense in the stream.
  if (connection->listener().peer_writes() && !absl::IsUnavailable(status)) {
    connection->Shut(status);
    return true;
  }
  const SessionId session = connection->session();
  connection->Shut(status);
  WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
    table.SessionQuiet(session, effects);
    return true;
  });
  return false;
}

void ReceiverImpl::Lose(DataConnection* connection, const absl::Status& reason) {
  std::shared_ptr<LinkSlot> link;
  WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
    Session& session = sessions.at(connection->session());
    if (session.lost) return false;
    session.lost = true;
    link = session.link;
    table.SessionGone(connection->session(), Annotate(reason, "prefill worker is gone"), effects);
    return true;
  });
  if (link == nullptr) return;
  BATON_LOG(Info, "data connection ended ", LogField("transport", connection->listener().name()), " ",
            LogField("reason", reason.message()));
  link->Close();  // a control channel without a data connection is of no use
}

void ReceiverImpl::EndGoneSessions() {
  std::vector<SessionId> gone;
  {
    base::MutexLock lock(&mutex_);
    for (const auto& [id, session] : sessions_) {
      if (session.gone) gone.push_back(id);
    }
  }
  for (SessionId id : gone) {
    const auto connection =
        std::find_if(connections_.begin(), connections_.end(), [&](const auto& c) { return c->session() == id; });
    if (connection != connections_.end() && (*connection)->listener().peer_writes()) {
      (*connection)->Shut(absl::UnavailableError("prefill worker is gone"));
      continue;  // until it hangs up
    }
    if (connection != connections_.end()) connections_.erase(connection);
    WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
        table.SessionQuiet(id, effects);
      sessions.erase(id);
      return true;
    });
  }
}

void ReceiverImpl::SendHeartbeats() {
  const absl::Duration now = options_.clock->Now();
  if (now - heartbeat_at_ < kHeartbeatInterval) return;
  heartbeat_at_ = now;
  std::vector<std::shared_ptr<LinkSlot>> links;
  {
    base::MutexLock lock(&mutex_);
    for (const auto& [id, session] : sessions_) {
      if (!session.gone) links.push_back(session.link);
    }
  }
  worker::v1::PeerMessage heartbeat;
  heartbeat.mutable_heartbeat()->set_sequence(++heartbeats_);
  for (const auto& link : links) link->Send(heartbeat);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Receiver>> Receiver::Create(const ReceiverOptions& options,
                                                           std::function<void(ReceiverEvent)> on_event) {
  BATON_RETURN_IF_ERROR(CheckFingerprintOfPool(options.fingerprint, options.layout));
  if (options.layout.num_kv_heads < 1 || options.layout.num_kv_heads > 64) {
    return absl::InvalidArgumentError(absl::StrCat("hand-over: num_kv_heads=", options.layout.num_kv_heads, " limit=64"));
  }
  if (options.layout.block_bytes() > kMaxUnitBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("hand-over: block_bytes=", options.layout.block_bytes(), " limit=", kMaxUnitBytes));
  }
  if (options.pool == nullptr || options.pool->size() < options.layout.pool_bytes()) {
    return absl::InvalidArgumentError("hand-over: the KV pool is smaller than its layout");
  }
  if (options.transports.empty()) return absl::InvalidArgumentError("hand-over: no transport is enabled");
  auto receiver = std::make_unique<ReceiverImpl>(options, std::move(on_event));
  BATON_RETURN_IF_ERROR(receiver->Start());
  return receiver;
}

}  // namespace baton::kvtransfer
