#pragma once

// How much memory a worker of a model needs, and whether its settings can hold; nothing is loaded
// but the model's configuration.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "engine/kv/kv_layout.h"
#include "engine/model/model_config.h"

namespace baton::cli {

// A worker's flags, as text; keys with underscores. What is missing has the worker's default.
using WorkerSettings = std::map<std::string, std::string>;

// Of one worker.
struct KvPlan {
  kv::KvFormat format = kv::KvFormat::kFp8;
  int64_t bytes_per_token = 0;
  int64_t block_bytes = 0;  // over all layers
  int64_t num_blocks = 0;
  int64_t pool_bytes = 0;
  int64_t pool_tokens = 0;
  int tp = 1;                // ranks; each has an equal share of the cache
  int64_t weight_bytes = 0;  // about, in the dtype they compute in
  int max_model_len = 0;
};

// Errors: INVALID_ARGUMENT naming the setting and what it takes; what the model refuses.
absl::StatusOr<KvPlan> PlanWorker(const model::ModelConfig& config,
                                  const std::string& weight_dtype,
                                  const WorkerSettings& settings);

// One finding of check-config.
struct Finding {
  enum class Level { kError, kWarning };
  Level level = Level::kError;
  std::string text;
};

// What cannot hold, or is known to hurt, in one worker. `memory_bytes` is what the process may use.
std::vector<Finding> CheckWorker(const std::string& role,
                                 const model::ModelConfig& config,
                                 const std::string& weight_dtype,
                                 const WorkerSettings& settings,
                                 int64_t memory_bytes);

// Why a prefill and a decode worker would refuse each other, or hinder each other. Each `model` is
// the fingerprint of its checkpoint.
struct PairMember {
  model::ModelConfig config;
  std::string model;
  std::string weight_dtype;
  WorkerSettings settings;
};
std::vector<Finding> CheckPair(const PairMember& prefill, const PairMember& decode);

}  // namespace baton::cli
