#include "decode_worker/speculator.h"

#include <algorithm>
#include <utility>

#include "decode_worker/ngram_drafter.h"

namespace baton::decode {
namespace {

// One cycle moves its factor by this part; where drafts are off, their factor fades to that of
// plain cycles, so that they are tried again.
constexpr double kCycleLearn = 0.05;
constexpr double kFactorFade = 0.001;
// A cycle that took longer or shorter than this many times the usual says nothing of its kind.
constexpr double kCycleOutlier = 3;

}  // namespace

Speculator::Speculator(const SpeculationOptions& options,
                       int max_batch,
                       const worker::WorkerMetrics& metrics)
    : options_(options), metrics_(metrics), planner_(max_batch, options.max_step_drafts) {
  draftings_.reserve(max_batch);
  candidates_.reserve(max_batch);
  counts_.reserve(max_batch);
  jobs_.reserve(max_batch);
  if (options_.ngram) AddDrafter(std::make_unique<NgramDrafter>());
}

void Speculator::Add(const runtime::Sequence& sequence, runtime::Answer* answer) {
  Drafting& drafting = draftings_.emplace_back();
  drafting.sequence = &sequence;
  drafting.answer = answer;
  // A step gives a token more than it has right drafts. The answer's limit keeps within the
  // context.
  const auto left = static_cast<int>(answer->max_output() - answer->num_output());
  drafting.limit = std::clamp(left - 1, 0, options_.max_drafts);
}

void Speculator::Plan(const StepLoad& others) {
  candidates_.clear();
  StepLoad load = others;
  for (const Drafting& drafting : draftings_) load.Add(1, drafting.sequence->num_tokens());
  for (size_t i = 0; i < draftings_.size(); ++i) Choose(load, i);
  counts_.assign(draftings_.size(), 0);
  plan_ = planner_.Plan(cost_, factors_, load, options_.max_step_drafts, candidates_,
                        absl::MakeSpan(counts_));
  for (size_t i = 0; i < draftings_.size(); ++i) draftings_[i].count = counts_[i];
}

// The drafter that would make the step fastest if no other sequence had drafts.
void Speculator::Choose(const StepLoad& load, size_t index) {
  Drafting& drafting = draftings_[index];
  DraftCandidate best;
  double best_speed = 0;
  for (const std::unique_ptr<Drafter>& drafter : drafters_) {
    if (drafting.limit == 0) break;
    const DraftOffer offer = drafter->Offer(drafting);
    if (offer.count == 0) continue;
    const DraftCandidate candidate{offer.count, offer.acceptance, drafting.sequence->num_tokens(),
                                   drafter.get()};
    int count = 0;
    double speed = 1;
    if (drafters_.size() > 1 || !offer.ready) {
      speed = planner_
                  .Plan(cost_, factors_, load, options_.max_step_drafts,
                        absl::MakeConstSpan(&candidate, 1), absl::MakeSpan(&count, 1))
                  .tokens_per_second;
    }
    if (!offer.ready) {
      if (count > 0) drafter->Want(drafting);
    } else if (speed > best_speed) {
      best_speed = speed;
      best = candidate;
      drafting.drafter = drafter.get();
    }
  }
  candidates_.push_back(best);
}

void Speculator::Draft() {
  for (const std::unique_ptr<Drafter>& drafter : drafters_) {
    jobs_.clear();
    for (Drafting& drafting : draftings_) {
      if (drafting.count > 0 && drafting.drafter == drafter.get()) jobs_.push_back(&drafting);
    }
    if (jobs_.empty()) continue;
    // A step reads one chain.
    if (!reads_chains_ || ahead_ != nullptr) {
      drafter->Draft(absl::MakeSpan(jobs_));
    } else if (drafter->DraftAhead(absl::MakeSpan(jobs_))) {
      ahead_ = drafter.get();
    }
  }
}

double Speculator::Finish() {
  return ahead_ == nullptr ? 0 : std::exchange(ahead_, nullptr)->Finish();
}

void Speculator::OnVerified(size_t index, int accepted) {
  const Drafting& drafting = draftings_[index];
  if (drafting.count == 0) return;
  drafting.drafter->OnVerified(drafting, accepted);
  metrics_.OnDrafts(drafting.count, accepted);
}

void Speculator::OnStep(const StepLoad& load, double seconds) {
  cost_.Observe(load, seconds);
  for (const std::unique_ptr<Drafter>& drafter : drafters_) drafter->OnStep(cost_.slowness());
}

bool Speculator::PlanWasCut() const {
  for (size_t i = 0; i < draftings_.size(); ++i) {
    if (draftings_[i].count != counts_[i]) return true;
  }
  return false;
}

void Speculator::OnCycle(double seconds) {
  if (seconds <= 0 || plan_.seconds <= 0 || PlanWasCut()) return;
  double& factor = plan_.drafted ? factors_.drafted : factors_.plain;
  // What makes plain cycles slower is nothing that drafts are to blame for, so both move.
  const double ratio =
      std::clamp(seconds / plan_.seconds / factor, 1 / kCycleOutlier, kCycleOutlier);
  const double moved = 1 + kCycleLearn * (ratio - 1);
  factors_.drafted *= moved;
  if (plan_.drafted) return;
  factors_.plain *= moved;
  factors_.drafted += kFactorFade * (factors_.plain - factors_.drafted);
}

void Speculator::CatchUp(double seconds) {
  for (const std::unique_ptr<Drafter>& drafter : drafters_) drafter->CatchUp(seconds);
}

void Speculator::Forget(uint64_t order) {
  for (const std::unique_ptr<Drafter>& drafter : drafters_) drafter->Forget(order);
}

}  // namespace baton::decode
