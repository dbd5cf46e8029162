// The workers' side of GenerateCall: choosing them, what they say, what happens when they fail.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "engine/base/status_macros.h"
#include "engine/process/grpc_status.h"
#include "router/call_attempt.h"
#include "router/generate_call.h"

namespace baton::router {
namespace {

constexpr absl::Duration kRetryDelay = absl::Seconds(1);

// What another worker may do better. CANCELLED comes from a worker that goes away; ours never reach
// here.
bool IsWorkerFailure(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDataLoss(status) || absl::IsCancelled(status) ||
         absl::IsAborted(status) || absl::IsFailedPrecondition(status);
}

}  // namespace

void GenerateCall::Dispatch() {
  const absl::Duration start = deps_.clock->Now();
  if (start >= request_.deadline)
    return End(absl::DeadlineExceededError("the deadline passed in the router"));
  RouteRequest wanted;
  wanted.prompt_tokens = prompt_tokens() + sent_tokens();
  wanted.needs_prefill = deps_.topology == Topology::kPd;
  // A single token more comes from the prefill worker alone: nothing is reserved, nothing is handed
  // over.
  wanted.needs_decode =
      !wanted.needs_prefill || sampling_.max_tokens() - sent_tokens() / sampling_.n() > 1;
  wanted.excluded = excluded_;
  absl::StatusOr<Route> route = ChooseRoute(wanted);
  if (!route.ok()) return End(num_failures_ > 0 ? LostStatus(last_failure_) : route.status());
  deps_.metrics->decision_time.Observe(absl::ToDoubleSeconds(deps_.clock->Now() - start));
  deps_.metrics->CountDecision(!wanted.needs_decode    ? "prefill-only"
                               : !wanted.needs_prefill ? "decode-only"
                                                       : "prefill-decode");
  attempt_ = std::make_unique<Attempt>();
  attempt_->number = ++num_attempts_;
  attempt_->route = *std::move(route);
  attempt_->dispatched = start;
  attempt_->needs_handoff = wanted.needs_prefill && wanted.needs_decode;
  attempt_->worker_ended.assign(sampling_.n(), false);
  if (wanted.needs_decode) OpenDecode(!wanted.needs_prefill);
  if (wanted.needs_prefill && (!wanted.needs_decode || attempt_->route.decode_has_headroom))
    OpenPrefill();
}

// Workers that failed this request are taken again only where there is no other.
absl::StatusOr<Route> GenerateCall::ChooseRoute(const RouteRequest& request) {
  const std::vector<WorkerView> workers = deps_.table->Snapshot();
  absl::StatusOr<Route> route = deps_.policy->Choose(workers, request);
  if (route.ok() || request.excluded.empty()) return route;
  RouteRequest again = request;
  again.excluded.clear();
  return deps_.policy->Choose(workers, again);
}

worker::v1::RequestSpec GenerateCall::MakeSpec() const {
  worker::v1::RequestSpec spec;
  spec.set_request_id(request_.request_id);
  spec.set_attempt(num_attempts_);
  spec.mutable_prompt_ids()->Add(prompt_ids_.begin(), prompt_ids_.end());
  if (sent_tokens() > 0) {  // only with one answer: see OnLegFailed
    spec.mutable_prompt_ids()->Add(answers_[0].ids().begin(), answers_[0].ids().end());
    spec.set_resumed_tokens(sent_tokens());
  }
  *spec.mutable_sampling() = sampling_;
  spec.set_cache_salt(request_.request->cache_salt());
  spec.set_traceparent(request_.trace.Header());
  return spec;
}

void GenerateCall::OpenDecode(bool locally) {
  Attempt& attempt = *attempt_;
  worker::v1::DecodeRequest::Open open;
  *open.mutable_spec() = MakeSpec();
  open.set_prefill_locally(locally);
  attempt.decode_work = open.spec().prompt_ids_size();
  deps_.table->AddWork(attempt.route.decode, attempt.decode_work);
  attempt.decode_open = true;
  const uint32_t number = attempt.number;
  DecodeEvents events;
  events.on_message = [self = shared_from_this(), number](worker::v1::DecodeResponse message) {
    self->strand_.Post([self, number, message = std::move(message)]() mutable {
      self->OnDecodeMessage(number, std::move(message));
    });
  };
  events.on_end = [self = shared_from_this(), number](absl::Status status) {
    self->strand_.Post(
        [self, number, status = std::move(status)] { self->OnDecodeEnd(number, status); });
  };
  attempt.decode = deps_.legs->OpenDecode(attempt.route.decode, std::move(open), request_.deadline,
                                          std::move(events));
}

void GenerateCall::OpenPrefill() {
  Attempt& attempt = *attempt_;
  worker::v1::PrefillRequest::Open open;
  *open.mutable_spec() = MakeSpec();
  open.set_needs_handoff(attempt.needs_handoff);
  attempt.prefill_work = open.spec().prompt_ids_size();
  deps_.table->AddWork(attempt.route.prefill, attempt.prefill_work);
  attempt.prefill_open = true;
  const uint32_t number = attempt.number;
  PrefillEvents events;
  events.on_message = [self = shared_from_this(), number](worker::v1::PrefillResponse message) {
    self->strand_.Post([self, number, message = std::move(message)]() mutable {
      self->OnPrefillMessage(number, std::move(message));
    });
  };
  events.on_end = [self = shared_from_this(), number](absl::Status status) {
    self->strand_.Post(
        [self, number, status = std::move(status)] { self->OnPrefillEnd(number, status); });
  };
  attempt.prefill = deps_.legs->OpenPrefill(attempt.route.prefill, std::move(open),
                                            request_.deadline, std::move(events));
}

bool GenerateCall::IsCurrent(uint32_t attempt) const {
  return !ended_ && attempt_ != nullptr && attempt_->number == attempt;
}

void GenerateCall::OnDecodeMessage(uint32_t number, worker::v1::DecodeResponse message) {
  if (!IsCurrent(number)) return;
  Attempt& attempt = *attempt_;
  switch (message.message_case()) {
    case worker::v1::DecodeResponse::kReserved:
      return OnReserved(std::move(*message.mutable_reserved()));
    case worker::v1::DecodeResponse::kDone:
      attempt.decode_done = true;
      if (!attempt.needs_handoff) cached_prompt_tokens_ = message.done().cached_prompt_tokens();
      times_.decode_done = std::move(*message.mutable_done());
      return MaybeComplete();
    case worker::v1::DecodeResponse::kTokens:
      break;
    case worker::v1::DecodeResponse::MESSAGE_NOT_SET:
      return;
  }
  attempt.decode_spoke = true;
  if (attempt.needs_handoff && !attempt.first_delivered) {
    if (attempt.held.size() >= kMaxHeldMessages)
      return End(absl::InternalError("decode worker runs without first tokens"));
    attempt.held.push_back(std::move(*message.mutable_tokens()));
    return;
  }
  if (!times_.first_computed.has_value()) {
    times_.first_computed = deps_.clock->Now();
    times_.dispatched = attempt.dispatched;
  }
  Deliver(message.tokens().tokens(), message.tokens().finished(), /*from_decode=*/true);
}

void GenerateCall::OnReserved(worker::v1::DecodeResponse::Reserved reserved) {
  Attempt& attempt = *attempt_;
  if (attempt.reserved || !attempt.needs_handoff) return;
  attempt.reserved = true;
  if (!times_.reserved.has_value()) {
    times_.reserved = deps_.clock->Now();
    if (!times_.dispatched.has_value()) times_.dispatched = attempt.dispatched;
  }
  if (attempt.prefill == nullptr) OpenPrefill();
  worker::v1::PrefillRequest::Ticket ticket;
  *ticket.mutable_handoff() = std::move(*reserved.mutable_handoff());
  ticket.set_decode_address(attempt.route.decode);
  ticket.set_first_missing_block(reserved.first_missing_block());
  *ticket.mutable_block_table() = std::move(*reserved.mutable_block_table());
  attempt.prefill->SendTicket(std::move(ticket));
  DeliverFirst();
}

void GenerateCall::OnPrefillMessage(uint32_t number, worker::v1::PrefillResponse message) {
  if (!IsCurrent(number)) return;
  Attempt& attempt = *attempt_;
  if (message.has_done()) {
    times_.prefill_done = std::move(*message.mutable_done());
    return MaybeComplete();
  }
  if (!message.has_first_tokens() || attempt.first.has_value()) return;
  deps_.table->AddWork(attempt.route.prefill, -std::exchange(attempt.prefill_work, 0));
  attempt.first = std::move(*message.mutable_first_tokens());
  if (!times_.first_computed.has_value()) {
    times_.first_computed = deps_.clock->Now();
    cached_prompt_tokens_ = attempt.first->cached_prompt_tokens();
    times_.prefill = *attempt.first;
    times_.prefill->clear_tokens();
    times_.prefill->clear_finished();
  }
  DeliverFirst();
}

void GenerateCall::OnPrefillEnd(uint32_t number, const absl::Status& status) {
  if (!IsCurrent(number)) return;
  Attempt& attempt = *attempt_;
  attempt.prefill_open = false;
  if (last_message_.has_value()) return MaybeComplete();
  if (!status.ok()) {
    // What fails behind the hand-over is no matter of the answer any more, if the first tokens are
    // here.
    if (!attempt.decode_spoke || !attempt.first.has_value())
      OnLegFailed(status, attempt.route.prefill);
    return;
  }
  if (!attempt.first.has_value() || !attempt.needs_handoff) {
    End(absl::InternalError("prefill worker ended without an answer"));
  }
}

void GenerateCall::OnDecodeEnd(uint32_t number, const absl::Status& status) {
  if (!IsCurrent(number)) return;
  Attempt& attempt = *attempt_;
  attempt.decode_open = false;
  if (last_message_.has_value()) return MaybeComplete();
  if (!status.ok()) return OnLegFailed(status, attempt.route.decode);
  // A short answer can be over before the prefill worker's first tokens are here: they come, or
  // that leg fails.
  if (attempt.decode_done && attempt.needs_handoff && !attempt.first_delivered) return;
  End(absl::InternalError("decode worker ended without an answer"));
}

void GenerateCall::OnLegFailed(const absl::Status& status, std::string address) {
  DropAttempt();
  const absl::Duration now = deps_.clock->Now();
  if (absl::IsDeadlineExceeded(status) || now >= request_.deadline) {
    return End(absl::DeadlineExceededError("the deadline passed"));
  }
  const bool can_resume = sent_tokens() == 0 || answers_.size() == 1;
  excluded_.push_back(address);
  if (absl::IsResourceExhausted(status) && can_resume) {
    deps_.metrics->CountRetry("exhausted");
    return WaitForCapacity();
  }
  last_failure_ = Annotate(status, address);
  if (!IsWorkerFailure(status)) return End(status);
  ++num_failures_;
  if (!can_resume || num_failures_ > deps_.max_retries) return End(LostStatus(last_failure_));
  deps_.metrics->CountRetry(absl::IsDataLoss(status) ? "data_loss" : "unavailable");
  Dispatch();
}

// A full worker is no failure: another one, or the same again a little later, until the deadline.
void GenerateCall::WaitForCapacity() {
  RouteRequest request;
  request.prompt_tokens = prompt_tokens() + sent_tokens();
  request.needs_prefill = deps_.topology == Topology::kPd;
  request.excluded = excluded_;
  if (deps_.policy->Choose(deps_.table->Snapshot(), request).ok()) return Dispatch();
  excluded_.clear();
  const absl::Duration when = std::min(deps_.clock->Now() + deps_.capacity_wait, request_.deadline);
  timer_ = deps_.timers->At(when, [self = shared_from_this()] {
    self->strand_.Post([self] {
      self->timer_.reset();
      if (!self->ended_) self->Dispatch();
    });
  });
}

absl::Status GenerateCall::LostStatus(const absl::Status& cause) const {
  if (absl::IsFailedPrecondition(cause) && sent_tokens() == 0) return cause;
  absl::Status status = absl::UnavailableError(absl::StrCat("worker lost: ", cause.message()));
  status = process::WithErrorInfo(
      std::move(status), "WORKER_LOST",
      {{"tokens_sent", absl::StrCat(sent_tokens())}, {"attempts", absl::StrCat(num_attempts_)}});
  return sent_tokens() == 0 ? process::WithRetryInfo(std::move(status), kRetryDelay) : status;
}

void GenerateCall::DropAttempt() {
  if (attempt_ == nullptr) return;
  Attempt& attempt = *attempt_;
  if (attempt.decode_work > 0) deps_.table->AddWork(attempt.route.decode, -attempt.decode_work);
  if (attempt.prefill_work > 0) deps_.table->AddWork(attempt.route.prefill, -attempt.prefill_work);
  // A leg that has nothing left to say ends by itself, in good order.
  const bool prefill_ends =
      last_message_.has_value() || (attempt.decode_done && attempt.first_delivered);
  if (attempt.prefill_open && !(prefill_ends && attempt.first.has_value()))
    attempt.prefill->Cancel();
  if (attempt.decode_open && !attempt.decode_done) attempt.decode->Cancel();
  attempt_.reset();
}

}  // namespace baton::router
