#pragma once

// One control stream to one decode worker. Included by peer_client.cc and peer_session.cc only.

#include <memory>
#include <optional>
#include <string>

#include <grpcpp/grpcpp.h>

#include "absl/status/statusor.h"
#include "baton/worker/v1/peer.grpc.pb.h"
#include "engine/base/mutex.h"
#include "engine/process/channel.h"
#include "engine/process/stream_writer.h"
#include "kvtransfer/peer_link.h"
#include "kvtransfer/sender.h"
#include "prefill_worker/peer_table.h"

namespace baton::prefill {

// Thread-safe. gRPC keeps it alive until the stream has ended.
class PeerSession
    : public grpc::ClientBidiReactor<worker::v1::PeerMessage, worker::v1::PeerMessage>,
      public kvtransfer::PeerLink,
      public PeerStream {
 public:
  // Opens the stream and says Hello.
  static std::shared_ptr<PeerSession> Start(const std::string& address,
                                            const process::ChannelSecurity& security,
                                            const worker::v1::Hello& hello,
                                            std::function<void()> on_end);

  // Blocks until the peer has said Hello.
  // Errors: the peer's refusal; UNAVAILABLE when the stream ended; DEADLINE_EXCEEDED.
  absl::StatusOr<worker::v1::Hello> WaitForHello(absl::Duration timeout);
  // Whether the stream has ended, or does within `timeout`.
  bool WaitForEnd(absl::Duration timeout);
  // From here on messages go to `sender`, and so does the end of the stream.
  void Attach(std::shared_ptr<kvtransfer::Sender> sender);

  // PeerLink and PeerStream.
  bool ended() const override;
  bool Send(worker::v1::PeerMessage message) override { return writer_.Write(std::move(message)); }
  void Close() override { context_.TryCancel(); }

  // Reactor.
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override { writer_.OnWriteDone(ok); }
  void OnDone(const grpc::Status& status) override;

 private:
  explicit PeerSession(std::function<void()> on_end) : on_end_(std::move(on_end)) {}

  const std::function<void()> on_end_;
  std::shared_ptr<grpc::Channel> channel_;  // shared with the stub, as gRPC wants it
  std::unique_ptr<worker::v1::Peer::Stub> stub_;
  grpc::ClientContext context_;
  worker::v1::PeerMessage incoming_;
  process::StreamWriter<worker::v1::PeerMessage> writer_{
      {.start_write = [this](const worker::v1::PeerMessage* message) { StartWrite(message); },
       .finish = [this](const absl::Status&) { StartWritesDone(); }}};
  std::shared_ptr<PeerSession> self_;  // gRPC's share; until OnDone

  mutable base::Mutex mutex_;
  base::CondVar changed_;
  std::optional<worker::v1::Hello> hello_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
  // Shared with the loop's transfers, which may outlive the session.
  std::shared_ptr<kvtransfer::Sender> sender_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace baton::prefill
