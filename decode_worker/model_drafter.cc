#include "decode_worker/model_drafter.h"

#include <algorithm>
#include <utility>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::decode {
namespace {

// Part of a step's time that is spent on catching up after it.
constexpr double kCatchUpPart = 0.5;
// Before anything is known, in trials, and how both kinds of trials fade.
constexpr float kPrior = 0.7f;
constexpr float kPriorWeight = 20;
constexpr float kAllWeight = 6;
constexpr float kOwnKeep = 0.99f;
constexpr float kAllKeep = 0.999f;
constexpr double kLearn = 0.05;
// No id of a vocabulary.
constexpr uint32_t kLostToken = ~uint32_t{0};

double Now() { return absl::ToDoubleSeconds(base::Clock::Real().Now()); }

}  // namespace

ModelDrafter::ModelDrafter(const ModelDrafterOptions& options,
                           std::unique_ptr<runtime::ModelRunner> runner,
                           StepCost cost,
                           const worker::WorkerMetrics& metrics)
    : options_(options),
      metrics_(metrics),
      runner_(std::move(runner)),
      cost_(std::move(cost)),
      sampler_(*runner_, options.num_tokens) {
  if (!options.uses_target_kv) memory_.emplace(runner_->layout().num_blocks);
  parts_.reserve(options.max_batch);
  rows_.reserve(options.max_batch);
  jobs_.reserve(options.max_batch);
}

ModelDrafter::State& ModelDrafter::Sync(const runtime::Sequence& target) {
  std::unique_ptr<State>& state = states_[target.order];
  if (state == nullptr) state = std::make_unique<State>();
  if (!memory_) return *state;
  if (!state->sequence) {
    runtime::Sequence& own = state->sequence.emplace(target.tokens, target.hasher, target.order);
    own.tokens.reserve(target.tokens.capacity() + kMaxDrafts);
    MatchAgain(state.get());
    return *state;
  }
  runtime::Sequence& own = *state->sequence;
  // Rejected drafts have been taken away by OnVerified: the rest is a beginning of the target's.
  own.tokens.insert(own.tokens.end(), target.tokens.begin() + own.num_tokens(),
                    target.tokens.end());
  const bool landed = intake_ != nullptr && intake_->num_landed() != state->num_landed;
  if (landed && own.num_pending() > most_pending()) MatchAgain(state.get());
  return *state;
}

void ModelDrafter::MatchAgain(State* state) {
  runtime::Sequence& own = *state->sequence;
  if (intake_ != nullptr) state->num_landed = intake_->num_landed();
  memory_->Publish(&own);  // what is computed is found again
  memory_->Release(&own);
  memory_->MatchPrefix(&own, kv::MaxMatchBlocks(own.num_tokens()));
}

bool ModelDrafter::IsComing(uint64_t order) const {
  return intake_ != nullptr && intake_->IsComing(order / runtime::kMaxChoices);
}

DraftOffer ModelDrafter::Offer(const Drafting& drafting) {
  State& state = Sync(*drafting.sequence);
  state.acceptance.Fade(kOwnKeep);
  acceptance_.Fade(kAllKeep);
  const int room = runner_->max_model_len() - drafting.sequence->num_tokens();
  const float common = acceptance_.Estimate(kPrior, kPriorWeight);
  const bool ready = !state.sequence || state.sequence->num_pending() <= most_pending();
  state.wanted = false;
  return {std::clamp(room, 0, drafting.limit), state.acceptance.Estimate(common, kAllWeight),
          ready};
}

void ModelDrafter::Want(const Drafting& drafting) {
  states_.at(drafting.sequence->order)->wanted = true;
}

bool ModelDrafter::Grow(State* state, int num_tokens) {
  if (memory_->Grow(&*state->sequence, num_tokens).ok()) return true;
  memory_->Release(&*state->sequence);
  return false;
}

void ModelDrafter::TakeJobs(absl::Span<Drafting* const> draftings) {
  jobs_.clear();
  for (Drafting* drafting : draftings) {
    State& state = *states_.at(drafting->sequence->order);
    if (memory_ && !Grow(&state, drafting->sequence->num_tokens() + drafting->count)) {
      drafting->count = 0;
      continue;
    }
    jobs_.push_back(drafting);
  }
}

void ModelDrafter::DropFinished(int round) {
  std::erase_if(jobs_, [round](const Drafting* job) { return job->count <= round + 1; });
}

void ModelDrafter::Draft(absl::Span<Drafting* const> draftings) {
  if (DraftAhead(draftings)) Finish();
}

bool ModelDrafter::DraftAhead(absl::Span<Drafting* const> draftings) {
  TakeJobs(draftings);
  if (IssueRounds()) return true;
  RunRounds();
  for (Drafting* drafting : draftings) drafting->answer->TakeBackDrafts();
  return false;
}

void ModelDrafter::RunRounds() {
  for (int round = 0; !jobs_.empty(); ++round) {
    RunRound(round);
    DropFinished(round);
  }
}

StepLoad ModelDrafter::FillRound(int round) {
  parts_.clear();
  rows_.clear();
  sampler_.Begin();
  StepLoad load;
  for (Drafting* job : jobs_) {
    AddToBatch(job, round);
    job->answer->AskDraft(&sampler_, round);
    load.Add(static_cast<int>(parts_.back().tokens.size()), parts_.back().start);
  }
  return load;
}

void ModelDrafter::RunRound(int round) {
  const StepLoad load = FillRound(round);
  const double start = Now();
  const absl::Status status = sampler_.Step(parts_, nullptr, nullptr);
  const double end = Now();
  if (!status.ok()) BATON_LOG(Error, "draft step failed", LogField("status", status.ToString()));
  cost_.Observe(load, end - start);
  if (status.ok()) sampler_.DrawAhead();
  for (size_t i = 0; i < jobs_.size(); ++i) {
    const bool taken = status.ok() && Take(jobs_[i], round, static_cast<int>(i));
    // A draft model's fault ends the drafts, never the request.
    if (!taken) jobs_[i]->count = round;
  }
  draw_seconds_ += kLearn * ((Now() - end) / static_cast<double>(jobs_.size()) - draw_seconds_);
}

void ModelDrafter::AddToBatch(Drafting* drafting, int round) {
  runtime::StepSequence part;
  if (memory_) {
    const runtime::Sequence& own = *states_.at(drafting->sequence->order)->sequence;
    part.tokens = absl::MakeConstSpan(own.tokens).subspan(own.num_computed);
    part.start = own.num_computed;
    part.block_table = own.blocks;
  } else {
    const std::vector<uint32_t>& tokens = drafting->sequence->tokens;
    part.tokens = round == 0 ? absl::MakeConstSpan(tokens).last(1)
                             : absl::MakeConstSpan(&drafting->tokens[round - 1], 1);
    part.start = drafting->sequence->num_tokens() - 1 + round;
    part.block_table = drafting->sequence->blocks;
  }
  if (drafting->chain != nullptr) {
    part.drawn = absl::MakeConstSpan(&drafting->draws[round - 1], 1);
    part.chain = drafting->chain;
  }
  rows_.push_back(static_cast<int>(part.tokens.size()) - 1);
  part.logit_rows = absl::MakeConstSpan(&rows_.back(), 1);
  parts_.push_back(part);
}

bool ModelDrafter::Take(Drafting* drafting, int round, int row) {
  const absl::StatusOr<uint32_t> id = drafting->answer->DrawDraft(&sampler_, row);
  if (!id.ok()) return false;
  drafting->tokens[round] = *id;
  Append(*drafting, *id);
  // Nothing follows an end.
  if (drafting->answer->IsStopToken(*id)) drafting->count = round + 1;
  return true;
}

void ModelDrafter::Append(const Drafting& drafting, uint32_t id) {
  if (!memory_) return;
  runtime::Sequence& own = *states_.at(drafting.sequence->order)->sequence;
  own.num_computed = own.num_tokens();
  own.tokens.push_back(id);
}

absl::Status ModelDrafter::UseDrawChain() {
  const int max_draws = options_.max_batch * kMaxDrafts;
  BATON_ASSIGN_OR_RETURN(chain_, runner_->NewDrawChain(max_draws));
  if (chain_ == nullptr) return absl::OkStatus();
  drawn_.resize(max_draws);
  ahead_.reserve(options_.max_batch);
  rounds_.reserve(kMaxDrafts);
  BATON_LOG(Info, "draft rounds are chained on the device");
  return absl::OkStatus();
}

bool ModelDrafter::IssueRounds() {
  if (chain_ == nullptr || jobs_.empty()) return false;
  for (const Drafting* job : jobs_) {
    if (job->answer->counts_tokens()) return false;
  }
  ahead_ = jobs_;
  rounds_.clear();
  for (int round = 0; !jobs_.empty() && IssueRound(round); ++round) DropFinished(round);
  return true;
}

// Until Finish, kNoTokenDrawn stands for a draft in `tokens` and in the drafter's own sequence.
bool ModelDrafter::IssueRound(int round) {
  const StepLoad load = FillRound(round);
  const int first = chain_->size();
  absl::Status status = absl::ResourceExhaustedError("edits of logits");
  if (sampler_.on_device()) {
    status = sampler_.StepInChain(parts_, chain_.get(),
                                  absl::MakeSpan(drawn_).subspan(first, jobs_.size()));
  }
  if (!status.ok()) {
    // A draft model's fault ends the drafts, never the request.
    BATON_LOG(Error, "draft step failed", LogField("status", status.ToString()));
    for (Drafting* job : jobs_) job->count = round;
    return false;
  }
  rounds_.push_back(load);
  for (size_t i = 0; i < jobs_.size(); ++i) {
    Drafting* job = jobs_[i];
    job->chain = chain_.get();
    job->draws[round] = first + static_cast<int32_t>(i);
    job->tokens[round] = ops::kNoTokenDrawn;
    Append(*job, ops::kNoTokenDrawn);
  }
  return true;
}

double ModelDrafter::Finish() {
  const absl::StatusOr<double> seconds = chain_->Finish();
  for (Drafting* job : ahead_) FinishJob(job, !seconds.ok());
  draw_seconds_ -= kLearn * draw_seconds_;  // drawing is a part of these rounds
  if (!seconds.ok()) {
    BATON_LOG(Error, "draft rounds failed", LogField("status", seconds.status().ToString()));
    return 0;
  }
  double expected = 0;
  for (const StepLoad& round : rounds_) expected += cost_.Seconds(round);
  if (expected == 0) return *seconds;
  const double slower = *seconds / expected;
  for (const StepLoad& round : rounds_) cost_.Observe(round, cost_.Seconds(round) * slower);
  return *seconds;
}

void ModelDrafter::FinishJob(Drafting* job, bool failed) {
  const auto count = static_cast<size_t>(job->count);
  for (size_t round = 0; round < count; ++round) {
    const ops::SampleResult& result = drawn_[job->draws[round]];
    // Where a draw gave no token the verifying step has computed with kNoTokenDrawn; where the
    // chain is lost nobody knows with which, so none may count as right.
    job->tokens[round] = failed ? kLostToken
                         : result.status == ops::SampleStatus::kOk
                             ? static_cast<uint32_t>(result.id)
                             : ops::kNoTokenDrawn;
  }
  job->chain = nullptr;
  const auto state = states_.find(job->sequence->order);
  if (!memory_ || state == states_.end()) return;
  std::vector<uint32_t>& own = state->second->sequence->tokens;
  std::copy_n(job->tokens.begin(), count, own.end() - static_cast<ptrdiff_t>(count));
}

void ModelDrafter::OnVerified(const Drafting& drafting, int accepted) {
  const auto found = states_.find(drafting.sequence->order);
  if (found == states_.end()) return;
  State& state = *found->second;
  state.acceptance.Add(drafting.count, accepted);
  acceptance_.Add(drafting.count, accepted);
  if (!memory_) return;
  // Drafts and the target's tokens agree up to here.
  runtime::Sequence& own = *state.sequence;
  own.tokens.resize(own.tokens.size() - drafting.count + accepted);
  own.num_computed = std::min(own.num_computed, own.num_tokens());
  memory_->Shrink(&own, own.num_tokens());
  memory_->Publish(&own);
}

void ModelDrafter::Forget(uint64_t order) {
  const auto found = states_.find(order);
  if (found == states_.end()) return;
  if (found->second->sequence) memory_->Release(&*found->second->sequence);
  states_.erase(found);
}

double ModelDrafter::RoundSeconds(const StepLoad& round) const {
  return cost_.Seconds(round) + draw_seconds_ * round.tokens;
}

void ModelDrafter::CatchUp(double seconds) {
  if (!memory_) return;
  // The oldest first: it has waited longest.
  State* behind = nullptr;
  for (const auto& [order, state] : states_) {
    if (!state->wanted || IsComing(order)) continue;
    if (behind == nullptr || order < behind->sequence->order) behind = state.get();
  }
  if (behind == nullptr) return;
  runtime::Sequence& own = *behind->sequence;
  // All but the last token, whose logits a round will want.
  int tokens = std::min(own.num_pending() - 1, options_.max_catch_up);
  const auto cost = [&](int count) {
    StepLoad load;
    load.Add(count, own.num_computed);
    return cost_.Seconds(load);
  };
  while (tokens > kv::kBlockTokens && cost(tokens) > seconds * kCatchUpPart) tokens /= 2;
  if (!Grow(behind, own.num_computed + tokens)) return;
  const runtime::StepSequence part{
      absl::MakeConstSpan(own.tokens).subspan(own.num_computed, tokens),
      own.num_computed,
      own.blocks,
      {}};
  absl::Span<float> logits;
  const absl::Status status =
      runner_->Step(absl::MakeConstSpan(&part, 1), nullptr, &logits, nullptr);
  if (!status.ok()) {
    BATON_LOG(Error, "draft step failed", LogField("status", status.ToString()));
    return;
  }
  own.num_computed += tokens;
  metrics_.draft_prompt_computed.Increment(tokens);
  memory_->Publish(&own);
}

}  // namespace baton::decode
