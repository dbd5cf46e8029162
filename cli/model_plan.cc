#include "cli/model_plan.h"

#include <utility>

#include "absl/flags/flag.h"

#include "cli/model_flags.h"
#include "engine/base/status_macros.h"
#include "engine/model/checkpoint.h"
#include "engine/model/weights.h"

namespace baton::cli {

PlannedModel::PlannedModel(std::unique_ptr<model::Checkpoint> checkpoint)
    : checkpoint_(std::move(checkpoint)) {}
PlannedModel::PlannedModel(PlannedModel&&) noexcept = default;
PlannedModel::~PlannedModel() = default;

absl::StatusOr<PlannedModel> PlannedModel::Open(const std::string& path) {
  if (path.empty())
    return absl::InvalidArgumentError("--model: needs a Hugging Face directory or a GGUF file");
  BATON_ASSIGN_OR_RETURN(auto checkpoint, model::Checkpoint::Open(path));
  return PlannedModel(std::move(checkpoint));
}

const model::ModelConfig& PlannedModel::config() const { return checkpoint_->config(); }
const std::string& PlannedModel::fingerprint() const { return checkpoint_->fingerprint(); }

absl::StatusOr<std::string> PlannedModel::WeightDtype(const WorkerSettings& settings) const {
  const auto found = settings.find("weight_dtype");
  BATON_ASSIGN_OR_RETURN(
      const auto dtype,
      model::ResolveWeightDtype(*checkpoint_, found == settings.end() ? "auto" : found->second));
  return std::string(ops::WeightDtypeName(dtype));
}

WorkerSettings SettingsFromFlags() {
  WorkerSettings settings;
  const auto add = [&](const char* key, const absl::optional<std::string>& value) {
    if (value) settings[key] = *value;
  };
  add("weight_dtype", absl::GetFlag(FLAGS_weight_dtype));
  add("kv_dtype", absl::GetFlag(FLAGS_kv_dtype));
  add("kv_cache_bytes", absl::GetFlag(FLAGS_kv_cache_bytes));
  add("num_blocks", absl::GetFlag(FLAGS_num_blocks));
  add("gpu_memory_utilization", absl::GetFlag(FLAGS_gpu_memory_utilization));
  add("max_model_len", absl::GetFlag(FLAGS_max_model_len));
  add("tp", absl::GetFlag(FLAGS_tp));
  add("kv_transport", absl::GetFlag(FLAGS_kv_transport));
  add("require_transport", absl::GetFlag(FLAGS_require_transport));
  return settings;
}

}  // namespace baton::cli
