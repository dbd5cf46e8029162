#include "prefill_worker/peer_client.h"

#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "prefill_worker/peer_session.h"

namespace baton::prefill {

using SharedSender = std::shared_ptr<kvtransfer::Sender>;

struct PeerClient::Impl {
  struct Waiter {
    std::string incarnation;
    Found found;
  };
  // One address. While `connecting`, its thread owns what comes next.
  struct Peer {
    bool connecting = false;
    std::string incarnation;
    // Shared with gRPC until the stream has ended.
    std::shared_ptr<PeerSession> session;
    SharedSender sender;  // shared with the loop's transfers
    std::vector<Waiter> waiters;
    std::thread thread;
  };
  struct Connected {
    std::string incarnation;
    std::shared_ptr<PeerSession> session;
    SharedSender sender;
  };

  absl::StatusOr<Connected> Open(const std::string& address);
  void ConnectThread(const std::string& address);
  void SessionEnded();

  PeerClientOptions options;
  mutable base::Mutex mutex;
  base::CondVar session_ended;
  std::map<std::string, Peer> peers ABSL_GUARDED_BY(mutex);
  int open_sessions ABSL_GUARDED_BY(mutex) = 0;
  bool stopping ABSL_GUARDED_BY(mutex) = false;
};

PeerClient::PeerClient(PeerClientOptions options) : impl_(std::make_unique<Impl>()) {
  impl_->options = std::move(options);
}

PeerClient::~PeerClient() { Shutdown(); }

void PeerClient::Connect(const std::string& address, const std::string& incarnation, Found found) {
  absl::Status refused;
  SharedSender ready;
  std::thread finished;
  {
    base::MutexLock lock(&impl_->mutex);
    const bool is_new = !impl_->peers.contains(address);
    if (impl_->stopping) {
      refused = absl::UnavailableError("prefill: stopping");
    } else if (is_new && impl_->peers.size() >= static_cast<size_t>(impl_->options.max_peers)) {
      refused =
          absl::UnavailableError(absl::StrCat("prefill: max_peers=", impl_->options.max_peers));
    } else {
      Impl::Peer& peer = impl_->peers[address];
      if (!peer.connecting && peer.session != nullptr && !peer.session->ended() &&
          peer.incarnation == incarnation) {
        ready = peer.sender;
      } else {
        peer.waiters.push_back({incarnation, std::move(found)});
        if (peer.connecting) return;
        peer.connecting = true;
        finished = std::move(peer.thread);
        peer.thread = std::thread([impl = impl_.get(), address] { impl->ConnectThread(address); });
      }
    }
  }
  // It has said its last word already: only its return is waited for.
  if (finished.joinable()) finished.join();
  if (!refused.ok()) return found(refused);
  if (ready != nullptr) found(ready);
}

absl::StatusOr<PeerClient::Impl::Connected> PeerClient::Impl::Open(const std::string& address) {
  Connected connected;
  {
    base::MutexLock lock(&mutex);
    ++open_sessions;
  }
  connected.session = PeerSession::Start(address, options.sender.hello, [this] { SessionEnded(); });
  auto create = [&]() -> absl::Status {
    BATON_ASSIGN_OR_RETURN(const worker::v1::Hello hello,
                           connected.session->WaitForHello(options.hello_timeout));
    BATON_ASSIGN_OR_RETURN(
        std::unique_ptr<kvtransfer::Sender> sender,
        kvtransfer::Sender::Create(options.sender, hello, connected.session.get()));
    connected.incarnation = hello.incarnation();
    connected.sender = std::move(sender);
    connected.session->Attach(connected.sender);
    return absl::OkStatus();
  };
  const absl::Status status = create();
  if (status.ok()) return connected;
  connected.session->Close();
  const absl::Status named = Annotate(status, absl::StrCat("decode worker ", address));
  BATON_LOG(Warning, "peer session failed", LogField("reason", named.message()));
  return absl::IsDeadlineExceeded(named) ? absl::UnavailableError(named.message()) : named;
}

void PeerClient::Impl::ConnectThread(const std::string& address) {
  absl::StatusOr<Connected> connected = Open(address);
  std::shared_ptr<PeerSession> unwanted;
  SharedSender usable;
  std::vector<Waiter> waiters;
  {
    base::MutexLock lock(&mutex);
    Peer& peer = peers[address];
    peer.connecting = false;
    waiters = std::move(peer.waiters);
    peer.waiters.clear();
    const bool alive = peer.session != nullptr && !peer.session->ended();
    if (connected.ok() && (stopping || (alive && peer.incarnation == connected->incarnation))) {
      // The request was for an instance that has gone; the session with its successor stands.
      unwanted = connected->session;
    } else if (connected.ok()) {
      unwanted = std::exchange(peer.session, connected->session);
      peer.sender = connected->sender;
      peer.incarnation = connected->incarnation;
    }
    if (!stopping) usable = peer.sender;
  }
  if (unwanted != nullptr) unwanted->Close();
  for (Waiter& waiter : waiters) {
    if (!connected.ok()) {
      waiter.found(connected.status());
    } else if (waiter.incarnation != connected->incarnation) {
      waiter.found(absl::UnavailableError(
          absl::StrCat("decode worker ", address, " is another instance than the reservation's")));
    } else if (usable == nullptr) {
      waiter.found(absl::UnavailableError("prefill: stopping"));
    } else {
      waiter.found(usable);
    }
  }
  if (options.on_change) options.on_change();
}

void PeerClient::Impl::SessionEnded() {
  if (options.on_change) options.on_change();
  base::MutexLock lock(&mutex);
  --open_sessions;
  session_ended.NotifyAll();
}

void PeerClient::Shutdown() {
  std::vector<std::thread> threads;
  {
    base::MutexLock lock(&impl_->mutex);
    impl_->stopping = true;
    for (auto& [address, peer] : impl_->peers) {
      if (peer.session != nullptr) peer.session->Close();
      threads.push_back(std::move(peer.thread));
    }
  }
  for (std::thread& thread : threads) {
    if (thread.joinable()) thread.join();
  }
  std::map<std::string, Impl::Peer> gone;
  base::MutexLock lock(&impl_->mutex);
  while (impl_->open_sessions > 0) impl_->session_ended.Wait(&impl_->mutex);
  gone.swap(impl_->peers);
}

std::vector<PeerClient::Info> PeerClient::peers() const {
  std::vector<Info> infos;
  base::MutexLock lock(&impl_->mutex);
  for (const auto& [address, peer] : impl_->peers) {
    if (peer.sender == nullptr || peer.session->ended()) continue;
    infos.push_back(
        {address, peer.sender->transport_name(), peer.sender->probe_bytes_per_second()});
  }
  return infos;
}

}  // namespace baton::prefill
