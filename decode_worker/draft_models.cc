#include "decode_worker/draft_models.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "decode_worker/model_drafter.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::decode {
namespace {

// Most tokens of a step in which a draft model catches up with a prompt.
constexpr int kMaxCatchUp = 512;

int Bits(ops::WeightDtype dtype) {
  switch (dtype) {
    case ops::WeightDtype::kF32:
      return 32;
    case ops::WeightDtype::kBf16:
      return 16;
    case ops::WeightDtype::kInt8:
      return 8;
    case ops::WeightDtype::kQ4:
      return 4;
  }
  return 0;
}

runtime::ModelRunnerOptions RunnerOptions(const DraftModelOptions& draft,
                                          const worker::WorkerOptions& options,
                                          const runtime::ModelRunner& target) {
  runtime::ModelRunnerOptions runner;
  runner.backend = options.device == "auto" ? "cpu" : options.device;
  runner.kv_dtype = options.kv_dtype;
  runner.max_step_tokens = draft.max_batch + kMaxCatchUp;
  runner.max_logit_rows = draft.max_batch;
  runner.num_blocks = target.layout().num_blocks;
  runner.backend_options.num_threads = options.threads;
  runner.backend_options.isa = options.cpu_isa;
  return runner;
}

absl::StatusOr<std::unique_ptr<Drafter>> Make(const DraftModelOptions& draft,
                                              const runtime::ModelRunnerOptions& options,
                                              const worker::EngineHost& target,
                                              std::unique_ptr<runtime::ModelRunner> runner) {
  BATON_ASSIGN_OR_RETURN(StepCost cost,
                         MeasureStepCost(*runner, draft.max_batch, draft.cost_budget));
  ModelDrafterOptions drafter;
  drafter.max_batch = draft.max_batch;
  drafter.max_catch_up = kMaxCatchUp;
  drafter.num_tokens = static_cast<int>(target.tokenizer->vocab_size());
  drafter.uses_target_kv = options.kv_owner != nullptr;
  return std::make_unique<ModelDrafter>(drafter, std::move(runner), std::move(cost));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Drafter>> LoadDraftModel(const DraftModelOptions& draft,
                                                        const std::string& path,
                                                        const worker::WorkerOptions& options,
                                                        const worker::EngineHost& target) {
  runtime::ModelRunnerOptions runner_options = RunnerOptions(draft, options, *target.runner);
  runner_options.model_path = path;
  BATON_ASSIGN_OR_RETURN(std::unique_ptr<runtime::ModelRunner> runner,
                         runtime::ModelRunner::Create(runner_options));
  if (runner->config().vocab != target.runner->config().vocab) {
    return absl::InvalidArgumentError(
        absl::StrCat("--draft-model: vocab=", runner->config().vocab,
                     " target_vocab=", target.runner->config().vocab));
  }
  BATON_ASSIGN_OR_RETURN(const std::unique_ptr<text::Tokenizer> tokenizer,
                         worker::LoadTokenizer(*runner));
  if (tokenizer->fingerprint() != target.tokenizer->fingerprint())
    return absl::InvalidArgumentError("--draft-model: its tokenizer is not the model's");
  return Make(draft, runner_options, target, std::move(runner));
}

absl::StatusOr<std::unique_ptr<Drafter>> LoadLowBitCopy(const DraftModelOptions& draft,
                                                        const std::string& weight_dtype,
                                                        const worker::WorkerOptions& options,
                                                        const worker::EngineHost& target) {
  BATON_ASSIGN_OR_RETURN(const ops::WeightDtype dtype, ops::ParseWeightDtype(weight_dtype));
  if (Bits(dtype) >= Bits(target.runner->weight_dtype())) {
    BATON_LOG(Warning, "low-bit drafts are off",
              " weight_dtype=", ops::WeightDtypeName(target.runner->weight_dtype()),
              " draft_weight_dtype=", weight_dtype);
    return nullptr;
  }
  runtime::ModelRunnerOptions runner_options = RunnerOptions(draft, options, *target.runner);
  runner_options.model_path = options.model;
  runner_options.weight_dtype = weight_dtype;
  runner_options.max_model_len = options.max_model_len;
  runner_options.kv_owner = target.runner.get();
  BATON_ASSIGN_OR_RETURN(std::unique_ptr<runtime::ModelRunner> runner,
                         runtime::ModelRunner::Create(runner_options));
  return Make(draft, runner_options, target, std::move(runner));
}

}  // namespace baton::decode
