#include "prefill_worker/prefill_service.h"

#include <atomic>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "baton/worker/v1/prefill.grpc.pb.h"
#include "engine/base/status_macros.h"
#include "prefill_worker/prefill_loop.h"
#include "worker/bidi_call.h"
#include "worker/convert.h"

namespace baton::prefill {
namespace {

using worker::v1::PrefillRequest;
using worker::v1::PrefillResponse;

class Handler : public worker::CallHandler<PrefillRequest, PrefillResponse> {
 public:
  Handler(PrefillLoop* loop, bool draining) : loop_(loop), draining_(draining) {}

  absl::Status OnRequest(PrefillRequest request, std::shared_ptr<PrefillSink> sink) override {
    if (loop_ == nullptr) return absl::UnavailableError("prefill: the model is still loading");
    switch (request.message_case()) {
      case PrefillRequest::kOpen:
        return Open(request.open(), std::move(sink));
      case PrefillRequest::kTicket:
        return GiveTicket(std::move(*request.mutable_ticket()));
      case PrefillRequest::MESSAGE_NOT_SET:
        break;
    }
    return Refuse("a message that is neither open nor ticket");
  }

  bool OnCancel(absl::Status status) override {
    if (!call_) return false;
    loop_->Cancel(*call_, std::move(status));
    return true;
  }

 private:
  absl::Status Open(const PrefillRequest::Open& open, std::shared_ptr<PrefillSink> sink) {
    if (call_) return Refuse("a second open");
    if (draining_) return absl::UnavailableError("prefill: draining");
    BATON_ASSIGN_OR_RETURN(runtime::EngineRequest request,
                           worker::RequestFromProto(open.spec(), loop_->limits()));
    BATON_ASSIGN_OR_RETURN(call_,
                           loop_->Open(std::move(request), open.needs_handoff(), std::move(sink)));
    return absl::OkStatus();
  }

  absl::Status GiveTicket(PrefillRequest::Ticket ticket) {
    if (!call_) return Refuse("a ticket before the open");
    if (has_ticket_) return Refuse("a second ticket");
    has_ticket_ = true;
    loop_->GiveTicket(*call_, std::move(ticket));
    return absl::OkStatus();
  }

  // Where the loop has the call, it ends it.
  absl::Status Refuse(absl::string_view what) {
    absl::Status status = absl::InvalidArgumentError(absl::StrCat("prefill: ", what));
    if (!call_) return status;
    loop_->Cancel(*call_, std::move(status));
    return absl::OkStatus();
  }

  PrefillLoop* const loop_;  // null while loading
  const bool draining_;
  std::optional<CallId> call_;
  bool has_ticket_ = false;
};

}  // namespace

struct PrefillService::Impl : public worker::v1::PrefillWorker::CallbackService {
  explicit Impl(std::function<bool()> is_draining) : draining(std::move(is_draining)) {}

  grpc::ServerBidiReactor<PrefillRequest, PrefillResponse>* Prefill(
      grpc::CallbackServerContext* context) override {
    return worker::BidiCall<PrefillRequest, PrefillResponse>::Start(
        context, std::make_unique<Handler>(loop.load(), draining()));
  }

  const std::function<bool()> draining;
  std::atomic<PrefillLoop*> loop{nullptr};
};

PrefillService::PrefillService(std::function<bool()> draining)
    : impl_(std::make_unique<Impl>(std::move(draining))) {}
PrefillService::~PrefillService() = default;

grpc::Service* PrefillService::service() { return impl_.get(); }

void PrefillService::SetLoop(PrefillLoop* loop) { impl_->loop.store(loop); }

}  // namespace baton::prefill
