// Steps of the decode loop: from a plan to tokens.

#include <algorithm>
#include <utility>

#include "decode_worker/decode_call.h"
#include "decode_worker/decode_loop.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "worker/convert.h"

namespace baton::decode {

using worker::v1::DecodeResponse;

DecodeLoop::StepPart DecodeLoop::PartOf(runtime::Sequence* sequence) {
  Call* call = Find(sequence->order / runtime::kMaxChoices);
  BATON_CHECK(call != nullptr);
  if (call->prompt && sequence == &*call->prompt) return {call, nullptr, sequence};
  return {call, call->choices[sequence->order % runtime::kMaxChoices].get(), sequence};
}

void DecodeLoop::AddPart(runtime::Sequence* sequence, int num_tokens, bool want_logits) {
  const StepPart part = PartOf(sequence);
  (part.choice == nullptr ? part.call->prompt_in_step : part.choice->in_step) = true;
  if (part.call->times.first_step == absl::ZeroDuration())
    part.call->times.first_step = clock_.Now();
  parts_.push_back(part);
  batch_.Add(*sequence, num_tokens, want_logits);
}

void DecodeLoop::RunStep() {
  const DecodeScheduler::Plan& plan = scheduler_.plan();
  const absl::Duration start = clock_.Now();
  batch_.Clear();
  parts_.clear();
  for (runtime::Sequence* sequence : plan.decode) AddPart(sequence, 1, true);
  for (const runtime::PrefillChunk& chunk : plan.chunks)
    AddPart(chunk.sequence, chunk.num_tokens, chunk.last);
  commands_.RunPendingThroughout(options_.test_step_delay);
  absl::Span<float> logits;
  runtime::StepTimings timings;
  const absl::Status status = runner_.Step(batch_.parts(), this, &logits, &timings);
  const worker::StepPhase phase = plan.chunks.empty()   ? worker::StepPhase::kDecode
                                  : plan.decode.empty() ? worker::StepPhase::kPrefill
                                                        : worker::StepPhase::kMixed;
  metrics_.OnStep(phase, batch_.num_tokens(), clock_.Now() - start);
  for (const StepPart& part : parts_) {
    (part.choice == nullptr ? part.call->prompt_in_step : part.choice->in_step) = false;
  }
  if (status.ok()) {
    FinishStep(logits, timings);
  } else {
    BATON_LOG(Error, "step failed", LogField("status", status.ToString()));
    for (const StepPart& part : parts_) Fail(part.call, absl::InternalError("decode: step failed"));
  }
  SettleCalls();
}

void DecodeLoop::FinishStep(absl::Span<float> logits, const runtime::StepTimings& timings) {
  const DecodeScheduler::Plan& plan = scheduler_.plan();
  const size_t num_decode = plan.decode.size();
  for (size_t i = 0; i < parts_.size(); ++i) {
    const StepPart& part = parts_[i];
    const bool is_chunk = i >= num_decode;
    const bool has_row = !is_chunk || plan.chunks[i - num_decode].last;
    const absl::Span<float> row = logits.first(has_row ? row_.size() : 0);
    logits.remove_prefix(row.size());
    Call* call = part.call;
    if (call->ended || call->failed) continue;
    if (is_chunk) {
      const runtime::PrefillChunk& chunk = plan.chunks[i - num_decode];
      call->append += timings.append;
      metrics_.prompt_computed.Increment(chunk.num_tokens);
      scheduler_.FinishChunk(chunk);
    } else {
      scheduler_.FinishDecode(part.sequence);
    }
    if (part.choice == nullptr) {
      if (has_row) FinishPrompt(call, row);
    } else if (has_row) {
      FinishToken(part, !is_chunk, row);
    }
  }
}

void DecodeLoop::FinishPrompt(Call* call, absl::Span<float> logits) {
  const absl::Duration now = clock_.Now();
  call->running_since = call->times.first_token = now;
  metrics_.prompt_cached.Increment(call->prompt->num_cached);
  metrics_.time_to_first_token.Observe(absl::ToDoubleSeconds(now - call->times.arrived));
  metrics_.append.Observe(absl::ToDoubleSeconds(call->append));
  call->done.set_cached_prompt_tokens(static_cast<uint32_t>(call->prompt->num_cached));
  call->done.set_prefill_queue_s(
      absl::ToDoubleSeconds(call->times.first_step - call->times.arrived));
  call->done.set_prefill_compute_s(absl::ToDoubleSeconds(now - call->times.first_step));
  call->done.set_append_s(absl::ToDoubleSeconds(call->append));
  for (const auto& choice : call->choices) {
    std::copy(logits.begin(), logits.end(), row_.begin());
    if (!DrawToken(call, choice.get(), absl::MakeSpan(row_))) return;
    choice->first_id = call->tokens.tokens().rbegin()->id();
  }
  Fork(call);
}

void DecodeLoop::FinishToken(const StepPart& part, bool was_running, absl::Span<float> logits) {
  Call* call = part.call;
  Choice* choice = part.choice;
  if (!DrawToken(call, choice, logits)) return;
  if (call->done.first_decode_s() == 0) {
    call->done.set_first_decode_s(absl::ToDoubleSeconds(choice->last_token - call->running_since));
  }
  if (choice->answer.finished()) {
    ReleaseSequence(&*choice->sequence);
    choice->sequence.reset();
    return;
  }
  choice->sequence->tokens.push_back(call->tokens.tokens().rbegin()->id());
  if (!was_running) scheduler_.AddRunning(&*choice->sequence);
}

bool DecodeLoop::DrawToken(Call* call, Choice* choice, absl::Span<float> logits) {
  const uint32_t position = choice->answer.position();
  const absl::StatusOr<runtime::SampledToken> token = choice->answer.Draw(&sampler_, logits);
  if (!token.ok()) {
    metrics_.nan_logits.Increment();
    BATON_LOG(Error, "draw failed", LogField("request_id", call->request.request_id),
              LogField("status", token.status().ToString()));
    Fail(call, token.status());
    return false;
  }
  const absl::Duration now = clock_.Now();
  if (choice->last_token != absl::ZeroDuration()) {
    metrics_.inter_token_latency.Observe(absl::ToDoubleSeconds(now - choice->last_token));
  }
  choice->last_token = call->times.last_token = now;
  metrics_.generation_tokens.Increment();
  *call->tokens.add_tokens() = worker::TokenToProto(choice->answer.choice(), position, *token);
  if (choice->answer.finished()) {
    *call->tokens.add_finished() =
        worker::FinishToProto(choice->answer.choice(), choice->answer.finish());
  }
  return true;
}

void DecodeLoop::Fork(Call* call) {
  std::vector<Choice*> going_on;
  for (const auto& choice : call->choices) {
    if (!choice->answer.finished()) going_on.push_back(choice.get());
  }
  for (size_t i = 0; i < going_on.size(); ++i)
    ForkChoice(call, going_on[i], i + 1 == going_on.size());
  // Nobody has taken the prompt over when all choices ended with their first token.
  memory_.Release(&*call->prompt);
  call->prompt.reset();
}

void DecodeLoop::ForkChoice(Call* call, Choice* choice, bool takes_over) {
  runtime::Sequence& prompt = *call->prompt;
  runtime::Sequence& sequence = choice->sequence.emplace(prompt);
  sequence.order = call->OrderOf(choice->answer.choice());
  sequence.tokens.reserve(sequence.tokens.size() + choice->answer.max_output());
  sequence.tokens.push_back(choice->first_id);
  if (takes_over) {
    prompt.blocks.clear();
    scheduler_.AddRunning(&sequence);
    return;
  }
  const bool partial = prompt.num_tokens() % kv::kBlockTokens != 0;
  kv::BlockId copy = -1;
  if (partial) {
    const absl::StatusOr<std::vector<kv::BlockId>> taken = memory_.pool().Allocate(1);
    if (!taken.ok()) {
      // As if it had been preempted: computed again when there is room.
      sequence.blocks.clear();
      memory_.Release(&sequence);
      scheduler_.AddPrompt(&sequence);
      return;
    }
    copy = taken->front();
    runner_.CopyBlock(sequence.blocks.back(), copy);
    sequence.blocks.back() = copy;
  }
  const size_t shared = sequence.blocks.size() - (partial ? 1 : 0);
  for (size_t i = 0; i < shared; ++i) memory_.pool().AddUser(sequence.blocks[i]);
  scheduler_.AddRunning(&sequence);
}

void DecodeLoop::Fail(Call* call, absl::Status status) {
  if (call->ended || call->failed) return;
  call->failed = std::move(status);
}

void DecodeLoop::SettleCalls() {
  for (const StepPart& part : parts_) touched_.push_back(part.call->id);
  std::sort(touched_.begin(), touched_.end());
  touched_.erase(std::unique(touched_.begin(), touched_.end()), touched_.end());
  for (const CallId id : touched_) {
    Call* call = Find(id);
    call->done.set_steps(call->done.steps() + 1);
    Flush(call);
  }
  touched_.clear();
}

void DecodeLoop::Flush(Call* call) {
  if (call->ended) return Release(call);
  if (call->failed) return End(call, *call->failed);
  bool read = true;
  if (call->tokens.tokens_size() > 0) {
    DecodeResponse response;
    response.mutable_tokens()->Swap(&call->tokens);
    read = call->sink->Send(std::move(response));
  }
  if (!read) return End(call, absl::ResourceExhaustedError("decode: tokens are not being read"));
  const bool computing_prompt = call->prompt.has_value();
  const bool all_finished =
      std::all_of(call->choices.begin(), call->choices.end(),
                  [](const auto& choice) { return choice->answer.finished(); });
  if (computing_prompt || !all_finished) return;
  uint32_t generated = 0;
  for (const auto& choice : call->choices) generated += choice->answer.num_output();
  call->done.set_generated_tokens(generated - static_cast<uint32_t>(call->request.resumed_tokens));
  DecodeResponse response;
  *response.mutable_done() = call->done;
  call->sink->Send(std::move(response));
  End(call, absl::OkStatus());
}

}  // namespace baton::decode
