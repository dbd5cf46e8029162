#pragma once

// A model that is planned for: its configuration and what names it, without its weights in memory.

#include <memory>
#include <string>

#include "absl/status/statusor.h"

#include "cli/kv_plan.h"

namespace baton::model {
class Checkpoint;
}  // namespace baton::model

namespace baton::cli {

// Thread-compatible.
class PlannedModel {
 public:
  // Errors: as model::Checkpoint::Open.
  static absl::StatusOr<PlannedModel> Open(const std::string& path);
  PlannedModel(PlannedModel&&) noexcept;
  ~PlannedModel();

  const model::ModelConfig& config() const;
  const std::string& fingerprint() const;
  // What weights compute in under these settings. Errors: INVALID_ARGUMENT with what is accepted.
  absl::StatusOr<std::string> WeightDtype(const WorkerSettings& settings) const;

 private:
  explicit PlannedModel(std::unique_ptr<model::Checkpoint> checkpoint);
  std::unique_ptr<model::Checkpoint> checkpoint_;
};

// The flags of model_flags.h that were given.
WorkerSettings SettingsFromFlags();

}  // namespace baton::cli
