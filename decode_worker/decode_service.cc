#include "decode_worker/decode_service.h"

#include <atomic>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "baton/worker/v1/decode.grpc.pb.h"
#include "decode_worker/decode_loop.h"
#include "decode_worker/merge_tokens.h"
#include "engine/base/status_macros.h"
#include "worker/bidi_call.h"
#include "worker/convert.h"
#include "worker/send_thread.h"

namespace baton::decode {
namespace {

using worker::v1::DecodeRequest;
using worker::v1::DecodeResponse;

// A router that finds no blocks here asks again after this long, if no other worker has them.
constexpr absl::Duration kRetryAfter = absl::Milliseconds(50);

// Tells a router that is refused how full this worker is.
absl::Status WithLoad(const absl::Status& status, const DecodeLoop& loop) {
  const worker::v1::WorkerLoad load = loop.load();
  return process::WithErrorInfo(
      process::WithRetryInfo(status, kRetryAfter), "KV_BLOCKS",
      {{"kv_blocks_total", absl::StrCat(load.kv_blocks_total())},
       {"kv_blocks_available", absl::StrCat(load.kv_blocks_free() + load.kv_blocks_cached())},
       {"requests_running", absl::StrCat(load.requests_running())},
       {"requests_waiting", absl::StrCat(load.requests_waiting())}});
}

// All calls together. A step of a full batch queues one for each sequence.
constexpr size_t kMaxQueuedMessages = 1 << 16;

class LoadReportingSink : public DecodeSink {
 public:
  LoadReportingSink(std::shared_ptr<DecodeSink> sink, const DecodeLoop& loop)
      : sink_(std::move(sink)), loop_(loop) {}

  bool Send(DecodeResponse response) override { return sink_->Send(std::move(response)); }
  void Finish(absl::Status status) override {
    if (absl::IsResourceExhausted(status)) status = WithLoad(status, loop_);
    sink_->Finish(std::move(status));
  }

 private:
  const std::shared_ptr<DecodeSink> sink_;  // shared with gRPC
  const DecodeLoop& loop_;
};

class Handler : public worker::CallHandler<DecodeRequest, DecodeResponse> {
 public:
  Handler(DecodeLoop* loop, worker::SendThread* sends, bool draining)
      : loop_(loop), sends_(sends), draining_(draining) {}

  absl::Status OnRequest(DecodeRequest request, std::shared_ptr<DecodeSink> sink) override {
    if (loop_ == nullptr) return absl::UnavailableError("decode: the model is still loading");
    if (call_) {
      loop_->Cancel(*call_, absl::InvalidArgumentError("decode: a second message"));
      return absl::OkStatus();
    }
    if (!request.has_open())
      return absl::InvalidArgumentError("decode: the first message is no open");
    if (draining_) return absl::UnavailableError("decode: draining");
    BATON_ASSIGN_OR_RETURN(runtime::EngineRequest engine_request,
                           worker::RequestFromProto(request.open().spec(), loop_->limits()));
    absl::StatusOr<CallId> call = loop_->Open(
        std::move(engine_request), request.open().prefill_locally(),
        sends_->Wrap<DecodeResponse>(std::make_shared<LoadReportingSink>(std::move(sink), *loop_)));
    if (absl::IsResourceExhausted(call.status())) return WithLoad(call.status(), *loop_);
    BATON_RETURN_IF_ERROR(call.status());
    call_ = *call;
    return absl::OkStatus();
  }

  bool OnCancel(absl::Status status) override {
    if (!call_) return false;
    loop_->Cancel(*call_, std::move(status));
    return true;
  }

 private:
  DecodeLoop* const loop_;  // null while loading
  worker::SendThread* const sends_;
  const bool draining_;
  std::optional<CallId> call_;
};

}  // namespace

struct DecodeService::Impl : public worker::v1::DecodeWorker::CallbackService {
  explicit Impl(std::function<bool()> is_draining) : draining(std::move(is_draining)) {}

  grpc::ServerBidiReactor<DecodeRequest, DecodeResponse>* Generate(
      grpc::CallbackServerContext* context) override {
    return worker::BidiCall<DecodeRequest, DecodeResponse>::Start(
        context, std::make_unique<Handler>(loop.load(), &sends, draining()), &MergeTokens);
  }

  const std::function<bool()> draining;
  std::atomic<DecodeLoop*> loop{nullptr};
  worker::SendThread sends{kMaxQueuedMessages};
};

DecodeService::DecodeService(std::function<bool()> draining)
    : impl_(std::make_unique<Impl>(std::move(draining))) {}
DecodeService::~DecodeService() = default;

grpc::Service* DecodeService::service() { return impl_.get(); }

void DecodeService::SetLoop(DecodeLoop* loop) { impl_->loop.store(loop); }

void DecodeService::FinishSending() { impl_->sends.Stop(); }

}  // namespace baton::decode
