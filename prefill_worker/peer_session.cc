#include "prefill_worker/peer_session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/process/grpc_status.h"

namespace baton::prefill {

using worker::v1::Hello;
using worker::v1::PeerMessage;

std::shared_ptr<PeerSession> PeerSession::Start(const std::string& address,
                                                const process::ChannelSecurity& security,
                                                const Hello& hello,
                                                std::function<void()> on_end) {
  auto session = std::shared_ptr<PeerSession>(new PeerSession(std::move(on_end)));
  session->self_ = session;
  session->channel_ = process::MakeChannel(address, security);
  session->stub_ = worker::v1::Peer::NewStub(session->channel_);
  // A first connection that fails, on a busy machine perhaps, is tried again until WaitForHello
  // gives up.
  session->context_.set_wait_for_ready(true);
  session->stub_->async()->Session(&session->context_, session.get());
  // Other threads start writes, so the stream must not end under them: the hold goes when reading
  // has ended.
  session->AddHold();
  session->StartRead(&session->incoming_);
  PeerMessage message;
  *message.mutable_hello() = hello;
  session->Send(std::move(message));
  session->StartCall();
  return session;
}

absl::StatusOr<Hello> PeerSession::WaitForHello(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  base::MutexLock lock(&mutex_);
  while (!hello_ && !end_) {
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(
          absl::StrCat("no hello within ", absl::FormatDuration(timeout)));
    }
    changed_.WaitFor(&mutex_, left);
  }
  if (end_) return *end_;
  return *hello_;
}

bool PeerSession::WaitForEnd(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  base::MutexLock lock(&mutex_);
  while (!end_) {
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) return false;
    changed_.WaitFor(&mutex_, left);
  }
  return true;
}

void PeerSession::Attach(std::shared_ptr<kvtransfer::Sender> sender) {
  absl::Status end;
  {
    base::MutexLock lock(&mutex_);
    sender_ = sender;
    if (!end_) return;
    end = *end_;
  }
  sender->OnPeerGone(end);
}

bool PeerSession::ended() const {
  base::MutexLock lock(&mutex_);
  return end_.has_value();
}

void PeerSession::OnReadDone(bool ok) {
  if (!ok) {
    writer_.Finish(absl::OkStatus());
    RemoveHold();
    return;
  }
  std::shared_ptr<kvtransfer::Sender> sender;
  {
    base::MutexLock lock(&mutex_);
    if (incoming_.has_hello() && !hello_) {
      hello_ = std::move(*incoming_.mutable_hello());
      changed_.NotifyAll();
    }
    sender = sender_;
  }
  if (sender != nullptr) sender->OnMessage(incoming_);
  incoming_ = PeerMessage();
  StartRead(&incoming_);
}

void PeerSession::OnDone(const grpc::Status& status) {
  absl::Status end = process::FromGrpcStatus(status);
  if (end.ok()) end = absl::UnavailableError("the peer ended the session");
  if (absl::IsCancelled(end)) end = absl::UnavailableError("session closed");
  std::shared_ptr<kvtransfer::Sender> sender;
  {
    base::MutexLock lock(&mutex_);
    end_ = end;
    sender = std::move(sender_);
    changed_.NotifyAll();
  }
  if (sender != nullptr) sender->OnPeerGone(end);
  const std::function<void()> on_end = on_end_;
  self_.reset();  // first: see process::MakeChannel
  if (on_end) on_end();
}

}  // namespace baton::prefill
