#include "decode_worker/draft_models.h"

#include <utility>

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
    case ops::WeightDtype::kFp8:
      return 8;
    case ops::WeightDtype::kQ4:
      return 4;
  }
  return 0;
}

absl::StatusOr<std::unique_ptr<ModelDrafter>> Make(const DraftModelOptions& draft,
                                                   bool uses_target_kv,
                                                   const worker::EngineHost& target,
                                                   std::unique_ptr<runtime::ModelRunner> runner) {
  BATON_ASSIGN_OR_RETURN(StepCost cost,
                         MeasureStepCost(*runner, draft.max_batch, draft.cost_budget));
  ModelDrafterOptions drafter;
  drafter.max_batch = draft.max_batch;
  drafter.max_catch_up = kMaxCatchUp;
  drafter.num_tokens = static_cast<int>(target.tokenizer->vocab_size());
  drafter.uses_target_kv = uses_target_kv;
  auto model =
      std::make_unique<ModelDrafter>(drafter, std::move(runner), std::move(cost), draft.metrics);
  // The verifying step reads chains on its own device only.
  if (model->runner().device_ids() == target.runner->device_ids())
    BATON_RETURN_IF_ERROR(model->UseDrawChain());
  return model;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ModelDrafter>> LoadDraftModel(const DraftModelOptions& draft,
                                                             const std::string& path,
                                                             const worker::WorkerOptions& options,
                                                             const worker::EngineHost& target) {
  worker::DraftRunnerOptions runner_options;
  runner_options.step_tokens = draft.max_batch + kMaxCatchUp;
  runner_options.max_logit_rows = draft.max_batch;
  runner_options.num_blocks = target.runner->layout().num_blocks;
  BATON_ASSIGN_OR_RETURN(std::unique_ptr<runtime::ModelRunner> runner,
                         worker::LoadDraftRunner(runner_options, path, options, target));
  return Make(draft, /*uses_target_kv=*/false, target, std::move(runner));
}

absl::StatusOr<std::unique_ptr<ModelDrafter>> LoadLowBitCopy(const DraftModelOptions& draft,
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
  runtime::ModelRunnerOptions runner_options;
  runner_options.model_path = options.model;
  runner_options.backend = worker::BackendOf(options);
  runner_options.weight_dtype = weight_dtype;
  runner_options.max_model_len = options.max_model_len;
  runner_options.max_step_tokens = draft.max_batch;
  runner_options.max_logit_rows = draft.max_batch;
  runner_options.backend_options.num_threads = options.threads;
  runner_options.backend_options.isa = options.cpu_isa;
  runner_options.backend_options.enforce_eager = options.enforce_eager;
  runner_options.backend_options.prefill_attention = options.prefill_attention;
  runner_options.kv_owner = target.runner.get();
  BATON_ASSIGN_OR_RETURN(std::unique_ptr<runtime::ModelRunner> runner,
                         runtime::ModelRunner::Create(runner_options));
  return Make(draft, /*uses_target_kv=*/true, target, std::move(runner));
}

}  // namespace baton::decode
