#pragma once

// The two ways an answer reaches a gRPC client. Private to router_service.cc.

#include <memory>
#include <string>
#include <utility>

#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"

#include "baton/v1/generation.pb.h"

#include "engine/process/grpc_status.h"
#include "engine/process/stream_writer.h"
#include "router/answer_merge.h"
#include "router/generate_call.h"

namespace baton::router {

// What a reactor and its GenerateCall have in common. The reactor lives until OnDone, the call
// until its last worker has ended; each may be the last to use the other, hence the shared
// ownership. The cycle is cut in OnDone.
template <typename Reactor, typename Self>
class CallReactor : public Reactor, public std::enable_shared_from_this<Self> {
 public:
  // `absolute_deadline` tells a client that gave up from one whose time was over. `place` is its
  // token's.
  void Bind(std::shared_ptr<GenerateCall> call,
            absl::Time absolute_deadline,
            absl::Duration slack,
            std::shared_ptr<void> place) {
    self_ = this->shared_from_this();
    call_ = std::move(call);
    deadline_ = absolute_deadline - slack;
    place_ = std::move(place);
  }
  explicit CallReactor(grpc::CallbackServerContext* context) : context_(context) {}
  void OnCancel() override {
    call_->OnClientCancel(absl::Now() >= deadline_
                              ? absl::DeadlineExceededError("the client's deadline passed")
                              : absl::CancelledError("the client has gone"));
  }
  // Before Finish, after which the context may be gone.
  void AddTrailer(const std::string& key, const std::string& value) {
    context_->AddTrailingMetadata(key, value);
  }
  // Its place is free before the client hears of the end: it may send its next request at once.
  void FinishCall(const absl::Status& status) {
    place_.reset();
    this->Finish(process::ToGrpcStatus(status));
  }
  void OnDone() override {
    call_.reset();
    place_.reset();
    const std::shared_ptr<Self> self = std::move(self_);
  }

 private:
  grpc::CallbackServerContext* const context_;
  std::shared_ptr<Self> self_;  // from Bind to OnDone
  std::shared_ptr<GenerateCall> call_;
  absl::Time deadline_;
  std::shared_ptr<void> place_;
};

// `limit`: most tokens that wait for the client.
class StreamReactor
    : public CallReactor<grpc::ServerWriteReactor<v1::GenerateResponse>, StreamReactor> {
 public:
  StreamReactor(grpc::CallbackServerContext* context, size_t limit)
      : CallReactor(context),
        writer_(
            {.start_write = [this](const v1::GenerateResponse* message) { StartWrite(message); },
             .finish = [this](const absl::Status& status) { FinishCall(status); },
             .merge = &MergeDeltas,
             .weigh = &WeightOf},
            limit) {}
  process::StreamWriter<v1::GenerateResponse>& writer() { return writer_; }
  void OnWriteDone(bool ok) override { writer_.OnWriteDone(ok); }

 private:
  process::StreamWriter<v1::GenerateResponse> writer_;
};

class StreamSink : public ClientSink {
 public:
  explicit StreamSink(std::shared_ptr<StreamReactor> reactor) : reactor_(std::move(reactor)) {}
  absl::Status Write(v1::GenerateResponse response) override {
    switch (reactor_->writer().TryWrite(std::move(response))) {
      case process::WriteResult::kQueued:
        return absl::OkStatus();
      case process::WriteResult::kFull:
        return absl::ResourceExhaustedError("the client reads too slowly: its buffer is full");
      case process::WriteResult::kClosed:
        break;
    }
    return absl::CancelledError("the client has gone");
  }
  void AddTrailer(const std::string& key, const std::string& value) override {
    reactor_->AddTrailer(key, value);
  }
  // A client that is still there gets all tokens that were promised before it gets the error.
  void Finish(const absl::Status& status) override {
    const bool gone = absl::IsCancelled(status) || absl::IsDeadlineExceeded(status) ||
                      absl::IsResourceExhausted(status);
    reactor_->writer().Finish(status, /*keep_waiting=*/!gone);
  }

 private:
  const std::shared_ptr<StreamReactor> reactor_;
};

class UnaryReactor : public CallReactor<grpc::ServerUnaryReactor, UnaryReactor> {
 public:
  using CallReactor::CallReactor;
};

// The same call, collected.
class UnarySink : public ClientSink {
 public:
  // `response` is gRPC's and lives until the reactor is done.
  UnarySink(std::shared_ptr<UnaryReactor> reactor,
            std::string request_id,
            v1::GenerateUnaryResponse* response)
      : reactor_(std::move(reactor)), response_(response) {
    response_->set_request_id(std::move(request_id));
  }
  absl::Status Write(v1::GenerateResponse message) override {
    while (response_->choices_size() <= static_cast<int>(message.index())) {
      const int index = response_->choices_size();
      response_->add_choices()->set_index(static_cast<uint32_t>(index));
    }
    v1::GenerateUnaryResponse::Choice* choice =
        response_->mutable_choices(static_cast<int>(message.index()));
    choice->mutable_text()->append(message.text());
    choice->mutable_token_ids()->MergeFrom(message.token_ids());
    choice->mutable_logprobs()->MergeFrom(message.logprobs());
    if (!message.has_finished()) return absl::OkStatus();
    v1::Finished* finished = message.mutable_finished();
    if (finished->has_usage()) response_->mutable_usage()->Swap(finished->mutable_usage());
    if (finished->has_timings()) response_->mutable_timings()->Swap(finished->mutable_timings());
    finished->clear_usage();
    finished->clear_timings();
    choice->mutable_finished()->Swap(finished);
    return absl::OkStatus();
  }
  void AddTrailer(const std::string& key, const std::string& value) override {
    reactor_->AddTrailer(key, value);
  }
  void Finish(const absl::Status& status) override { reactor_->FinishCall(status); }

 private:
  const std::shared_ptr<UnaryReactor> reactor_;
  v1::GenerateUnaryResponse* const response_;
};

}  // namespace baton::router
