#pragma once

// Where draft tokens come from. A draft is a guess of the next token: the step that follows scores
// it together with everything else, and it is kept if it equals the token the model would have
// drawn at that place. So a drafter decides how fast an answer comes, never what it says.

#include <array>
#include <cstdint>

#include "absl/types/span.h"
#include "decode_worker/step_cost.h"
#include "engine/ops/draw_chain.h"
#include "engine/runtime/answer.h"
#include "engine/runtime/sequence.h"

namespace baton::decode {

// Most drafts of one sequence in one step: with the token before them they fill the 16 rows of a
// matrix tile.
inline constexpr int kMaxDrafts = 15;

class Drafter;

// One sequence that decodes in the next step, and its drafts.
struct Drafting {
  const runtime::Sequence* sequence = nullptr;  // all but its last token is computed
  runtime::Answer* answer = nullptr;
  int limit = 0;  // more drafts than this could not be used
  Drafter* drafter = nullptr;
  int count = 0;
  std::array<uint32_t, kMaxDrafts> tokens;
  // Not null: until Drafter::Finish the tokens are on the device, draws of this chain.
  const ops::DrawChain* chain = nullptr;
  std::array<int32_t, kMaxDrafts> draws;

  absl::Span<const uint32_t> drafts() const {
    return absl::MakeConstSpan(tokens.data(), static_cast<size_t>(count));
  }
  absl::Span<const int32_t> drawn() const {
    return absl::MakeConstSpan(draws.data(), chain == nullptr ? 0 : static_cast<size_t>(count));
  }
};

// What a drafter could do for a sequence now.
struct DraftOffer {
  int count = 0;         // drafts, at most Drafting::limit
  float acceptance = 0;  // chance that a draft is accepted if those before it are
  bool ready = true;     // else only after CatchUp
};

// Sequences are known by their order, which is unique. Engine thread only.
class Drafter {
 public:
  virtual ~Drafter() = default;
  virtual DraftOffer Offer(const Drafting& drafting) = 0;
  // Fills in `count` drafts of each, fewer where it cannot. All of them are drafter() == this.
  virtual void Draft(absl::Span<Drafting* const> draftings) = 0;
  // The same, but the tokens may stay on the device, for a step that takes them from there: true,
  // and Finish fills them in. `tokens` are any until then.
  virtual bool DraftAhead(absl::Span<Drafting* const> draftings) {
    Draft(draftings);
    return false;
  }
  // Waits for what DraftAhead has left. The seconds that the device took for it.
  virtual double Finish() { return 0; }
  // The step is over: the first `accepted` of the drafts were right. The sequence has its new
  // tokens.
  virtual void OnVerified(const Drafting& drafting, int accepted) = 0;
  // The sequence has ended. Unknown ones are left alone.
  virtual void Forget(uint64_t order) = 0;
  // What one more draft of each of some sequences costs, without its verification: `round` has one
  // token of each.
  virtual double RoundSeconds(const StepLoad& round) const { return 0; }
  // After each step: the model's steps now take this many times as long as at start.
  virtual void OnStep(double slowness) {}
  // An offer that was not ready would have been taken.
  virtual void Want(const Drafting& drafting) {}
  // Between steps, when tokens have been sent: work for offers that are wanted, as a part of
  // `seconds`, the time of a step.
  virtual void CatchUp(double seconds) {}
};

}  // namespace baton::decode
