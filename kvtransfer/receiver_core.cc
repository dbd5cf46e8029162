#include "kvtransfer/receiver_core.h"

#include <algorithm>
#include <utility>

#include <openssl/crypto.h>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "kvtransfer/fingerprint.h"
#include "kvtransfer/heartbeat.h"
#include "kvtransfer/socket.h"
#include "kvtransfer/transport_terms.h"

namespace baton::kvtransfer {
namespace {

// A peer that does not answer a Revoke for this long loses its connection: where we write
// ourselves that frees the blocks, and a peer that writes itself is made to hang up.
constexpr absl::Duration kQuietTimeout = absl::Seconds(5);

// Takes as long whatever the two have in common.
bool SameToken(absl::string_view a, absl::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace

void ReceiverCore::Deliver(ReceiverEffects effects) {
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

worker::v1::Handoff ReceiverCore::Reserve(Reservation reservation) {
  base::MutexLock lock(&mutex_);
  const uint64_t id = options_.random_id ? options_.random_id() : RandomId();
  return table_.Reserve(std::move(reservation), id);
}

bool ReceiverCore::Revoke(uint64_t reservation_id, absl::string_view reason) {
  const bool revoked =
      WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
        return table.Revoke(reservation_id, reason, effects);
      });
  if (revoked) Wake();  // it may be receiving just that
  return revoked;
}

absl::StatusOr<worker::v1::Hello> ReceiverCore::OnPeerHello(const worker::v1::Hello& peer,
                                                            PeerLink* link,
                                                            SessionId* session) {
  BATON_RETURN_IF_ERROR(CompareFingerprints(options_.fingerprint, peer.fingerprint()));
  if (peer.role() != "prefill") {
    return absl::FailedPreconditionError(
        absl::StrCat("hello: field=role peer=", peer.role(), " wanted=prefill"));
  }
  BATON_RETURN_IF_ERROR(CheckTerms({"decode", options_.transports, options_.required_transport},
                                   {"prefill", OffersOf(peer), ""}));
  worker::v1::Hello hello;
  hello.set_incarnation(options_.incarnation);
  hello.set_role("decode");
  *hello.mutable_fingerprint() = options_.fingerprint;
  Session added;
  added.incarnation = peer.incarnation();
  added.link = std::make_shared<LinkSlot>(link);
  added.heard_at = options_.clock->Now();
  for (const PutListener* listener : listeners()) {
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

void ReceiverCore::OnMessage(SessionId session, const worker::v1::PeerMessage& message) {
  const absl::Duration now = options_.clock->Now();
  WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
    const auto found = sessions.find(session);
    if (found == sessions.end() || found->second.gone) return false;
    found->second.heard_at = now;
    found->second.unheard = 0;
    if (message.has_commit()) table.OnCommit(session, message.commit(), now, effects);
    if (message.has_quiesced()) table.OnQuiesced(session, message.quiesced(), effects);
    if (message.has_abort()) table.OnAbort(session, message.abort(), effects);
    return true;
  });
}

void ReceiverCore::OnPeerGone(SessionId session) {
  std::shared_ptr<LinkSlot> link;
  WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
    const auto found = sessions.find(session);
    if (found == sessions.end() || found->second.gone) return false;
    found->second.gone = true;
    link = found->second.link;
    table.SessionGone(session,
                      absl::UnavailableError("prefill worker is gone: its control channel ended"),
                      effects);
    return true;
  });
  if (link != nullptr) link->Drop();
  Wake();
}

std::vector<Receiver::PeerInfo> ReceiverCore::peers() const {
  const absl::Duration now = options_.clock->Now();
  std::vector<PeerInfo> infos;
  base::MutexLock lock(&mutex_);
  for (const auto& [id, session] : sessions_) {
    if (session.gone || session.lost || session.dropped) continue;
    PeerInfo info;
    info.incarnation = session.incarnation;
    info.transport = session.transport;
    info.probe_bytes_per_second = session.probe_bytes_per_second;
    info.suspect = now - session.heard_at > kSuspectAfter;
    infos.push_back(std::move(info));
  }
  return infos;
}

absl::StatusOr<uint64_t> ReceiverCore::Attach(const PutListener& listener,
                                              absl::string_view token) {
  base::MutexLock lock(&mutex_);
  for (auto& [id, session] : sessions_) {
    const auto own = session.tokens.find(std::string(listener.name()));
    if (session.gone || session.dropped || own == session.tokens.end() || session.settled ||
        !SameToken(own->second, token))
      continue;
    session.tokens.erase(own);
    session.transport = std::string(listener.name());
    return id;
  }
  return absl::PermissionDeniedError("data connection: unknown token");
}

GrantFrame ReceiverCore::Open(uint64_t session,
                              const OpenFrame& open,
                              const PutListener& listener) {
  return WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects*) {
    Session& asking = sessions.at(session);
    asking.Settle();
    if (asking.gone || asking.dropped) {
      GrantFrame refused;
      refused.reservation_id = open.reservation_id;
      refused.status = absl::UnavailableError("hand-over: the session has ended");
      return refused;
    }
    return table.Open(session, open, listener.peer_writes(), listener.name());
  });
}

std::optional<std::vector<ByteRange>> ReceiverCore::BeginUnit(uint64_t session,
                                                              const UnitFrame& unit) {
  const absl::Duration now = options_.clock->Now();
  return WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
    return table.BeginUnit(session, unit, now, effects);
  });
}

bool ReceiverCore::Wants(uint64_t reservation_id) {
  base::MutexLock lock(&mutex_);
  return table_.Wants(reservation_id);
}

void ReceiverCore::EndUnit(const UnitFrame& unit, const absl::Status& arrived) {
  const absl::Duration now = options_.clock->Now();
  WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
    table.EndUnit(unit, arrived, now, effects);
    return true;
  });
}

void ReceiverCore::Report(uint64_t session, double bytes_per_second) {
  base::MutexLock lock(&mutex_);
  sessions_.at(session).Settle();
  sessions_.at(session).probe_bytes_per_second = bytes_per_second;
}

bool ReceiverCore::OnLineFailed(DataLine* line, const absl::Status& status) {
  const SessionId session = line->session();
  if (session == 0) {
    BATON_LOG(Warning, "data connection refused ", LogField("reason", status.message()));
    return false;
  }
  const bool hung_up = absl::IsUnavailable(status) || absl::IsAborted(status);
  if (hung_up && WasTrial(*line)) {
    BATON_LOG(Info, "data connection not used ", LogField("transport", line->listener().name()),
              " ", LogField("reason", status.message()));
    return false;
  }
  Lose(line, status);
  line->Shut(status);
  // Whoever writes into our memory himself must hang up himself: then, and only then, is he quiet.
  // UNAVAILABLE from a read is exactly that; anything else is nonsense in the stream.
  if (line->listener().peer_writes() && !absl::IsUnavailable(status)) return true;
  WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
    table.SessionQuiet(session, effects);
    return true;
  });
  return false;
}

// The peer has looked at it and found that it does not do, or it is the former of two: nothing has
// been asked of it, so nothing was granted and it proves nothing about the session.
bool ReceiverCore::WasTrial(const DataLine& line) {
  base::MutexLock lock(&mutex_);
  const auto found = sessions_.find(line.session());
  if (found == sessions_.end()) return true;
  Session& session = found->second;
  if (session.transport != line.listener().name()) return true;
  if (session.settled) return false;
  session.transport.clear();
  return true;
}

void ReceiverCore::Lose(DataLine* line, const absl::Status& reason) {
  std::shared_ptr<LinkSlot> link;
  WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
    Session& session = sessions.at(line->session());
    if (session.lost) return false;
    session.lost = true;
    link = session.link;
    // Whatever the peer did wrong, the request did not: another worker may do better.
    table.SessionGone(
        line->session(),
        absl::UnavailableError(absl::StrCat("prefill worker is gone: ", reason.message())),
        effects);
    return true;
  });
  if (link == nullptr) return;
  BATON_LOG(Info, "data connection ended ", LogField("transport", line->listener().name()), " ",
            LogField("reason", reason.message()));
  link->Close();  // a control channel without a data connection is of no use
}

void ReceiverCore::Drop(SessionId id, const absl::Status& reason) {
  std::shared_ptr<LinkSlot> link;
  WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
    const auto found = sessions.find(id);
    if (found == sessions.end() || found->second.gone || found->second.dropped) return false;
    found->second.dropped = true;
    link = found->second.link;
    table.SessionGone(id, reason, effects);
    return true;
  });
  if (link == nullptr) return;
  BATON_LOG(Warning, "prefill worker dropped ", LogField("reason", reason.message()));
  link->Close();
}

void ReceiverCore::EndSessions(Lines* lines) {
  std::vector<SessionId> ended;
  {
    base::MutexLock lock(&mutex_);
    for (const auto& [id, session] : sessions_) {
      if (session.gone || session.dropped) ended.push_back(id);
    }
  }
  for (SessionId id : ended) {
    DataLine* line = lines->Find(id);
    if (line != nullptr && line->listener().peer_writes()) {
      line->Shut(absl::UnavailableError("prefill worker is gone"));
      continue;  // until it hangs up
    }
    if (line != nullptr) lines->Close(line);
    WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
      table.SessionQuiet(id, effects);
      // A dropped one stays until its control channel is over, whose owner knows the number.
      if (sessions.at(id).gone) sessions.erase(id);
      return true;
    });
  }
}

void ReceiverCore::Tick() {
  const absl::Duration now = options_.clock->Now();
  if (now < tick_at_) return;
  tick_at_ = now + kHeartbeatInterval;
  std::vector<std::shared_ptr<LinkSlot>> links;
  std::vector<SessionId> silent, restless;
  {
    base::MutexLock lock(&mutex_);
    restless = table_.Restless(now, kQuietTimeout);
    for (auto& [id, session] : sessions_) {
      if (session.gone || session.dropped) continue;
      links.push_back(session.link);
      if (++session.unheard > kMissedHeartbeatsMax) silent.push_back(id);
    }
  }
  worker::v1::PeerMessage heartbeat;
  heartbeat.mutable_heartbeat()->set_sequence(++heartbeats_);
  for (const auto& link : links) link->Send(heartbeat);
  for (SessionId id : silent)
    Drop(id, absl::UnavailableError("prefill worker is silent: no heartbeat"));
  for (SessionId id : restless)
    Drop(id, absl::UnavailableError("prefill worker does not come to rest after a revoke"));
}

void ReceiverCore::FailAll(const absl::Status& reason) {
  WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
    table.FailAll(reason, effects);
    return true;
  });
}

absl::Status CheckReceiverOptions(const ReceiverOptions& options) {
  BATON_RETURN_IF_ERROR(CheckFingerprintOfPool(options.fingerprint, options.layout));
  if (options.layout.num_kv_heads < 1 || options.layout.num_kv_heads > 64) {
    return absl::InvalidArgumentError(
        absl::StrCat("hand-over: num_kv_heads=", options.layout.num_kv_heads, " limit=64"));
  }
  if (options.layout.block_bytes() > kMaxUnitBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "hand-over: block_bytes=", options.layout.block_bytes(), " limit=", kMaxUnitBytes));
  }
  BATON_RETURN_IF_ERROR(CheckPools(options.layout, options.pool, options.device_pool));
  if (options.transports.empty())
    return absl::InvalidArgumentError("hand-over: no transport is enabled");
  const auto& offers = options.transports;
  if (!options.required_transport.empty() &&
      std::find(offers.begin(), offers.end(), options.required_transport) == offers.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "hand-over: required_transport=", options.required_transport, " is not enabled"));
  }
  return absl::OkStatus();
}

}  // namespace baton::kvtransfer
