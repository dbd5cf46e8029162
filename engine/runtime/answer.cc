#include "engine/runtime/answer.h"

#include <algorithm>
#include <utility>

#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::runtime {
namespace {

uint32_t MaxOutput(const EngineRequest& request, int max_model_len) {
  const int first_output = request.prompt_tokens() - request.resumed_tokens;
  const auto room = static_cast<uint32_t>(std::max(1, max_model_len - first_output));
  return std::min(request.params.max_tokens, room);
}

text::StopMatcher MakeMatcher(const EngineRequest& request) {
  absl::StatusOr<text::StopMatcher> matcher =
      text::StopMatcher::Create(request.params.stop, /*include_stop=*/false);
  BATON_CHECK(matcher.ok(),
              "stop strings: ", matcher.status().ToString());  // ValidateRequest has looked at them
  return *std::move(matcher);
}

}  // namespace

Answer::Answer(const EngineRequest& request,
               uint32_t choice,
               const text::Tokenizer& tokenizer,
               int max_model_len)
    : request_(request),
      choice_(choice),
      tokenizer_(tokenizer),
      max_output_(MaxOutput(request, max_model_len)),
      position_(static_cast<uint32_t>(request.prompt_tokens())),
      matcher_(MakeMatcher(request)) {
  const auto ids = absl::MakeConstSpan(request.prompt_ids);
  const size_t first_output = ids.size() - static_cast<size_t>(request.resumed_tokens);
  // The only reader of prompt counts is the repetition penalty.
  if (request.params.repetition_penalty != 1.0f) counts_.AddPrompt(ids.first(first_output));
  for (const uint32_t id : ids.subspan(first_output)) {
    counts_.AddOutput(id);
    matcher_.Push(tokenizer_.TextBytes(id, /*show_special=*/false), &scratch_);
    scratch_.clear();
    ++num_output_;
  }
}

DrawSite Answer::Site(size_t ahead) const {
  const auto later = static_cast<uint32_t>(ahead);
  return {request_.params, choice_, position_ + later, num_output_ + later, counts_};
}

void Answer::Ask(StepSampler* sampler, absl::Span<const uint32_t> drafts) {
  BATON_CHECK(drafts_.empty());
  // What is drawn on the host is drawn when the drafts before it have been accepted.
  const bool count = sampler->on_device();
  sampler->Add(Site(0));
  for (size_t i = 0; i < drafts.size(); ++i) {
    if (count) counts_.AddOutput(drafts[i]);
    sampler->Add(Site(i + 1), RowUse::kBehindDrafts);
  }
  for (size_t i = 0; count && i < drafts.size(); ++i) counts_.RemoveOutput(drafts[i]);
}

absl::StatusOr<SampledToken> Answer::Draw(StepSampler* sampler, int row) {
  BATON_ASSIGN_OR_RETURN(SampledToken token, sampler->Draw(row, Site(0)));
  Accept(token.id);
  return token;
}

void Answer::Accept(uint32_t id) {
  BATON_CHECK(!finished() && drafts_.empty());
  counts_.AddOutput(id);
  ++num_output_;
  ++position_;
  finish_ = Judge(id);
}

bool Answer::counts_tokens() const { return HasPenalties(request_.params); }

void Answer::AskDraft(StepSampler* sampler, int ahead) const {
  BATON_CHECK(drafts_.size() == static_cast<size_t>(ahead) ||
              (drafts_.empty() && !counts_tokens()));
  sampler->Add(Site(static_cast<size_t>(ahead)), RowUse::kDraft);
}

absl::StatusOr<uint32_t> Answer::DrawDraft(StepSampler* sampler, int row) {
  BATON_ASSIGN_OR_RETURN(const uint32_t id, sampler->DrawId(row, Site(drafts_.size())));
  counts_.AddOutput(id);
  drafts_.push_back(id);
  return id;
}

void Answer::TakeBackDrafts() {
  for (const uint32_t id : drafts_) counts_.RemoveOutput(id);
  drafts_.clear();
}

bool Answer::IsStopToken(uint32_t id) const {
  const std::vector<uint32_t>& stop_ids = request_.params.stop_token_ids;
  return std::find(stop_ids.begin(), stop_ids.end(), id) != stop_ids.end();
}

Finish Answer::Judge(uint32_t id) {
  Finish finish;
  if (IsStopToken(id)) {
    finish.reason = FinishReason::kStopToken;
    finish.stop_token_id = id;
    return finish;
  }
  scratch_.clear();
  if (matcher_.Push(tokenizer_.TextBytes(id, /*show_special=*/false), &scratch_)) {
    finish.reason = FinishReason::kStopString;
    finish.stop_index = static_cast<int>(*matcher_.matched_index());
    return finish;
  }
  if (num_output_ >= max_output_) finish.reason = FinishReason::kLength;
  return finish;
}

}  // namespace baton::runtime
