#include "kvtransfer/receiver.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "kvtransfer/fingerprint.h"
#include "kvtransfer/receiver_impl.h"

namespace baton::kvtransfer {
namespace {

constexpr absl::Duration kSuspectAfter = absl::Seconds(3);

}  // namespace

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
  const bool revoked =
      WithTable([&](ReceiverTable& table, Sessions& sessions, ReceiverEffects* effects) {
        return table.Revoke(reservation_id, reason, effects);
      });
  if (revoked) wake_.Wake();  // it may be receiving just that
  return revoked;
}

absl::StatusOr<worker::v1::Hello> ReceiverImpl::OnPeerHello(const worker::v1::Hello& peer,
                                                            PeerLink* link,
                                                            SessionId* session) {
  BATON_RETURN_IF_ERROR(CompareFingerprints(options_.fingerprint, peer.fingerprint()));
  if (peer.role() != "prefill") {
    return absl::FailedPreconditionError(
        absl::StrCat("hello: field=role peer=", peer.role(), " wanted=prefill"));
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
    table.SessionGone(session,
                      absl::UnavailableError("prefill worker is gone: its control channel ended"),
                      effects);
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

absl::StatusOr<std::unique_ptr<Receiver>> Receiver::Create(
    const ReceiverOptions& options, std::function<void(ReceiverEvent)> on_event) {
  BATON_RETURN_IF_ERROR(CheckFingerprintOfPool(options.fingerprint, options.layout));
  if (options.layout.num_kv_heads < 1 || options.layout.num_kv_heads > 64) {
    return absl::InvalidArgumentError(
        absl::StrCat("hand-over: num_kv_heads=", options.layout.num_kv_heads, " limit=64"));
  }
  if (options.layout.block_bytes() > kMaxUnitBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "hand-over: block_bytes=", options.layout.block_bytes(), " limit=", kMaxUnitBytes));
  }
  if (options.pool == nullptr || options.pool->size() < options.layout.pool_bytes()) {
    return absl::InvalidArgumentError("hand-over: the KV pool is smaller than its layout");
  }
  if (options.transports.empty())
    return absl::InvalidArgumentError("hand-over: no transport is enabled");
  auto receiver = std::make_unique<ReceiverImpl>(options, std::move(on_event));
  BATON_RETURN_IF_ERROR(receiver->Start());
  return receiver;
}

}  // namespace baton::kvtransfer
