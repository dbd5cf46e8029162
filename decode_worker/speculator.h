#pragma once

// Drafts for the sequences of a step: who drafts, how many, and what became of it.

#include <memory>
#include <vector>

#include "decode_worker/draft_planner.h"
#include "decode_worker/drafter.h"
#include "decode_worker/step_cost.h"
#include "worker/worker_metrics.h"

namespace baton::decode {

struct SpeculationOptions {
  int max_drafts = kMaxDrafts;  // most drafts of one sequence in a step; 0: no speculation
  int max_step_drafts = 64;     // most drafts of a step
  bool ngram = true;            // look-up in prompt and answer
};

// One step goes Begin, Add for each decoding sequence, Plan, Draft, the step itself, Finish,
// OnStep, OnVerified for each that had drafts. Sequences are addressed by the order of Add. Engine
// thread only.
class Speculator {
 public:
  Speculator(const SpeculationOptions& options,
             int max_batch,
             const worker::WorkerMetrics& metrics);

  // Before the first step. Of drafters that promise the same, the first one added drafts.
  void AddDrafter(std::unique_ptr<Drafter> drafter) { drafters_.push_back(std::move(drafter)); }
  void set_cost(StepCost cost) { cost_ = std::move(cost); }
  // Steps can take drafts that are still on the device (ModelRunner::reads_draw_chains).
  void set_reads_chains(bool reads) { reads_chains_ = reads; }

  void Begin() { draftings_.clear(); }
  void Add(const runtime::Sequence& sequence, runtime::Answer* answer);
  // `others` is what takes part in the step besides decoding sequences.
  void Plan(const StepLoad& others);
  // What has been planned; the caller may lower a count.
  Drafting& drafting(size_t index) { return draftings_[index]; }
  void Draft();
  // Drafts that were left on the device are there. The seconds it took for them: they are part of
  // what the step seems to have taken.
  double Finish();
  // The first `accepted` drafts were right and the sequence has its new tokens.
  void OnVerified(size_t index, int accepted);
  // A step of decoding sequences alone has taken this long.
  void OnStep(const StepLoad& load, double seconds);
  // From Begin to the end of its drawing: the same, after OnStep. Says nothing of a plan whose
  // counts were lowered.
  void OnCycle(double seconds);
  // Between steps. `seconds` is what the last step took.
  void CatchUp(double seconds);
  void Forget(uint64_t order);

 private:
  bool PlanWasCut() const;
  void Choose(const StepLoad& load, size_t index);

  const SpeculationOptions options_;
  const worker::WorkerMetrics metrics_;
  StepCost cost_;
  DraftPlanner planner_;
  DraftPlan plan_;
  CycleFactors factors_;
  std::vector<std::unique_ptr<Drafter>> drafters_;
  std::vector<Drafting> draftings_;
  std::vector<DraftCandidate> candidates_;
  std::vector<int> counts_;
  std::vector<Drafting*> jobs_;  // scratch of Draft
  bool reads_chains_ = false;
  Drafter* ahead_ = nullptr;  // whose drafts are on the device
};

}  // namespace baton::decode
