#pragma once

// One of the n answers to a request: what it has said so far, and the rules that end it.

#include <cstdint>
#include <string>
#include <vector>

#include "engine/runtime/sampler.h"
#include "engine/runtime/sequence.h"
#include "engine/runtime/step_sampler.h"
#include "engine/text/stop_matcher.h"
#include "engine/text/tokenizer.h"

namespace baton::runtime {

enum class FinishReason { kNone, kStopToken, kStopString, kLength };

struct Finish {
  FinishReason reason = FinishReason::kNone;
  uint32_t stop_token_id = 0;  // kStopToken
  int stop_index = 0;          // kStopString: index into SamplingParams::stop
};

// The same code on the worker that draws the first token and on the one that goes on. Of events at
// one token, a stop token comes before a stop string, and that before the length. Below min_tokens
// stop tokens are not drawn; a stop string ends the answer at any length, as the router shows no
// text behind it. Thread-compatible.
class Answer {
 public:
  // `request` and `tokenizer` outlive it. `max_model_len` bounds prompt and output together.
  Answer(const EngineRequest& request,
         uint32_t choice,
         const text::Tokenizer& tokenizer,
         int max_model_len);

  // The next row of a step is for the answer's next token, and those behind it for the tokens after
  // `drafts`, one a draft: each of them counts only if the drafts before it are right, so it is
  // drawn as if they were part of the answer.
  void Ask(StepSampler* sampler, absl::Span<const uint32_t> drafts = {});
  // Takes the next token, drawn from row `row` of the step, into the answer. Errors: those of
  // Sampler::Sample.
  absl::StatusOr<SampledToken> Draw(StepSampler* sampler, int row);
  // Takes a token that was drawn elsewhere.
  void Accept(uint32_t id);

  // The next row of a draft model's step is for what would be drawn behind `ahead` drafts: with the
  // same noise, filters and penalties, as if they were part of the answer. They have been taken by
  // DrawDraft, or nobody has looked at them yet: only where not counts_tokens().
  void AskDraft(StepSampler* sampler, int ahead) const;
  // Whether a draw depends on which tokens came before it by more than the logits: on their counts.
  bool counts_tokens() const;
  // Takes that draft, from row `row`. Errors: those of Sampler::SampleId.
  absl::StatusOr<uint32_t> DrawDraft(StepSampler* sampler, int row);
  // Forgets the drafts: only Draw says what the answer is.
  void TakeBackDrafts();
  bool IsStopToken(uint32_t id) const;

  uint32_t choice() const { return choice_; }
  // Position of the next token in the sequence.
  uint32_t position() const { return position_; }
  // Output so far, resumed tokens included.
  uint32_t num_output() const { return num_output_; }
  // It ends there at the latest.
  uint32_t max_output() const { return max_output_; }
  bool finished() const { return finish_.reason != FinishReason::kNone; }
  const Finish& finish() const { return finish_; }

 private:
  // Of the token `ahead` places behind the next one.
  DrawSite Site(size_t ahead) const;
  Finish Judge(uint32_t id);

  const EngineRequest& request_;
  const uint32_t choice_;
  const text::Tokenizer& tokenizer_;
  const uint32_t max_output_;
  uint32_t position_;
  uint32_t num_output_ = 0;
  TokenCounts counts_;
  std::vector<uint32_t> drafts_;  // counted in counts_ alone
  text::StopMatcher matcher_;
  std::string scratch_;  // text the matcher lets go; of no interest here
  Finish finish_;
};

}  // namespace baton::runtime
