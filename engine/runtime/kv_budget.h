#pragma once

// How many blocks the KV pool has: what was asked for, or what fits; and what is known to hurt.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/model_config.h"
#include "engine/ops/backend.h"
#include "engine/runtime/model_runner.h"

namespace baton::runtime {

struct KvBudgetInputs {
  int num_blocks = 0;          // > 0: that many
  int64_t kv_cache_bytes = 0;  // > 0: as many as that holds
  // Else, on a device: the share of its memory that may be in use once everything is allocated,
  // what others use included, and what steps allocate later.
  double utilization = 0.9;
  ops::DeviceMemory memory;  // total 0: the host, where the pool is kHostPoolBytes then
  uint64_t workspace_bytes = 0;
  uint64_t host_bytes_max = 0;  // the pool has a mirror on the host that may not be larger; 0: none
  uint64_t block_bytes = 0;     // of one block, all layers
  uint64_t device_block_bytes = 0;  // of them on one device: a rank's share
  int max_model_len = 0;
  bool max_model_len_chosen = false;  // not simply the model's own
};
struct KvBudget {
  int num_blocks = 0;
  std::vector<std::string> warnings;  // for people, one a line
};

inline constexpr uint64_t kHostPoolBytes = uint64_t{1} << 30;

// Errors: INVALID_ARGUMENT for a utilization outside (0, 1]; RESOURCE_EXHAUSTED, with the figures,
// when not one block fits.
absl::StatusOr<KvBudget> PlanKvPool(const KvBudgetInputs& inputs);

// What a backend on a device is to have room for where steps have this many rows of logits. An
// answer with penalties has an edit for each different token in it, in every row.
ops::DrawLimits DrawLimitsOf(int max_logit_rows);

// What a backend on a device allocates, most of it when the largest step first runs: what gate and
// up give, the logits, and what is drawn from them.
uint64_t WorkspaceBytes(const model::ModelConfig& config, const ModelRunnerOptions& options);

uint64_t HalfOfHostMemory();

}  // namespace baton::runtime
