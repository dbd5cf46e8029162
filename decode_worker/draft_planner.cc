#include "decode_worker/draft_planner.h"

#include <algorithm>
#include <array>

#include "engine/base/log.h"

namespace baton::decode {
namespace {

// Speed must rise by this much before drafts are worth the uncertainty of the estimates.
constexpr double kMargin = 1.02;

// How many sequences have a draft of each place, by drafter, and what drafting them costs.
class DraftingCost {
 public:
  // Seconds added by one more sequence in round `round`. Of several drafters with a price the
  // rounds are counted together, which makes the later ones look a little too cheap.
  double Add(const DraftCandidate& candidate, int round) {
    if (candidate.drafter == nullptr) return 0;
    StepLoad& load = loads_[round];
    const double before = load.tokens == 0 ? 0 : candidate.drafter->RoundSeconds(load);
    load.Add(1, candidate.context);
    return candidate.drafter->RoundSeconds(load) - before;
  }

 private:
  std::array<StepLoad, kMaxDrafts> loads_{};
};

}  // namespace

DraftPlanner::DraftPlanner(int max_candidates, int max_budget) {
  chances_.reserve(max_candidates);
  picks_.reserve(max_budget);
}

DraftPlan DraftPlanner::Plan(const StepCost& cost,
                             const CycleFactors& factors,
                             const StepLoad& load,
                             int budget,
                             absl::Span<const DraftCandidate> candidates,
                             absl::Span<int> counts) {
  BATON_CHECK(counts.size() == candidates.size());
  std::fill(counts.begin(), counts.end(), 0);
  chances_.clear();
  picks_.clear();
  for (const DraftCandidate& candidate : candidates)
    chances_.push_back(candidate.most > 0 ? candidate.acceptance : 0);
  StepLoad step = load;
  DraftingCost drafting_cost;
  double tokens = load.tokens;
  double drafting = 0;
  bool drafted = false;
  const double plain_seconds = cost.Seconds(step);
  DraftPlan plan{tokens / (plain_seconds * factors.plain), plain_seconds, false};
  double best_speed = plan.tokens_per_second * kMargin;
  size_t best_total = 0;
  while (static_cast<int>(picks_.size()) < budget) {
    const auto next = std::max_element(chances_.begin(), chances_.end());
    if (next == chances_.end() || *next <= 0) break;
    const size_t i = next - chances_.begin();
    const DraftCandidate& candidate = candidates[i];
    tokens += *next;
    step.tokens += 1;
    step.query_context += candidate.context;
    const double price = drafting_cost.Add(candidate, counts[i]);
    drafting += price;
    drafted |= price > 0;
    picks_.push_back(i);
    *next = ++counts[i] < std::min(candidate.most, kMaxDrafts) ? *next * candidate.acceptance : 0;
    const double seconds = cost.Seconds(step) + drafting;
    const double speed = tokens / (seconds * (drafted ? factors.drafted : factors.plain));
    if (speed > best_speed) {
      best_speed = speed;
      best_total = picks_.size();
      plan = {speed, seconds, drafted};
    }
  }
  for (size_t pick = best_total; pick < picks_.size(); ++pick) --counts[picks_[pick]];
  return plan;
}

}  // namespace baton::decode
