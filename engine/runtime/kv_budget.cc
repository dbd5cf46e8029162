#include "engine/runtime/kv_budget.h"

#include <unistd.h>

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"

namespace baton::runtime {
namespace {

// More tokens than this in the model's own limit, and nobody asked for them: few requests are so
// long, and each may take that much of the pool.
constexpr int kLongContext = 65536;
// Above it what others on the device and the driver itself need is no longer sure to fit.
constexpr double kUtilizationWarning = 0.95;
// A block id times 64 tokens stays an int.
constexpr uint64_t kBlocksMax = std::numeric_limits<int32_t>::max() / kv::kBlockTokens;
constexpr double kF32Bytes = 4;

// Edits that a step may have: 1.3 MB at least, and 20 kB for each row. Where there are more, moving
// logits costs not much more than moving edits.
constexpr int kLeastEdits = 65536;
constexpr int kEditsPerRow = 1024;

std::string Figures(const KvBudgetInputs& in) {
  return absl::StrCat("total_bytes=", in.memory.total_bytes, " free_bytes=", in.memory.free_bytes,
                      " gpu_memory_utilization=", in.utilization,
                      " workspace_bytes=", in.workspace_bytes, " bytes_per_block=", in.block_bytes);
}

// Bytes of the device that the pool may take.
uint64_t Left(const KvBudgetInputs& in) {
  const auto may_be_used =
      static_cast<uint64_t>(static_cast<double>(in.memory.total_bytes) * in.utilization);
  const uint64_t taken = in.memory.total_bytes -
                         std::min(in.memory.free_bytes, in.memory.total_bytes) + in.workspace_bytes;
  return may_be_used > taken ? may_be_used - taken : 0;
}

uint64_t BlocksOf(const KvBudgetInputs& in, std::vector<std::string>* warnings) {
  if (in.num_blocks > 0) return static_cast<uint64_t>(in.num_blocks);
  if (in.kv_cache_bytes > 0) return static_cast<uint64_t>(in.kv_cache_bytes) / in.block_bytes;
  if (in.memory.total_bytes == 0) return std::max<uint64_t>(kHostPoolBytes / in.block_bytes, 1);
  uint64_t bytes = Left(in);
  const uint64_t mirrored_max = in.host_bytes_max / in.block_bytes * in.device_block_bytes;
  if (in.host_bytes_max > 0 && bytes > mirrored_max) {
    warnings->push_back(absl::StrCat("kv cache: cut from bytes=", bytes, " to bytes=", mirrored_max,
                                     " on a device: it has a mirror in half of the host's memory"));
    bytes = mirrored_max;
  }
  return bytes / in.device_block_bytes;
}

}  // namespace

absl::StatusOr<KvBudget> PlanKvPool(const KvBudgetInputs& inputs) {
  if (!(inputs.utilization > 0 && inputs.utilization <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("gpu_memory_utilization=", inputs.utilization, ": must be in (0, 1]"));
  }
  KvBudget budget;
  const uint64_t blocks = std::min(BlocksOf(inputs, &budget.warnings), kBlocksMax);
  if (blocks == 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("kv cache: not one block fits: ", Figures(inputs)));
  }
  budget.num_blocks = static_cast<int>(blocks);
  const bool from_device =
      inputs.num_blocks == 0 && inputs.kv_cache_bytes == 0 && inputs.memory.total_bytes > 0;
  if (from_device && inputs.utilization > kUtilizationWarning) {
    budget.warnings.push_back(absl::StrCat("gpu_memory_utilization=", inputs.utilization,
                                           " is above ", kUtilizationWarning,
                                           ": what others or the driver take later may not fit"));
  }
  const int64_t tokens = static_cast<int64_t>(blocks) * kv::kBlockTokens;
  if (tokens < inputs.max_model_len) {
    budget.warnings.push_back(absl::StrCat("max_model_len=", inputs.max_model_len,
                                           " is more than the KV cache holds, tokens=", tokens,
                                           ": longer requests are refused"));
  } else if (!inputs.max_model_len_chosen && inputs.max_model_len > kLongContext) {
    budget.warnings.push_back(
        absl::StrCat("max_model_len=", inputs.max_model_len,
                     " is the model's own limit: where requests are shorter, --max-model-len keeps "
                     "one of them from taking the cache of many"));
  }
  return budget;
}

ops::DrawLimits DrawLimitsOf(int max_logit_rows) {
  return {max_logit_rows, std::max(kLeastEdits, kEditsPerRow * max_logit_rows)};
}

uint64_t WorkspaceBytes(const model::ModelConfig& config, const ModelRunnerOptions& options) {
  const double gate_up = 2.0 * config.ffn * options.max_step_tokens;
  const double logits = 1.0 * options.max_logit_rows * (config.vocab + config.hidden);
  const ops::DrawLimits draws = DrawLimitsOf(options.max_logit_rows);
  const size_t drawn = draws.rows * (sizeof(ops::SampleRow) + sizeof(ops::SampleResult)) +
                       draws.edits * sizeof(ops::TokenEdit);
  return static_cast<uint64_t>((gate_up + logits) * kF32Bytes) + drawn;
}

uint64_t HalfOfHostMemory() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) / 2;
}

}  // namespace baton::runtime
