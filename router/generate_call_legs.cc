// The workers' side of GenerateCall: getting them, what they say, what happens when they fail.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "engine/base/status_macros.h"
#include "engine/process/grpc_status.h"
#include "router/call_attempt.h"
#include "router/generate_call.h"

namespace baton::router {
namespace {

bool Contains(const std::vector<std::string>& list, const std::string& value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

Priority ClassOf(v1::Priority priority) {
  if (priority == v1::PRIORITY_HIGH) return Priority::kHigh;
  return priority == v1::PRIORITY_LOW ? Priority::kLow : Priority::kNormal;
}

// What a prefill worker orders its prompts by, in steps of a few thousand tokens of head start.
// Two messages of the same moment, over two connections, are not further apart than this.
constexpr absl::Duration kFirstTokensPatience = absl::Seconds(1);

int WorkerPriority(v1::Priority priority) {
  constexpr int kSteps = 8;
  if (priority == v1::PRIORITY_HIGH) return kSteps;
  return priority == v1::PRIORITY_LOW ? -kSteps : 0;
}

}  // namespace

GenerateCall::Attempt* GenerateCall::Find(uint32_t id) {
  if (ended_) return nullptr;
  for (const std::unique_ptr<Attempt>& attempt : attempts_) {
    if (attempt->id == id) return attempt.get();
  }
  return nullptr;
}

AdmissionRequest GenerateCall::MakeAdmission(const Attempt& attempt) const {
  AdmissionRequest out;
  out.tenant = request_.tenant;
  out.priority = ClassOf(request_.request->priority());
  const uint32_t sent = sent_tokens(attempt);
  out.route.prompt_tokens = prompt_tokens() + sent;
  out.route.num_choices = attempt.num_choices;
  out.route.needs_prefill = deps_.topology == Topology::kPd;
  // A single token more comes from the prefill worker alone: nothing is reserved, nothing is handed
  // over.
  out.route.needs_decode =
      !out.route.needs_prefill || sampling_.max_tokens() - sent / attempt.num_choices > 1;
  out.route.excluded = attempt.excluded;
  out.keys = prompt_keys_;
  out.deadline = request_.deadline;
  out.first_token_by = request_.received + deps_.ttft_max;
  out.resumes = has_place_;
  return out;
}

void GenerateCall::Submit(std::unique_ptr<Attempt> owned) {
  if (deps_.clock->Now() >= request_.deadline)
    return End(absl::DeadlineExceededError("the deadline passed in the router"));
  Attempt* attempt = owned.get();
  attempt->id = next_attempt_++;
  attempts_.push_back(std::move(owned));
  AdmissionRequest wanted = MakeAdmission(*attempt);
  const bool takes_place = !wanted.resumes;
  absl::StatusOr<Admission::Id> entered =
      deps_.admission->Enter(std::move(wanted), [self = shared_from_this(), id = attempt->id,
                                                 takes_place](absl::StatusOr<Placement> placement) {
        self->strand_.Post([self, id, takes_place, placement = std::move(placement)]() mutable {
          self->OnPlaced(id, takes_place, std::move(placement));
        });
      });
  if (entered.ok()) {
    attempt->waiting = *entered;
    return;
  }
  const auto info = process::GetErrorInfo(entered.status());
  Reject(entered.status(),
         info.has_value() && info->reason == kPredictedLate ? "late" : "queue_full");
}

void GenerateCall::OnPlaced(uint32_t id, bool takes_place, absl::StatusOr<Placement> placement) {
  Attempt* attempt = Find(id);
  if (attempt == nullptr) {  // the call ended, or went another way, while the place was being given
    if (!placement.ok()) return;
    deps_.table->Release(placement->prefill, Verdict::kNone);
    deps_.table->Release(placement->decode, Verdict::kNone);
    if (takes_place) deps_.admission->Leave();
    return;
  }
  attempt->waiting.reset();
  if (!placement.ok()) return OnNotPlaced(*attempt, placement.status());
  has_place_ |= takes_place;
  attempt->placement = *std::move(placement);
  Dispatch(attempt);
}

void GenerateCall::OnNotPlaced(const Attempt& attempt, const absl::Status& status) {
  if (absl::IsDeadlineExceeded(status))
    return has_place_ ? End(status) : Reject(status, "deadline");
  if (attempt.failures > 0) return End(LostStatus(last_failure_));
  if (has_place_) return End(status);
  if (absl::IsUnavailable(status))
    return Reject(process::WithRetryInfo(status, kRetryDelay), "no_worker");
  Reject(status, absl::IsInvalidArgument(status) ? "invalid" : "no_worker");
}

void GenerateCall::Dispatch(Attempt* attempt) {
  const absl::Duration now = deps_.clock->Now();
  if (!times_.admitted.has_value()) {
    times_.admitted = now;
    deps_.metrics->queue_time.Observe(absl::ToDoubleSeconds(now - *times_.encoded));
  }
  const Route& route = attempt->route();
  deps_.metrics->CountDecision(route.decode.empty()    ? "prefill-only"
                               : route.prefill.empty() ? "decode-only"
                                                       : "prefill-decode");
  attempt->number = ++num_attempts_;
  attempt->dispatched = now;
  attempt->needs_handoff = !route.prefill.empty() && !route.decode.empty();
  attempt->worker_ended.assign(attempt->num_choices, false);
  last_route_ = route;
  if (!route.decode.empty()) OpenDecode(attempt);
  if (!route.prefill.empty() && (route.decode.empty() || route.decode_has_headroom))
    OpenPrefill(attempt);
  if (attempt->number > 1) return;
  times_.dispatch_overhead =
      deps_.clock->Now() - times_.received - (*times_.admitted - *times_.encoded);
  deps_.metrics->overhead_dispatch.Observe(absl::ToDoubleSeconds(times_.dispatch_overhead));
}

void GenerateCall::NoteForwarded(absl::Duration arrived) {
  const absl::Duration took = deps_.clock->Now() - arrived;
  ++times_.num_forwarded;
  times_.forward_overhead += took;
  deps_.metrics->overhead_forward.Observe(absl::ToDoubleSeconds(took));
}

worker::v1::RequestSpec GenerateCall::MakeSpec(const Attempt& attempt) const {
  worker::v1::RequestSpec spec;
  spec.set_request_id(request_.request_id);
  spec.set_attempt(attempt.number);
  spec.mutable_prompt_ids()->Add(prompt_ids_.begin(), prompt_ids_.end());
  if (const uint32_t sent = sent_tokens(attempt); sent > 0) {  // then there is one choice: Resubmit
    const std::vector<uint32_t>& ids = answers_[attempt.first_choice].ids();
    spec.mutable_prompt_ids()->Add(ids.begin(), ids.end());
    spec.set_resumed_tokens(sent);
  }
  *spec.mutable_sampling() = sampling_;
  spec.mutable_sampling()->set_n(attempt.num_choices);
  spec.mutable_sampling()->set_first_choice(attempt.first_choice);
  spec.set_cache_salt(cache_salt());
  spec.set_priority(WorkerPriority(request_.request->priority()));
  spec.set_traceparent(request_.trace.Header());
  return spec;
}

void GenerateCall::OpenDecode(Attempt* attempt) {
  worker::v1::DecodeRequest::Open open;
  *open.mutable_spec() = MakeSpec(*attempt);
  open.set_prefill_locally(attempt->route().prefill_locally);
  attempt->decode_open = true;
  DecodeEvents events;
  events.on_message = [self = shared_from_this(),
                       id = attempt->id](worker::v1::DecodeResponse message) {
    const absl::Duration arrived = self->deps_.clock->Now();
    self->strand_.Post([self, id, arrived, message = std::move(message)]() mutable {
      self->OnDecodeMessage(id, std::move(message));
      self->NoteForwarded(arrived);
    });
  };
  events.on_end = [self = shared_from_this(), id = attempt->id](absl::Status status) {
    self->strand_.Post([self, id, status = std::move(status)] { self->OnDecodeEnd(id, status); });
  };
  attempt->decode = deps_.legs->OpenDecode(attempt->route().decode, std::move(open),
                                           request_.deadline, std::move(events));
}

void GenerateCall::OpenPrefill(Attempt* attempt) {
  worker::v1::PrefillRequest::Open open;
  *open.mutable_spec() = MakeSpec(*attempt);
  open.set_needs_handoff(attempt->needs_handoff);
  attempt->prefill_open = true;
  PrefillEvents events;
  events.on_message = [self = shared_from_this(),
                       id = attempt->id](worker::v1::PrefillResponse message) {
    const absl::Duration arrived = self->deps_.clock->Now();
    self->strand_.Post([self, id, arrived, message = std::move(message)]() mutable {
      self->OnPrefillMessage(id, std::move(message));
      self->NoteForwarded(arrived);
    });
  };
  events.on_end = [self = shared_from_this(), id = attempt->id](absl::Status status) {
    self->strand_.Post([self, id, status = std::move(status)] { self->OnPrefillEnd(id, status); });
  };
  attempt->prefill = deps_.legs->OpenPrefill(attempt->route().prefill, std::move(open),
                                             request_.deadline, std::move(events));
}

void GenerateCall::OnDecodeMessage(uint32_t id, worker::v1::DecodeResponse message) {
  Attempt* attempt = Find(id);
  if (attempt == nullptr) return;
  switch (message.message_case()) {
    case worker::v1::DecodeResponse::kReserved:
      return OnReserved(attempt, std::move(*message.mutable_reserved()));
    case worker::v1::DecodeResponse::kDone:
      return OnDecodeDone(attempt, std::move(*message.mutable_done()));
    case worker::v1::DecodeResponse::kTokens:
      break;
    case worker::v1::DecodeResponse::MESSAGE_NOT_SET:
      return;
  }
  if (!std::exchange(attempt->decode_spoke, true) && attempt->route().prefill_locally) {
    deps_.table->OnReserved(attempt->placement.decode);
    deps_.table->OnComputed(attempt->placement.decode, 0, 0, -1);
    NoteFirstComputed(*attempt);
  }
  if (attempt->needs_handoff && !attempt->first_delivered) {
    if (attempt->held.size() >= kMaxHeldMessages)
      return End(absl::InternalError("decode worker runs without first tokens"));
    attempt->held.push_back(std::move(*message.mutable_tokens()));
    return;
  }
  Deliver(id, message.tokens().tokens(), message.tokens().finished(), /*from_decode=*/true);
}

void GenerateCall::OnDecodeDone(Attempt* attempt, worker::v1::DecodeResponse::Done done) {
  attempt->decode_done = true;
  if (attempt->route().prefill_locally) {
    if (!times_.prefill.has_value()) cached_prompt_tokens_ = done.cached_prompt_tokens();
    deps_.table->OnComputed(attempt->placement.decode, done.cached_prompt_tokens(), prompt_tokens(),
                            done.prefill_compute_s());
  }
  times_.decode_done = std::move(done);
  MaybeComplete();
}

void GenerateCall::OnReserved(Attempt* attempt, worker::v1::DecodeResponse::Reserved reserved) {
  if (attempt->reserved || !attempt->needs_handoff) return;
  attempt->reserved = true;
  deps_.table->OnReserved(attempt->placement.decode);
  if (!times_.reserved.has_value()) {
    times_.reserved = deps_.clock->Now();
    if (!times_.dispatched.has_value()) times_.dispatched = attempt->dispatched;
  }
  if (attempt->prefill == nullptr) OpenPrefill(attempt);
  worker::v1::PrefillRequest::Ticket ticket;
  *ticket.mutable_handoff() = std::move(*reserved.mutable_handoff());
  ticket.set_decode_address(attempt->route().decode);
  ticket.set_first_missing_block(reserved.first_missing_block());
  *ticket.mutable_block_table() = std::move(*reserved.mutable_block_table());
  if (reserved.has_draft()) *ticket.mutable_draft() = std::move(*reserved.mutable_draft());
  attempt->prefill->SendTicket(std::move(ticket));
  DeliverFirst(attempt->id);
}

void GenerateCall::OnPrefillMessage(uint32_t id, worker::v1::PrefillResponse message) {
  Attempt* attempt = Find(id);
  if (attempt == nullptr) return;
  if (message.has_done()) {
    attempt->prefill_done = true;
    times_.prefill_done = std::move(*message.mutable_done());
    return MaybeComplete();
  }
  if (message.has_first_tokens() && !attempt->first.has_value())
    OnFirstTokens(attempt, std::move(*message.mutable_first_tokens()));
}

void GenerateCall::OnFirstTokens(Attempt* attempt, worker::v1::PrefillResponse::FirstTokens first) {
  deps_.table->OnComputed(attempt->placement.prefill, first.cached_prompt_tokens(),
                          prompt_tokens() + sent_tokens(*attempt), first.compute_s());
  attempt->first = std::move(first);
  if (!times_.first_computed.has_value()) {
    cached_prompt_tokens_ = attempt->first->cached_prompt_tokens();
    times_.prefill = *attempt->first;
    times_.prefill->clear_tokens();
    times_.prefill->clear_finished();
  }
  NoteFirstComputed(*attempt);
  const uint32_t id = attempt->id;
  DeliverFirst(id);
  OnAwaited(id);
}

// The first token of the whole request is in the router.
void GenerateCall::NoteFirstComputed(const Attempt& attempt) {
  if (times_.first_computed.has_value()) return;
  times_.first_computed = deps_.clock->Now();
  times_.dispatched = attempt.dispatched;
  if (!attempt.placement.predicted) return;
  const double took = absl::ToDoubleSeconds(*times_.first_computed - attempt.dispatched);
  deps_.metrics->prediction_error.Observe(std::abs(took - attempt.route().predicted_ttft_s));
}

void GenerateCall::OnPrefillEnd(uint32_t id, const absl::Status& status) {
  Attempt* attempt = Find(id);
  if (attempt == nullptr) return;
  attempt->prefill_open = false;
  if (last_message_.has_value()) return MaybeComplete();
  if (!status.ok()) {
    // What fails behind the hand-over is no matter of the answer any more, if the first tokens are
    // here.
    if (!attempt->decode_spoke || !attempt->first.has_value())
      OnLegFailed(attempt, Leg::kPrefill, status);
    return;
  }
  deps_.table->Release(attempt->placement.prefill, Verdict::kGood);
  if (AllFinished(*attempt) && !attempt->decode_open) {
    Drop(id, Verdict::kGood, Verdict::kGood);  // other choices go on elsewhere
  } else if (!attempt->first.has_value() || !attempt->needs_handoff) {
    End(absl::InternalError("prefill worker ended without an answer"));
  }
}

void GenerateCall::OnDecodeEnd(uint32_t id, const absl::Status& status) {
  Attempt* attempt = Find(id);
  if (attempt == nullptr) return;
  attempt->decode_open = false;
  if (last_message_.has_value()) return MaybeComplete();
  if (!status.ok()) {
    if (AccusesPeer(status) && attempt->prefill_open && !attempt->first.has_value())
      return AwaitFirstTokens(attempt, status);
    return OnLegFailed(attempt, Leg::kDecode, status);
  }
  // A short answer can be over before the prefill worker's first tokens are here: they come, or
  // that leg fails.
  if (attempt->decode_done && attempt->needs_handoff && !attempt->first_delivered) return;
  if (!AllFinished(*attempt))
    return End(absl::InternalError("decode worker ended without an answer"));
  Drop(id, Verdict::kGood, Verdict::kGood);  // other choices go on elsewhere
}

void GenerateCall::AwaitFirstTokens(Attempt* attempt, const absl::Status& decode_failure) {
  attempt->decode_failure = decode_failure;
  attempt->patience = deps_.timers->At(deps_.clock->Now() + kFirstTokensPatience,
                                       [self = shared_from_this(), id = attempt->id] {
                                         self->strand_.Post([self, id] { self->OnAwaited(id); });
                                       });
}

void GenerateCall::OnAwaited(uint32_t id) {
  Attempt* attempt = Find(id);
  if (attempt == nullptr || !attempt->decode_failure.has_value()) return;
  if (AllFinished(*attempt)) {
    Drop(id, Verdict::kGood, Verdict::kGood);  // other choices go on elsewhere
  } else {
    OnLegFailed(attempt, Leg::kDecode, *attempt->decode_failure);
  }
}

void GenerateCall::OnLegFailed(Attempt* attempt, Leg leg, const absl::Status& status) {
  const std::string reporter =
      leg == Leg::kPrefill ? attempt->route().prefill : attempt->route().decode;
  const bool full = absl::IsResourceExhausted(status);
  const Blame blame = BlameFor(leg, status, Contains(attempt->accusers, reporter));
  const auto verdict = [&](Leg which, bool blamed) {
    if (full) return which == leg ? Verdict::kFull : Verdict::kNone;
    return blamed && blame.counts ? Verdict::kFailed : Verdict::kNone;
  };
  const std::unique_ptr<Attempt> old =
      Drop(attempt->id, verdict(Leg::kPrefill, blame.prefill), verdict(Leg::kDecode, blame.decode));
  if (AllFinished(*old)) return;  // it had nothing left to say
  if (absl::IsDeadlineExceeded(status) || deps_.clock->Now() >= request_.deadline)
    return End(absl::DeadlineExceededError("the deadline passed"));
  if (full) {
    // No failure: it waits for room. Counted once, however often it is refused.
    if (!std::exchange(old->was_refused, true)) deps_.metrics->CountRetry("exhausted");
    return Resubmit(*old);
  }
  last_failure_ = Annotate(status, reporter);
  if (!blame.retry) return End(status);
  if (AccusesPeer(status)) old->accusers.push_back(reporter);
  if (blame.prefill && !old->route().prefill.empty()) old->excluded.push_back(old->route().prefill);
  if (blame.decode && !old->route().decode.empty()) old->excluded.push_back(old->route().decode);
  if (++old->failures > deps_.max_retries) return End(LostStatus(last_failure_));
  deps_.metrics->CountRetry(absl::IsDataLoss(status) ? "data_loss" : "unavailable");
  Resubmit(*old);
}

// Goes on with the choices that are not finished: together while none has a token, else each by
// itself, behind its own.
void GenerateCall::Resubmit(const Attempt& old) {
  const auto submit = [&](uint32_t first_choice, uint32_t num_choices) {
    auto attempt = std::make_unique<Attempt>();
    attempt->first_choice = first_choice;
    attempt->num_choices = num_choices;
    attempt->failures = old.failures;
    attempt->was_refused = old.was_refused;
    attempt->excluded = old.excluded;
    attempt->accusers = old.accusers;
    Submit(std::move(attempt));
  };
  if (sent_tokens(old) == 0) return submit(old.first_choice, old.num_choices);
  for (uint32_t i = 0; i < old.num_choices && !ended_; ++i) {
    const uint32_t choice = old.first_choice + i;
    if (!answers_[choice].finished()) submit(choice, 1);
  }
}

absl::Status GenerateCall::LostStatus(const absl::Status& cause) const {
  if (absl::IsFailedPrecondition(cause) && sent_tokens() == 0) return cause;
  absl::Status status = absl::UnavailableError(absl::StrCat("worker lost: ", cause.message()));
  status = process::WithErrorInfo(
      std::move(status), "WORKER_LOST",
      {{"tokens_sent", absl::StrCat(sent_tokens())}, {"attempts", absl::StrCat(num_attempts_)}});
  return sent_tokens() == 0 ? process::WithRetryInfo(std::move(status), kRetryDelay) : status;
}

}  // namespace baton::router
