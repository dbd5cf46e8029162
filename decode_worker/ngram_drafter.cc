#include "decode_worker/ngram_drafter.h"

#include "engine/base/log.h"

namespace baton::decode {
namespace {

// Before anything is known, by class; on English text that repeats some of its input.
constexpr float kPriors[] = {0.15f, 0.4f, 0.65f, 0.85f};
// What the classes of all sequences have seen weighs as much as this many trials of one sequence,
// and the priors as much as this many of all.
constexpr float kAllWeight = 6;
constexpr float kPriorWeight = 20;
// A sequence's own trials are half forgotten after 35 steps, those of all after 700 look-ups.
constexpr float kOwnKeep = 0.98f;
constexpr float kAllKeep = 0.999f;

}  // namespace

int NgramDrafter::ClassOf(int match_length) {
  return match_length < 4 ? 0 : match_length < 8 ? 1 : match_length < 16 ? 2 : 3;
}

DraftOffer NgramDrafter::Offer(const Drafting& drafting) {
  const runtime::Sequence& sequence = *drafting.sequence;
  std::unique_ptr<State>& state = states_[sequence.order];
  if (state == nullptr) {
    const uint32_t left = drafting.answer->max_output() - drafting.answer->num_output();
    state = std::make_unique<State>(sequence.num_tokens() + static_cast<int>(left));
  }
  state->index.Extend(sequence.tokens);
  state->match = state->index.Find(sequence.tokens);
  for (Acceptance& own : state->acceptance) own.Fade(kOwnKeep);
  if (state->match.length == 0) return {};
  const int match_class = ClassOf(state->match.length);
  Acceptance& all = acceptance_[match_class];
  all.Fade(kAllKeep);
  const float common = all.Estimate(kPriors[match_class], kPriorWeight);
  return {drafting.limit, state->acceptance[match_class].Estimate(common, kAllWeight)};
}

void NgramDrafter::Draft(absl::Span<Drafting* const> draftings) {
  for (Drafting* drafting : draftings) {
    const auto found = states_.find(drafting->sequence->order);
    BATON_CHECK(found != states_.end() && found->second->match.length > 0);
    const std::vector<uint32_t>& tokens = drafting->sequence->tokens;
    const size_t next = static_cast<size_t>(found->second->match.next);
    for (size_t i = 0; i < static_cast<size_t>(drafting->count); ++i) {
      // A match that reaches the end goes on in its own copy: a text that repeats itself.
      const size_t at = next + i;
      drafting->tokens[i] = at < tokens.size() ? tokens[at] : drafting->tokens[at - tokens.size()];
    }
  }
}

void NgramDrafter::OnVerified(const Drafting& drafting, int accepted) {
  const auto found = states_.find(drafting.sequence->order);
  if (found == states_.end()) return;
  const int match_class = ClassOf(found->second->match.length);
  found->second->acceptance[match_class].Add(drafting.count, accepted);
  acceptance_[match_class].Add(drafting.count, accepted);
}

}  // namespace baton::decode
