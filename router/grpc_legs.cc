#include "router/grpc_legs.h"

#include <chrono>
#include <memory>
#include <utility>

#include "absl/time/clock.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"

#include "baton/worker/v1/decode.grpc.pb.h"
#include "baton/worker/v1/prefill.grpc.pb.h"

#include "engine/base/log.h"
#include "engine/process/channel.h"
#include "engine/process/grpc_status.h"
#include "engine/process/stream_writer.h"

namespace baton::router {
namespace {

// From the end of the service until its last call to a worker has ended too.
constexpr absl::Duration kEndTimeout = absl::Seconds(5);

// One bidirectional call. gRPC holds it until OnDone; the handle that the request holds may go
// earlier or later, hence the shared ownership.
template <typename Request, typename Response>
class LegCall : public grpc::ClientBidiReactor<Request, Response>,
                public std::enable_shared_from_this<LegCall<Request, Response>> {
 public:
  LegCall(const WorkerChannels* channels, LegEvents<Response> events)
      : events_(std::move(events)),
        use_(channels),
        writer_({.start_write = [this](const Request* request) { this->StartWrite(request); },
                 .finish = [](const absl::Status&) {}}) {}

  grpc::ClientContext* context() { return &context_; }

  // After the stub has bound the reactor. The call lives until OnDone.
  void Start(Request open) {
    self_ = this->shared_from_this();
    // Keeps OnDone away while requests may still be written from outside the reactor's own
    // callbacks.
    this->AddHold();
    this->StartRead(&response_);
    this->StartCall();
    Write(std::move(open));
  }
  // After Release: nothing.
  void Write(Request request) {
    base::MutexLock lock(&mutex_);
    if (!released_) writer_.Write(std::move(request));
  }
  void Cancel() { context_.TryCancel(); }
  // Nothing more will be written. Idempotent.
  void Release() {
    base::MutexLock lock(&mutex_);
    if (!released_) this->RemoveHold();
    released_ = true;
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      Release();  // the worker has ended the call: writing is over
      return;
    }
    // Before the next read is started: its callback may run on another thread at once, and order
    // matters.
    events_.on_message(std::exchange(response_, Response()));
    this->StartRead(&response_);
  }
  void OnWriteDone(bool ok) override { writer_.OnWriteDone(ok); }
  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<LegCall> self = std::move(self_);
    LegEvents<Response> events = std::move(events_);
    events.on_end(process::FromGrpcStatus(status));
  }

 private:
  LegEvents<Response> events_;
  const WorkerChannels::Use use_;
  grpc::ClientContext context_;
  Response response_;
  process::StreamWriter<Request> writer_;
  base::Mutex mutex_;
  bool released_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<LegCall> self_;  // from Start to OnDone
};

std::chrono::system_clock::time_point WallTime(absl::Duration deadline, const base::Clock& clock) {
  return absl::ToChronoTime(absl::Now() + (deadline - clock.Now()));
}

// As metadata too, for whatever traces calls between router and workers.
void AddTrace(const worker::v1::RequestSpec& spec, grpc::ClientContext* context) {
  if (!spec.traceparent().empty()) context->AddMetadata("traceparent", spec.traceparent());
}

class GrpcPrefillLeg : public PrefillLeg {
 public:
  using Call = LegCall<worker::v1::PrefillRequest, worker::v1::PrefillResponse>;
  GrpcPrefillLeg(std::unique_ptr<worker::v1::PrefillWorker::Stub> stub, std::shared_ptr<Call> call)
      : call_(std::move(call)), stub_(std::move(stub)) {}
  ~GrpcPrefillLeg() override { call_->Release(); }
  void SendTicket(worker::v1::PrefillRequest::Ticket ticket) override {
    worker::v1::PrefillRequest request;
    *request.mutable_ticket() = std::move(ticket);
    call_->Write(std::move(request));
  }
  void Cancel() override { call_->Cancel(); }

 private:
  const std::shared_ptr<Call> call_;
  const std::unique_ptr<worker::v1::PrefillWorker::Stub> stub_;  // goes first: it holds the channel
};

class GrpcDecodeLeg : public DecodeLeg {
 public:
  using Call = LegCall<worker::v1::DecodeRequest, worker::v1::DecodeResponse>;
  GrpcDecodeLeg(std::unique_ptr<worker::v1::DecodeWorker::Stub> stub, std::shared_ptr<Call> call)
      : call_(std::move(call)), stub_(std::move(stub)) {}
  ~GrpcDecodeLeg() override { call_->Release(); }
  void Cancel() override { call_->Cancel(); }

 private:
  const std::shared_ptr<Call> call_;
  const std::unique_ptr<worker::v1::DecodeWorker::Stub> stub_;  // goes first: it holds the channel
};

}  // namespace

WorkerChannels::WorkerChannels(process::ChannelSecurity security)
    : security_(std::move(security)) {}

WorkerChannels::~WorkerChannels() {
  const absl::Time deadline = absl::Now() + kEndTimeout;
  base::MutexLock lock(&mutex_);
  while (uses_ > 0 && absl::Now() < deadline) unused_.WaitFor(&mutex_, deadline - absl::Now());
  if (uses_ > 0) BATON_LOG(Warning, "calls to workers have not ended", LogField("calls", uses_));
}

WorkerChannels::Use::Use(const WorkerChannels* channels) : channels_(channels) {
  base::MutexLock lock(&channels_->mutex_);
  ++channels_->uses_;
}

WorkerChannels::Use::~Use() {
  base::MutexLock lock(&channels_->mutex_);
  // Under the lock: the channels may be gone as soon as it is released.
  if (--channels_->uses_ == 0) channels_->unused_.NotifyAll();
}

std::shared_ptr<grpc::Channel> WorkerChannels::of(const std::string& address) const {
  base::MutexLock lock(&mutex_);
  std::shared_ptr<grpc::Channel>& channel = channels_[address];
  if (channel == nullptr) channel = process::MakeChannel(address, security_);
  return channel;
}

void WorkerChannels::Forget(const std::string& address) {
  base::MutexLock lock(&mutex_);
  channels_.erase(address);
}

std::unique_ptr<PrefillLeg> GrpcLegFactory::OpenPrefill(const std::string& address,
                                                        worker::v1::PrefillRequest::Open open,
                                                        absl::Duration deadline,
                                                        PrefillEvents events) {
  auto stub = worker::v1::PrefillWorker::NewStub(channels_->of(address));
  auto call = std::make_shared<GrpcPrefillLeg::Call>(channels_, std::move(events));
  call->context()->set_deadline(WallTime(deadline, *clock_));
  AddTrace(open.spec(), call->context());
  stub->async()->Prefill(call->context(), call.get());
  worker::v1::PrefillRequest request;
  *request.mutable_open() = std::move(open);
  call->Start(std::move(request));
  return std::make_unique<GrpcPrefillLeg>(std::move(stub), std::move(call));
}

std::unique_ptr<DecodeLeg> GrpcLegFactory::OpenDecode(const std::string& address,
                                                      worker::v1::DecodeRequest::Open open,
                                                      absl::Duration deadline,
                                                      DecodeEvents events) {
  auto stub = worker::v1::DecodeWorker::NewStub(channels_->of(address));
  auto call = std::make_shared<GrpcDecodeLeg::Call>(channels_, std::move(events));
  call->context()->set_deadline(WallTime(deadline, *clock_));
  AddTrace(open.spec(), call->context());
  stub->async()->Generate(call->context(), call.get());
  worker::v1::DecodeRequest request;
  *request.mutable_open() = std::move(open);
  call->Start(std::move(request));
  return std::make_unique<GrpcDecodeLeg>(std::move(stub), std::move(call));
}

}  // namespace baton::router
