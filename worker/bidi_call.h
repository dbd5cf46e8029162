#pragma once

// A bidirectional call of the worker services on gRPC's callback API. Included by *_service.cc
// only.

#include <functional>
#include <memory>
#include <utility>

#include <grpcpp/grpcpp.h>

#include "absl/status/status.h"
#include "engine/base/mutex.h"
#include "engine/process/grpc_status.h"
#include "engine/process/stream_writer.h"
#include "worker/call_sink.h"

namespace baton::worker {

// What a service does with one call. The methods are called one at a time, on gRPC's threads: they
// must not block.
template <typename Request, typename Response>
class CallHandler {
 public:
  virtual ~CallHandler() = default;
  // An error ends the call with it, unless the engine has the sink already: then the handler must
  // have told the engine.
  virtual absl::Status OnRequest(Request request, std::shared_ptr<CallSink<Response>> sink) = 0;
  // The caller has gone. True if the engine will finish the sink.
  virtual bool OnCancel(absl::Status status) = 0;
};

// Lives until gRPC is done with the call and nobody holds the sink. Thread-safe.
template <typename Request, typename Response>
class BidiCall : public grpc::ServerBidiReactor<Request, Response> {
 public:
  using Merge = std::function<bool(Response* last, Response* next)>;

  // gRPC owns the result. `merge`: see StreamWriter; null: messages stay apart.
  static grpc::ServerBidiReactor<Request, Response>* Start(
      grpc::CallbackServerContext* context,
      std::unique_ptr<CallHandler<Request, Response>> handler,
      Merge merge = nullptr) {
    auto call =
        std::shared_ptr<BidiCall>(new BidiCall(context, std::move(handler), std::move(merge)));
    call->self_ = call;
    call->StartRead(&call->request_);
    return call.get();
  }

  void OnReadDone(bool ok) override {
    // Neither a half-close nor a broken stream ends the call: gRPC tells of the latter by OnCancel.
    if (!ok) return HandleHalfClose();
    absl::Status status;
    {
      base::MutexLock lock(&mutex_);
      if (cancelled_) return;
      opened_ = true;
      status = handler_->OnRequest(std::move(request_), std::make_shared<Sink>(this->self_));
    }
    if (!status.ok()) return writer_.Finish(std::move(status));
    request_ = Request();
    this->StartRead(&request_);
  }

  void OnWriteDone(bool ok) override { writer_.OnWriteDone(ok); }

  void OnCancel() override {
    // The deadline is the router's: it says DEADLINE_EXCEEDED to its client by itself, but counters
    // here should know.
    const bool late = std::chrono::system_clock::now() >= context_->deadline();
    absl::Status status = late ? absl::DeadlineExceededError("deadline passed")
                               : absl::CancelledError("call cancelled");
    bool engine_finishes;
    {
      base::MutexLock lock(&mutex_);
      cancelled_ = true;
      engine_finishes = handler_->OnCancel(status);
    }
    if (!engine_finishes) writer_.Finish(std::move(status));
  }

  void OnDone() override { self_.reset(); }

 private:
  class Sink : public CallSink<Response> {
   public:
    explicit Sink(std::shared_ptr<BidiCall> call) : call_(std::move(call)) {}
    bool Send(Response response) override { return call_->writer_.Write(std::move(response)); }
    void Finish(absl::Status status) override { call_->writer_.Finish(std::move(status)); }

   private:
    const std::shared_ptr<BidiCall> call_;  // shared with gRPC
  };

  BidiCall(grpc::CallbackServerContext* context,
           std::unique_ptr<CallHandler<Request, Response>> handler,
           Merge merge)
      : context_(context),
        handler_(std::move(handler)),
        writer_({.start_write = [this](const Response* response) { this->StartWrite(response); },
                 .finish =
                     [this](const absl::Status& status) {
                       this->grpc::ServerBidiReactor<Request, Response>::Finish(
                           process::ToGrpcStatus(status));
                     },
                 .merge = std::move(merge)}) {}

  void HandleHalfClose() {
    bool opened;
    {
      base::MutexLock lock(&mutex_);
      opened = opened_;
    }
    if (!opened)
      writer_.Finish(absl::InvalidArgumentError("the call ended before its first message"));
  }

  grpc::CallbackServerContext* const context_;
  Request request_;
  base::Mutex mutex_;
  std::unique_ptr<CallHandler<Request, Response>> handler_ ABSL_GUARDED_BY(mutex_);
  bool opened_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  process::StreamWriter<Response> writer_;
  std::shared_ptr<BidiCall> self_;  // gRPC's share; until OnDone
};

}  // namespace baton::worker
