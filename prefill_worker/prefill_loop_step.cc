// Steps of the prefill loop: from chunks to first tokens.

#include <algorithm>
#include <utility>

#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "prefill_worker/prefill_call.h"
#include "prefill_worker/prefill_loop.h"
#include "worker/convert.h"

namespace baton::prefill {

using worker::v1::PrefillResponse;

void PrefillLoop::RunStep() {
  batch_.Clear();
  sampler_.Begin();
  shipper_.BeginStep();
  const absl::Duration start = clock_.Now();
  step_calls_.clear();
  for (const runtime::PrefillChunk& chunk : chunks_) {
    Call* call = Find(chunk.sequence->order);
    step_calls_.push_back(call);
    call->in_step = true;
    if (call->times.first_step == absl::ZeroDuration()) call->times.first_step = start;
    batch_.Add(*chunk.sequence, chunk.num_tokens, chunk.last);
    if (chunk.last) AskFirstTokens(call);
    shipper_.AddChunk(call->id, *chunk.sequence, chunk.num_tokens);
  }
  runtime::StepTimings timings;
  in_step_ = true;
  commands_.RunPendingThroughout(options_.test_step_delay);
  const absl::Status status = sampler_.Step(batch_.parts(), this, &timings);
  in_step_ = false;
  shipper_.EndStep();
  metrics_.OnStep(worker::StepPhase::kPrefill, batch_.num_tokens(), clock_.Now() - start);
  if (status.ok()) {
    metrics_.OnRows(sampler_.num_rows(), sampler_.on_device());
    FinishChunks(timings);
  } else {
    FailStep(status);
  }
  gone_.clear();
}

void PrefillLoop::FailStep(const absl::Status& status) {
  BATON_LOG(Error, "step failed", LogField("status", status.ToString()));
  for (Call* call : step_calls_) {
    call->in_step = false;
    if (!call->ended) End(call, absl::InternalError("prefill: step failed"));
  }
}

void PrefillLoop::AskFirstTokens(Call* call) {
  const uint32_t n = call->request.params.n;
  call->answers.reserve(n);
  for (uint32_t choice = 0; choice < n; ++choice)
    call->answers.emplace_back(call->request, choice, tokenizer_, runner_.max_model_len());
  if (n == 1) {
    call->answers.front().Ask(&sampler_);
  } else {
    sampler_.AddShared();
  }
}

void PrefillLoop::FinishChunks(const runtime::StepTimings& timings) {
  sampler_.DrawAhead();
  int next_row = 0;
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const runtime::PrefillChunk& chunk = chunks_[i];
    Call* call = step_calls_[i];
    call->in_step = false;
    const int row = next_row;
    next_row += chunk.last ? 1 : 0;
    if (call->ended) continue;
    call->append += timings.append;
    metrics_.prompt_computed.Increment(chunk.num_tokens);
    scheduler_.Finish(chunk);
    if (chunk.last) FinishPrompt(call, row);
  }
}

void PrefillLoop::FinishPrompt(Call* call, int row) {
  absl::StatusOr<PrefillResponse> response = DrawFirstTokens(call, row);
  if (!response.ok()) {
    metrics_.nan_logits.Increment();
    BATON_LOG(Error, "first token failed", LogField("request_id", call->request.request_id),
              LogField("status", response.status().ToString()));
    End(call, response.status());
    return;
  }
  call->computed = true;
  call->computed_at = call->times.first_token = call->times.last_token = clock_.Now();
  metrics_.prompt_cached.Increment(call->sequence->num_cached);
  metrics_.generation_tokens.Increment(static_cast<double>(call->answers.size()));
  metrics_.time_to_first_token.Observe(
      absl::ToDoubleSeconds(call->times.first_token - call->times.arrived));
  metrics_.append.Observe(absl::ToDoubleSeconds(call->append));
  PrefillResponse::FirstTokens* first = response->mutable_first_tokens();
  first->set_cached_prompt_tokens(static_cast<uint32_t>(call->sequence->num_cached));
  first->set_queue_s(absl::ToDoubleSeconds(call->times.first_step - call->times.arrived));
  first->set_compute_s(absl::ToDoubleSeconds(call->times.first_token - call->times.first_step));
  first->set_append_s(absl::ToDoubleSeconds(call->append));
  call->first_tokens.assign(first->tokens().begin(), first->tokens().end());
  call->sink->Send(*std::move(response));
  const bool all_finished =
      std::all_of(call->answers.begin(), call->answers.end(),
                  [](const runtime::Answer& answer) { return answer.finished(); });
  if (all_finished || !call->needs_handoff) {
    PrefillResponse done;
    done.mutable_done();
    call->sink->Send(std::move(done));
    End(call, absl::OkStatus());
  } else if (shipper_.IsOpen(call->id)) {
    shipper_.Commit(call->id, std::move(call->first_tokens));
  }
}

absl::StatusOr<PrefillResponse> PrefillLoop::DrawFirstTokens(Call* call, int row) {
  PrefillResponse response;
  for (runtime::Answer& answer : call->answers) {
    const uint32_t position = answer.position();
    BATON_ASSIGN_OR_RETURN(const runtime::SampledToken token, answer.Draw(&sampler_, row));
    *response.mutable_first_tokens()->add_tokens() =
        worker::TokenToProto(answer.choice(), position, token);
    if (answer.finished()) {
      *response.mutable_first_tokens()->add_finished() =
          worker::FinishToProto(answer.choice(), answer.finish());
    }
  }
  return response;
}

}  // namespace baton::prefill
