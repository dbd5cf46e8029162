#pragma once

// Drafts from a model: a small one with a KV cache of its own, or a low-bit copy of the target that
// works in the target's cache.

#include <memory>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "decode_worker/acceptance.h"
#include "decode_worker/draft_intake.h"
#include "decode_worker/drafter.h"
#include "decode_worker/step_cost.h"
#include "engine/runtime/batch.h"
#include "engine/runtime/model_runner.h"
#include "engine/runtime/step_sampler.h"
#include "worker/worker_metrics.h"

namespace baton::decode {

struct ModelDrafterOptions {
  int max_batch = 64;      // most sequences in a step
  int max_catch_up = 256;  // most tokens of a step that catches up
  int num_tokens = 0;      // the tokenizer's size: ids from here up are not drawn
  bool uses_target_kv =
      false;  // the runner works in the target's pool (ModelRunnerOptions::kv_owner)
};

// Draws with the noise, filters and penalties of the answer, so that a draft model that agrees with
// the target about the distribution agrees about the token.
//
// With a cache of its own a sequence is offered drafts once its tokens are in there: a prompt that
// came without them is computed between steps, a piece at a time and only where drafts would pay,
// while the answer goes on without drafts. When that cache is full the sequence that needs a block
// gives up its place and starts again later. In the target's cache the drafts' keys and values lie
// where the verifying step writes the exact ones.
//
// On a device that draws, all rounds are issued before one is looked at, each with the tokens of
// the one before: a chain (engine/ops/draw_chain.h). What a request asks of the counts of its
// tokens (penalties) is known on the host only, so a step with such a request has its rounds one by
// one. Engine thread only.
class ModelDrafter : public Drafter {
 public:
  // `runner` has vocabulary and positions for everything the target takes, steps of max_batch +
  // max_catch_up tokens, and max_batch rows of logits. `cost` is that of its steps.
  ModelDrafter(const ModelDrafterOptions& options,
               std::unique_ptr<runtime::ModelRunner> runner,
               StepCost cost,
               const worker::WorkerMetrics& metrics = worker::WorkerMetrics());

  // From now on in chains, where the runner has them. Errors: RESOURCE_EXHAUSTED.
  absl::Status UseDrawChain();

  DraftOffer Offer(const Drafting& drafting) override;
  void Draft(absl::Span<Drafting* const> draftings) override;
  bool DraftAhead(absl::Span<Drafting* const> draftings) override;
  double Finish() override;
  void OnVerified(const Drafting& drafting, int accepted) override;
  void Forget(uint64_t order) override;
  double RoundSeconds(const StepLoad& round) const override;
  void OnStep(double slowness) override { cost_.DriftTo(slowness); }
  void Want(const Drafting& drafting) override;
  void CatchUp(double seconds) override;

  // Prompts may come from prefill workers: until one that is coming has landed or failed, it is not
  // computed here. `intake` works on memory() and outlives the drafter.
  void set_intake(const DraftIntake* intake) { intake_ = intake; }
  // Null when it works in the target's cache.
  runtime::KvMemory* memory() { return memory_ ? &*memory_ : nullptr; }
  runtime::ModelRunner& runner() { return *runner_; }

 private:
  struct State {
    // Own cache only: the target's tokens, then drafts; what is computed of them.
    std::optional<runtime::Sequence> sequence;
    int num_landed = 0;   // the intake's, when it was last looked into the prefix cache
    bool wanted = false;  // by an answer that would have drafts if it were computed
    Acceptance acceptance;
  };

  // The state of a sequence, its tokens brought up to date.
  State& Sync(const runtime::Sequence& target);
  bool IsComing(uint64_t order) const;
  // Starts again from the prefix cache, which may hold what was handed over meanwhile.
  void MatchAgain(State* state);
  bool Grow(State* state, int num_tokens);
  // jobs_ become those that there is room for.
  void TakeJobs(absl::Span<Drafting* const> draftings);
  // Those of jobs_ that have had their last round leave.
  void DropFinished(int round);
  void RunRounds();
  // The batch of a round of jobs_.
  StepLoad FillRound(int round);
  // The next draft of each of jobs_.
  void RunRound(int round);
  // Issues all rounds as one chain; false: nothing has been issued, as tokens are to be counted.
  bool IssueRounds();
  bool IssueRound(int round);
  // What is pending of the drafter's own sequence is computed by the round, and `id` comes next.
  void Append(const Drafting& drafting, uint32_t id);
  void FinishJob(Drafting* job, bool failed);
  void AddToBatch(Drafting* drafting, int round);
  // The draft of this round, from row `row` of the step.
  bool Take(Drafting* drafting, int round, int row);

  // Tokens that a sequence may lack and still be offered drafts: its first round computes them.
  int most_pending() const { return 1 + options_.max_catch_up / options_.max_batch; }

  const ModelDrafterOptions options_;
  const worker::WorkerMetrics metrics_;
  std::unique_ptr<runtime::ModelRunner> runner_;
  StepCost cost_;
  double draw_seconds_ = 0;  // mean of one draw
  std::optional<runtime::KvMemory> memory_;
  const DraftIntake* intake_ = nullptr;
  runtime::StepSampler sampler_;
  std::vector<runtime::StepSequence> parts_;
  std::vector<int> rows_;                  // one per part
  std::vector<Drafting*> jobs_;            // that want one more draft
  std::unique_ptr<ops::DrawChain> chain_;  // null: rounds are run one by one
  std::vector<ops::SampleResult> drawn_;   // of the chain's draws
  std::vector<Drafting*> ahead_;           // whose drafts are in the chain
  std::vector<StepLoad> rounds_;           // of the chain
  absl::flat_hash_map<uint64_t, std::unique_ptr<State>> states_;
  Acceptance acceptance_;  // of all sequences
};

}  // namespace baton::decode
