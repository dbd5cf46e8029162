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

namespace {

// Of the time of a step with drafts that were left on the device, at least this is the step's own.
constexpr double kLeastStepPart = 0.1;

}  // namespace

DecodeLoop::StepPart DecodeLoop::PartOf(runtime::Sequence* sequence) {
  Call* call = Find(sequence->order / runtime::kMaxChoices);
  BATON_CHECK(call != nullptr);
  if (call->prompt && sequence == &*call->prompt) return {call, nullptr, sequence};
  return {call, call->choices[sequence->order % runtime::kMaxChoices].get(), sequence};
}

void DecodeLoop::AddPart(runtime::Sequence* sequence) {
  const StepPart part = PartOf(sequence);
  (part.choice == nullptr ? part.call->prompt_in_step : part.choice->in_step) = true;
  if (part.call->times.first_step == absl::ZeroDuration())
    part.call->times.first_step = clock_.Now();
  parts_.push_back(part);
}

void DecodeLoop::MakeDrafts() {
  const DecodeScheduler::Plan& plan = scheduler_.plan();
  speculator_.Begin();
  for (size_t i = 0; i < plan.decode.size(); ++i)
    speculator_.Add(*plan.decode[i], &parts_[i].choice->answer);
  StepLoad others;
  for (const runtime::PrefillChunk& chunk : plan.chunks)
    others.Add(chunk.num_tokens, chunk.sequence->num_computed);
  speculator_.Plan(others);
  for (size_t i = 0; i < plan.decode.size(); ++i) {
    Drafting& drafting = speculator_.drafting(i);
    drafting.count = scheduler_.GrowForDrafts(plan.decode[i], drafting.count);
  }
  speculator_.Draft();
}

void DecodeLoop::AddToBatch() {
  const DecodeScheduler::Plan& plan = scheduler_.plan();
  batch_.Clear();
  sampler_.Begin();
  load_of_step_ = {};
  for (size_t i = 0; i < plan.decode.size(); ++i) {
    const Drafting& drafting = speculator_.drafting(i);
    const absl::Span<const uint32_t> drafts = drafting.drafts();
    batch_.AddDecode(*plan.decode[i], drafts, drafting.chain, drafting.drawn());
    parts_[i].choice->answer.Ask(&sampler_, drafts);
    load_of_step_.Add(static_cast<int>(drafts.size()) + 1, plan.decode[i]->num_tokens());
  }
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const runtime::PrefillChunk& chunk = plan.chunks[i];
    batch_.Add(*chunk.sequence, chunk.num_tokens, chunk.last);
    if (!chunk.last) continue;
    const StepPart& part = parts_[plan.decode.size() + i];
    if (part.choice != nullptr) {
      part.choice->answer.Ask(&sampler_);
    } else if (part.call->choices.size() == 1) {
      part.call->choices.front()->answer.Ask(&sampler_);
    } else {
      sampler_.AddShared();
    }
  }
}

void DecodeLoop::RunStep() {
  const DecodeScheduler::Plan& plan = scheduler_.plan();
  parts_.clear();
  for (runtime::Sequence* sequence : plan.decode) AddPart(sequence);
  for (const runtime::PrefillChunk& chunk : plan.chunks) AddPart(chunk.sequence);
  const absl::Duration cycle_start = clock_.Now();
  MakeDrafts();
  AddToBatch();
  const absl::Duration prepared = clock_.Now() - cycle_start;
  commands_.RunPendingThroughout(options_.test_step_delay);
  runtime::StepTimings timings;
  const absl::Duration start = clock_.Now();
  if (last_step_end_ != absl::ZeroDuration())
    metrics_.step_gap.Observe(absl::ToDoubleSeconds(start - last_step_end_));
  const absl::Status status = sampler_.Step(batch_.parts(), this, &timings);
  const absl::Duration drafting = absl::Seconds(speculator_.Finish());
  last_step_end_ = clock_.Now();
  // Drafting may have begun before the step and then have been over sooner than it seems.
  const absl::Duration whole = last_step_end_ - start;
  const absl::Duration took = std::max(whole - drafting, whole * kLeastStepPart);
  const bool verifies = batch_.num_rows() > static_cast<int>(plan.decode.size());
  const worker::StepPhase phase =
      plan.chunks.empty()   ? verifies ? worker::StepPhase::kVerify : worker::StepPhase::kDecode
      : plan.decode.empty() ? worker::StepPhase::kPrefill
                            : worker::StepPhase::kMixed;
  metrics_.OnStep(phase, batch_.num_tokens(), took);
  if (plan.chunks.empty()) speculator_.OnStep(load_of_step_, absl::ToDoubleSeconds(took));
  for (const StepPart& part : parts_) {
    (part.choice == nullptr ? part.call->prompt_in_step : part.choice->in_step) = false;
  }
  if (status.ok()) {
    metrics_.OnRows(sampler_.num_rows(), sampler_.on_device());
    FinishStep(timings);
  } else {
    BATON_LOG(Error, "step failed", LogField("status", status.ToString()));
    for (const StepPart& part : parts_) Fail(part.call, absl::InternalError("decode: step failed"));
  }
  SettleCalls();
  if (plan.chunks.empty())
    speculator_.OnCycle(absl::ToDoubleSeconds(prepared + (clock_.Now() - start)));
  speculator_.CatchUp(absl::ToDoubleSeconds(took));
}

void DecodeLoop::FinishStep(const runtime::StepTimings& timings) {
  sampler_.DrawAhead();
  const DecodeScheduler::Plan& plan = scheduler_.plan();
  const size_t num_decode = plan.decode.size();
  int next_row = 0;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const StepPart& part = parts_[i];
    const int row = next_row;
    next_row += static_cast<int>(batch_.parts()[i].logit_rows.size());
    Call* call = part.call;
    if (call->ended || call->failed) continue;
    if (i < num_decode) {
      FinishDecode(i, row);
      continue;
    }
    const runtime::PrefillChunk& chunk = plan.chunks[i - num_decode];
    call->append += timings.append;
    metrics_.prompt_computed.Increment(chunk.num_tokens);
    scheduler_.FinishChunk(chunk);
    if (!chunk.last) continue;
    if (part.choice == nullptr) {
      FinishPrompt(call, row);
    } else {
      FinishRecomputed(part, row);
    }
  }
}

void DecodeLoop::FinishPrompt(Call* call, int row) {
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
    if (!DrawToken(call, choice.get(), row)) return;
    choice->first_id = call->tokens.tokens().rbegin()->id();
  }
  Fork(call);
}

void DecodeLoop::FinishDecode(size_t index, int first_row) {
  const StepPart& part = parts_[index];
  const absl::Span<const uint32_t> drafts = speculator_.drafting(index).drafts();
  size_t accepted = 0;
  for (bool go_on = true; go_on;) {
    if (!DrawToken(part.call, part.choice, first_row + static_cast<int>(accepted))) return;
    const uint32_t id = part.call->tokens.tokens().rbegin()->id();
    part.sequence->tokens.push_back(id);
    const bool right = accepted < drafts.size() && drafts[accepted] == id;
    accepted += right ? 1 : 0;
    go_on = right && !part.choice->answer.finished();
  }
  scheduler_.FinishDecode(part.sequence);
  speculator_.OnVerified(index, static_cast<int>(accepted));
  Settle(part);
}

void DecodeLoop::FinishRecomputed(const StepPart& part, int row) {
  if (!DrawToken(part.call, part.choice, row)) return;
  part.sequence->tokens.push_back(part.call->tokens.tokens().rbegin()->id());
  if (!part.choice->answer.finished()) scheduler_.AddRunning(part.sequence);
  Settle(part);
}

void DecodeLoop::Settle(const StepPart& part) {
  Call* call = part.call;
  if (call->done.first_decode_s() == 0) {
    call->done.set_first_decode_s(
        absl::ToDoubleSeconds(part.choice->last_token - call->running_since));
  }
  if (!part.choice->answer.finished()) return;
  ReleaseSequence(part.sequence);
  part.choice->sequence.reset();
}

bool DecodeLoop::DrawToken(Call* call, Choice* choice, int row) {
  const uint32_t position = choice->answer.position();
  const absl::StatusOr<runtime::SampledToken> token = choice->answer.Draw(&sampler_, row);
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
      scheduler_.AddPreempted(&sequence);
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
  bool read = true;
  if (call->tokens.tokens_size() > 0) {
    DecodeResponse response;
    response.mutable_tokens()->Swap(&call->tokens);
    read = call->sink->Send(std::move(response));
  }
  // What was drawn before the failure is as good as it would have been in steps of its own.
  if (call->failed) return End(call, *call->failed);
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
