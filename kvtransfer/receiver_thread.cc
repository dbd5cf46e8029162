// The receiver's transfer thread: listeners, data connections, heartbeats. It waits for bytes and
// for nothing else.

#include <poll.h>

#include <algorithm>
#include <utility>

#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "kvtransfer/receiver_impl.h"

namespace baton::kvtransfer {
namespace {

constexpr absl::Duration kAttachTimeout = absl::Seconds(5);
constexpr absl::Duration kHeartbeatInterval = absl::Seconds(1);
constexpr size_t kMaxConnections = 1024;

}  // namespace

absl::StatusOr<uint64_t> ReceiverImpl::Attach(const PutListener& listener,
                                              absl::string_view token) {
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

GrantFrame ReceiverImpl::Open(uint64_t session,
                              const OpenFrame& open,
                              const PutListener& listener) {
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

std::optional<std::vector<ByteRange>> ReceiverImpl::BeginUnit(uint64_t session,
                                                              const UnitFrame& unit) {
  const absl::Duration now = options_.clock->Now();
  return WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
    return table.BeginUnit(session, unit, now, effects);
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
    entries.push_back({connection->fd(),
                       static_cast<short>(connection->wants_write() ? POLLIN | POLLOUT : POLLIN),
                       0});
  }
  const absl::Duration until_heartbeat = heartbeat_at_ + kHeartbeatInterval - options_.clock->Now();
  const int64_t wait_ms =
      std::clamp<int64_t>(absl::ToInt64Milliseconds(until_heartbeat), 0, 1000) + 1;
  if (poll(entries.data(), entries.size(), static_cast<int>(wait_ms)) < 0) return;
  wake_.Drain();
  const size_t first_connection = 1 + listeners_.size();
  std::vector<std::unique_ptr<DataConnection>> kept;
  for (size_t i = 0; i < connections_.size(); ++i) {
    if (Serve(connections_[i].get(), entries[first_connection + i].revents))
      kept.push_back(std::move(connections_[i]));
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
  connections_.push_back(std::make_unique<DataConnection>(*std::move(fd), listener, sink,
                                                          options_.pool, options_.clock->Now()));
}

bool ReceiverImpl::Serve(DataConnection* connection, short events) {
  connection->DropUnwantedUnit();
  absl::Status status;
  if ((events & POLLOUT) != 0) status = connection->OnWritable();
  if (status.ok() && (events & (POLLIN | POLLHUP | POLLERR)) != 0)
    status = connection->OnReadable();
  if (status.ok()) {
    const bool late = connection->session() == 0 &&
                      options_.clock->Now() - connection->accepted_at() > kAttachTimeout;
    return !late;
  }
  if (connection->session() == 0) {
    BATON_LOG(Warning, "data connection refused ", LogField("reason", status.message()));
    return false;
  }
  Lose(connection, status);
  // Whoever writes into our memory himself must hang up himself: then, and only then, is he quiet.
  // UNAVAILABLE from a read is exactly that; anything else is nonsense in the stream.
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
  BATON_LOG(Info, "data connection ended ", LogField("transport", connection->listener().name()),
            " ", LogField("reason", reason.message()));
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
    const auto connection = std::find_if(connections_.begin(), connections_.end(),
                                         [&](const auto& c) { return c->session() == id; });
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

}  // namespace baton::kvtransfer
