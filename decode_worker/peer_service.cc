#include "decode_worker/peer_service.h"

#include <atomic>
#include <optional>
#include <utility>

#include <grpcpp/grpcpp.h>

#include "baton/worker/v1/peer.grpc.pb.h"
#include "engine/base/log.h"
#include "engine/process/grpc_status.h"
#include "engine/process/stream_writer.h"
#include "kvtransfer/peer_link.h"
#include "kvtransfer/receiver.h"

namespace baton::decode {
namespace {

using worker::v1::PeerMessage;

struct Receivers {
  kvtransfer::Receiver* target = nullptr;  // null while loading
  kvtransfer::Receiver* draft = nullptr;   // null without a draft model
};

constexpr absl::string_view kDraftRole = "prefill-draft";

// One session. gRPC owns it until OnDone; the receiver knows it as a link until OnPeerGone.
class Session : public grpc::ServerBidiReactor<PeerMessage, PeerMessage>,
                public kvtransfer::PeerLink {
 public:
  explicit Session(Receivers receivers) : receivers_(receivers) {
    if (receivers_.target == nullptr) {
      writer_.Finish(absl::UnavailableError("decode: the model is still loading"));
    } else {
      StartRead(&incoming_);
    }
  }

  // PeerLink.
  bool Send(PeerMessage message) override { return writer_.Write(std::move(message)); }
  void Close() override { writer_.Finish(absl::UnavailableError("session closed")); }

  // Reactor. Reads come one at a time.
  void OnReadDone(bool ok) override {
    if (!ok) return writer_.Finish(absl::OkStatus());
    if (session_) {
      receiver_->OnMessage(*session_, incoming_);
    } else if (absl::Status status = OnHello(); !status.ok()) {
      BATON_LOG(Warning, "peer refused", LogField("reason", status.message()));
      return writer_.Finish(std::move(status));
    }
    incoming_ = PeerMessage();
    StartRead(&incoming_);
  }
  void OnWriteDone(bool ok) override { writer_.OnWriteDone(ok); }
  void OnCancel() override { writer_.Finish(absl::CancelledError("session cancelled")); }
  void OnDone() override {
    if (session_) receiver_->OnPeerGone(*session_);
    delete this;
  }

 private:
  absl::Status OnHello() {
    if (!incoming_.has_hello()) {
      return absl::InvalidArgumentError("peer: the first message is no hello");
    }
    worker::v1::Hello peer = incoming_.hello();
    const bool draft = peer.role() == kDraftRole;
    if (draft) peer.set_role("prefill");  // as such the draft model's receiver knows it
    receiver_ = draft ? receivers_.draft : receivers_.target;
    if (receiver_ == nullptr)
      return absl::FailedPreconditionError("peer: there is no draft model here");
    kvtransfer::SessionId session;
    absl::StatusOr<worker::v1::Hello> hello = receiver_->OnPeerHello(peer, this, &session);
    if (!hello.ok()) return hello.status();
    session_ = session;
    PeerMessage reply;
    *reply.mutable_hello() = *std::move(hello);
    Send(std::move(reply));
    return absl::OkStatus();
  }

  const Receivers receivers_;
  kvtransfer::Receiver* receiver_ = nullptr;  // of this session, from its hello on
  PeerMessage incoming_;
  std::optional<kvtransfer::SessionId> session_;
  process::StreamWriter<PeerMessage> writer_{
      {.start_write = [this](const PeerMessage* message) { StartWrite(message); },
       .finish = [this](const absl::Status& status) { Finish(process::ToGrpcStatus(status)); }}};
};

}  // namespace

struct PeerService::Impl : public worker::v1::Peer::CallbackService {
  grpc::ServerBidiReactor<PeerMessage, PeerMessage>* Session(
      grpc::CallbackServerContext* context) override {
    return new decode::Session({receiver.load(), draft_receiver.load()});
  }

  std::atomic<kvtransfer::Receiver*> receiver{nullptr};
  std::atomic<kvtransfer::Receiver*> draft_receiver{nullptr};
};

PeerService::PeerService() : impl_(std::make_unique<Impl>()) {}
PeerService::~PeerService() = default;

grpc::Service* PeerService::service() { return impl_.get(); }

void PeerService::SetReceiver(kvtransfer::Receiver* receiver) { impl_->receiver.store(receiver); }

void PeerService::SetDraftReceiver(kvtransfer::Receiver* receiver) {
  impl_->draft_receiver.store(receiver);
}

}  // namespace baton::decode
