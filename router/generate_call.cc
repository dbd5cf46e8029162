#include "router/generate_call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/process/grpc_status.h"
#include "router/call_attempt.h"
#include "router/request_check.h"

namespace baton::router {

// When a client should come back that found the queue full or no worker.

GenerateCall::GenerateCall(const CallDeps& deps,
                           CallRequest request,
                           std::unique_ptr<ClientSink> sink)
    : deps_(deps), request_(std::move(request)), sink_(std::move(sink)) {
  times_.received = request_.received;
  deps_.metrics->in_flight.Add(1);
}

GenerateCall::~GenerateCall() = default;

void GenerateCall::Start(absl::Status refusal, absl::string_view refusal_reason) {
  strand_.Post([self = shared_from_this(), refusal = std::move(refusal),
                reason = std::string(refusal_reason)] { self->Begin(refusal, reason); });
}

void GenerateCall::OnClientCancel(absl::Status status) {
  strand_.Post([self = shared_from_this(), status = std::move(status)] { self->End(status); });
}

void GenerateCall::Begin(const absl::Status& refusal, absl::string_view refusal_reason) {
  if (ended_) return;
  if (!refusal.ok()) return Reject(refusal, refusal_reason);
  const absl::Status valid = CheckRequest(*request_.request, deps_.facts->config.vocab_size);
  if (!valid.ok()) return Reject(valid, "invalid");
  const absl::Status usable = deps_.table->Usable();
  if (!usable.ok()) {
    return Reject(
        absl::IsUnavailable(usable) ? process::WithRetryInfo(usable, kRetryDelay) : usable,
        "no_worker");
  }
  uint32_t max_model_len = deps_.table->max_model_len();
  if (deps_.max_model_len > 0) max_model_len = std::min(max_model_len, deps_.max_model_len);
  deps_.encoder->Encode(request_.request, MaxTextBytes(max_model_len),
                        [self = shared_from_this()](absl::StatusOr<EncodedPrompt> prompt) {
                          self->strand_.Post([self, prompt = std::move(prompt)]() mutable {
                            self->OnEncoded(std::move(prompt));
                          });
                        });
}

void GenerateCall::OnEncoded(absl::StatusOr<EncodedPrompt> prompt) {
  if (ended_) return;
  absl::Status status = prompt.status();
  if (status.ok()) status = Prepare(*std::move(prompt));
  if (!status.ok()) {
    return Reject(status, absl::IsResourceExhausted(status) ? "queue_full"
                          : absl::IsUnavailable(status)     ? "no_worker"
                                                            : "invalid");
  }
  times_.encoded = deps_.clock->Now();
  deps_.metrics->tokenize.Observe(absl::ToDoubleSeconds(*times_.encoded - times_.received));
  auto attempt = std::make_unique<Attempt>();
  attempt->num_choices = sampling_.n();
  Submit(std::move(attempt));
}

absl::Status GenerateCall::Prepare(EncodedPrompt prompt) {
  uint32_t max_model_len = deps_.table->max_model_len();
  if (max_model_len == 0) return absl::UnavailableError("no worker is ready any more");
  if (deps_.max_model_len > 0) max_model_len = std::min(max_model_len, deps_.max_model_len);
  prompt_ids_ = std::move(prompt.ids);
  BATON_ASSIGN_OR_RETURN(sampling_,
                         ResolveSampling(*request_.request, deps_.facts->config, prompt_tokens(),
                                         max_model_len, deps_.draw_seed()));
  BATON_ASSIGN_OR_RETURN(
      const text::StopMatcher stops,
      text::StopMatcher::Create({sampling_.stop().begin(), sampling_.stop().end()},
                                request_.request->include_stop()));
  const text::TextAssembler assembler(*deps_.facts->tokenizer, stops,
                                      {.show_special = request_.request->show_special(),
                                       .include_stop = request_.request->include_stop()});
  for (uint32_t i = 0; i < sampling_.n(); ++i)
    answers_.emplace_back(i, prompt_tokens(), sampling_, assembler);
  last_token_.resize(sampling_.n());
  if (const auto hasher = deps_.table->MakeHasher(cache_salt())) {
    for (const kv::BlockHash& hash : hasher->HashBlocks(prompt_ids_))
      prompt_keys_.push_back(KeyOf(hash));
  }
  return absl::OkStatus();
}

uint32_t GenerateCall::sent_tokens() const {
  uint32_t sum = 0;
  for (const AnswerText& answer : answers_) sum += static_cast<uint32_t>(answer.ids().size());
  return sum;
}

uint32_t GenerateCall::sent_tokens(const Attempt& attempt) const {
  uint32_t sum = 0;
  for (uint32_t i = 0; i < attempt.num_choices; ++i)
    sum += static_cast<uint32_t>(answers_[attempt.first_choice + i].ids().size());
  return sum;
}

void GenerateCall::DeliverFirst(uint32_t id) {
  Attempt* attempt = Find(id);
  if (attempt == nullptr || !attempt->first.has_value() || attempt->first_delivered) return;
  const bool all_finished =
      attempt->first->finished_size() == static_cast<int>(attempt->num_choices);
  if (attempt->decode != nullptr && !attempt->reserved && !all_finished) return;
  attempt->first_delivered = true;
  if (!times_.first_written.has_value()) times_.dispatched = attempt->dispatched;
  const auto first = std::move(*attempt->first);
  Deliver(id, first.tokens(), first.finished(), /*from_decode=*/false);
  while ((attempt = Find(id)) != nullptr && !attempt->held.empty()) {
    const auto tokens = std::move(attempt->held.front());
    attempt->held.pop_front();
    Deliver(id, tokens.tokens(), tokens.finished(), /*from_decode=*/true);
  }
}

// Workers number the choices of an attempt from 0.
void GenerateCall::Deliver(
    uint32_t id,
    const google::protobuf::RepeatedPtrField<worker::v1::Token>& tokens,
    const google::protobuf::RepeatedPtrField<worker::v1::ChoiceFinished>& finished,
    bool from_decode) {
  const absl::Duration start = deps_.clock->Now();
  Attempt* attempt = Find(id);
  for (const worker::v1::Token& token : tokens) {
    if (!Accept(*attempt, token)) return;
  }
  for (const worker::v1::ChoiceFinished& end : finished) {
    if (end.choice() >= attempt->num_choices) continue;
    answers_[attempt->first_choice + end.choice()].Finish(end);
    attempt->worker_ended[end.choice()] = true;
    attempt->decode_ended_one |= from_decode;
  }
  times_.detokenize += deps_.clock->Now() - start;
  Emit();
  if (ended_) return;
  if (last_message_.has_value()) return MaybeComplete();
  // Other choices go on elsewhere, perhaps in the room that this one's decode worker holds.
  if (AllFinished(*attempt) && attempt->decode_open && !DecodeKnowsTheEnd(*attempt))
    Drop(id, Verdict::kGood, Verdict::kGood);
}

// False: the call has ended.
bool GenerateCall::Accept(const Attempt& attempt, const worker::v1::Token& token) {
  absl::StatusOr<bool> is_new = absl::InternalError(
      absl::StrCat("answer: choice=", token.choice(), " of ", attempt.num_choices));
  const uint32_t choice = attempt.first_choice + token.choice();
  if (token.choice() < attempt.num_choices) is_new = answers_[choice].Accept(token);
  if (!is_new.ok()) {
    End(is_new.status());
    return false;
  }
  if (*is_new) NoteToken(choice);
  return true;
}

void GenerateCall::NoteToken(uint32_t choice) {
  const absl::Duration now = deps_.clock->Now();
  absl::Duration& last = last_token_[choice];
  if (last != absl::ZeroDuration()) {
    ++times_.num_gaps;
    times_.gaps += now - last;
    deps_.metrics->InterTokenLatency(request_.method).Observe(absl::ToDoubleSeconds(now - last));
  }
  last = now;
  deps_.metrics->generation_tokens.Increment();
}

bool GenerateCall::AllFinished() const {
  return !answers_.empty() && std::all_of(answers_.begin(), answers_.end(),
                                          [](const AnswerText& a) { return a.finished(); });
}

bool GenerateCall::AllFinished(const Attempt& attempt) const {
  for (uint32_t i = 0; i < attempt.num_choices; ++i) {
    if (!answers_[attempt.first_choice + i].finished()) return false;
  }
  return true;
}

// The very last message waits for usage and timings.
void GenerateCall::Emit() {
  std::vector<v1::GenerateResponse> messages;
  for (AnswerText& answer : answers_) {
    v1::GenerateResponse message;
    if (answer.Take(&message)) messages.push_back(std::move(message));
  }
  if (messages.empty()) return;
  if (AllFinished()) {
    last_message_ = std::move(messages.back());
    messages.pop_back();
    if (!times_.first_written.has_value()) times_.first_written = deps_.clock->Now();
  }
  for (v1::GenerateResponse& message : messages) {
    message.set_request_id(request_.request_id);
    const absl::Status written = sink_->Write(std::move(message));
    if (!written.ok()) return End(written);
    if (!times_.first_written.has_value()) times_.first_written = deps_.clock->Now();
  }
}

void GenerateCall::MaybeComplete() {
  if (!last_message_.has_value()) return;
  bool waits = false, for_prefill = false;
  for (const std::unique_ptr<Attempt>& attempt : attempts_) {
    waits |= WaitsForFigures(attempt.get());
    for_prefill |= attempt->prefill_open && attempt->decode_done && !attempt->prefill_done;
  }
  if (waits) return;
  if (!for_prefill) return Complete();
  if (timer_.has_value()) return;
  timer_ = deps_.timers->At(deps_.clock->Now() + deps_.done_grace, [self = shared_from_this()] {
    self->strand_.Post([self] {
      self->timer_.reset();
      if (!self->ended_) self->Complete();
    });
  });
}

// It does not know of a stop that only the router sees, or of the prefill worker's first token.
bool GenerateCall::DecodeKnowsTheEnd(const Attempt& attempt) const {
  const auto& ended = attempt.worker_ended;
  return attempt.decode_done ||
         (attempt.decode_ended_one && std::find(ended.begin(), ended.end(), false) == ended.end());
}

// A decode worker that knows the end sends its figures next.
bool GenerateCall::WaitsForFigures(Attempt* attempt) {
  if (!attempt->decode_open || attempt->decode_done) return false;
  if (DecodeKnowsTheEnd(*attempt)) return true;
  attempt->decode->Cancel();
  return false;
}

void GenerateCall::Complete() {
  v1::GenerateResponse message = *std::move(last_message_);
  message.set_request_id(request_.request_id);
  v1::Usage* usage = message.mutable_finished()->mutable_usage();
  usage->set_prompt_tokens(prompt_tokens());
  usage->set_completion_tokens(sent_tokens());
  usage->set_cached_prompt_tokens(cached_prompt_tokens_);
  usage->set_seed(sampling_.seed());
  *message.mutable_finished()->mutable_timings() = MakeTimings();
  End(sink_->Write(std::move(message)));
}

v1::Timings GenerateCall::MakeTimings() const {
  v1::Timings timings;
  FillTimings(times_, deps_.clock->Now(), &timings);
  timings.set_prefill_worker(last_route_.prefill);
  timings.set_decode_worker(last_route_.decode);
  timings.set_retries(num_attempts_ > 0 ? num_attempts_ - 1 : 0);
  return timings;
}

void GenerateCall::Reject(const absl::Status& status, absl::string_view reason) {
  deps_.metrics->CountRejected(reason);
  End(status);
}

void GenerateCall::End(const absl::Status& status) {
  if (ended_) return;
  ended_ = true;
  if (timer_.has_value()) deps_.timers->Cancel(*timer_);
  Report(status);  // names the workers: before they are dropped
  const Verdict verdict = last_message_.has_value() ? Verdict::kGood : Verdict::kNone;
  while (!attempts_.empty()) Drop(attempts_.front()->id, verdict, verdict);
  if (has_place_) deps_.admission->Leave();
  has_place_ = false;
  const absl::Duration now = deps_.clock->Now();
  ObserveTimes(times_, request_.method, *deps_.metrics);
  deps_.metrics->RequestDuration(request_.method)
      .Observe(absl::ToDoubleSeconds(now - times_.received));
  deps_.metrics->CountRequest(request_.method, status.code());
  if (status.ok()) CountSlo();
  deps_.metrics->in_flight.Add(-1);
  sink_->Finish(status);
}

std::unique_ptr<GenerateCall::Attempt> GenerateCall::Drop(uint32_t id,
                                                          Verdict prefill,
                                                          Verdict decode) {
  const auto found = std::find_if(attempts_.begin(), attempts_.end(),
                                  [id](const auto& attempt) { return attempt->id == id; });
  std::unique_ptr<Attempt> attempt = std::move(*found);
  attempts_.erase(found);
  if (attempt->waiting.has_value())
    deps_.admission->Cancel(*attempt->waiting);  // too late: OnPlaced gives everything back
  if (attempt->patience.has_value()) deps_.timers->Cancel(*attempt->patience);
  // A leg that has nothing left to say ends by itself, in good order.
  const bool prefill_ends = last_message_.has_value() || AllFinished(*attempt) ||
                            (attempt->decode_done && attempt->first_delivered);
  if (attempt->prefill_open && !(prefill_ends && attempt->first.has_value()))
    attempt->prefill->Cancel();
  if (attempt->decode_open && !attempt->decode_done) attempt->decode->Cancel();
  deps_.table->Release(attempt->placement.prefill, prefill);
  deps_.table->Release(attempt->placement.decode, decode);
  return attempt;
}

void GenerateCall::Report(const absl::Status& status) {
  RequestReport report;
  report.request_id = request_.request_id;
  report.label = request_.request->request_label();
  report.trace_id = request_.trace.trace_id;
  report.method = request_.method;
  report.ended = absl::Now();
  report.code = status.code();
  report.message = std::string(status.message());
  report.prompt_tokens = prompt_tokens();
  report.cached_prompt_tokens = cached_prompt_tokens_;
  report.completion_tokens = sent_tokens();
  report.attempts = num_attempts_;
  report.timings = MakeTimings();
  const bool failed =
      absl::IsInternal(status) || absl::IsUnavailable(status) || absl::IsDataLoss(status);
  if (failed) {
    BATON_LOG(Warning, "request failed", RequestLogFields(report));
  } else {
    BATON_LOG(Info, "request", RequestLogFields(report));
  }
  sink_->AddTrailer("baton-server-timing", ServerTiming(report.timings));
  if (deps_.on_end) deps_.on_end(report);
}

void GenerateCall::CountSlo() const {
  if (deps_.slo_ttft != absl::InfiniteDuration() && times_.first_written.has_value())
    deps_.metrics->CountSlo("ttft", *times_.first_written - times_.received <= deps_.slo_ttft);
  if (deps_.slo_tpot != absl::InfiniteDuration() && times_.num_gaps > 0) {
    const absl::Duration mean = times_.gaps / static_cast<double>(times_.num_gaps);
    deps_.metrics->CountSlo("tpot", mean <= deps_.slo_tpot);
  }
}

}  // namespace baton::router
