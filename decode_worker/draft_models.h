#pragma once

// Loads the models that draft.

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "decode_worker/model_drafter.h"
#include "worker/engine_host.h"
#include "worker/worker_options.h"

namespace baton::decode {

struct DraftModelOptions {
  int max_batch = 64;
  absl::Duration cost_budget = absl::Seconds(2);  // what timing its steps may take
  worker::WorkerMetrics metrics;
};

// A small model with a KV cache of as many blocks as the target's.
// Errors: those of worker::LoadDraftRunner.
absl::StatusOr<std::unique_ptr<ModelDrafter>> LoadDraftModel(const DraftModelOptions& draft,
                                                             const std::string& path,
                                                             const worker::WorkerOptions& options,
                                                             const worker::EngineHost& target);

// The target's own weights in `weight_dtype`, in the target's KV cache. Null, with a line in the
// log, when the target computes in no more bits: drafting would cost what it saves.
// Errors: those of ModelRunner::Create.
absl::StatusOr<std::unique_ptr<ModelDrafter>> LoadLowBitCopy(const DraftModelOptions& draft,
                                                             const std::string& weight_dtype,
                                                             const worker::WorkerOptions& options,
                                                             const worker::EngineHost& target);

}  // namespace baton::decode
