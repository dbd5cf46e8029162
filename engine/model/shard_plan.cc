#include "engine/model/shard_plan.h"

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "engine/ops/validate.h"

namespace baton::model {
namespace {

// Rank 0 has [0, cut), rank 1 the rest.
ShardRange Half(int rank, int cut, int count) {
  return rank == 0 ? ShardRange{0, cut} : ShardRange{cut, count};
}

ShardRange Times(const ShardRange& range, int factor) {
  return {range.begin * factor, range.end * factor};
}

absl::Status Refuse(int tp, absl::string_view reason) {
  return absl::InvalidArgumentError(absl::StrCat("tp=", tp, ": ", reason));
}

absl::Status CheckTwo(const ModelConfig& config, ops::WeightDtype dtype, int tp) {
  if (config.num_kv_heads % tp != 0) {
    return Refuse(tp, absl::StrCat("num_kv_heads=", config.num_kv_heads, " is not divisible"));
  }
  const int width = config.num_heads * config.head_dim;
  if (ops::SplitK(width, dtype) != width / tp) {
    return Refuse(tp, absl::StrCat("num_heads=", config.num_heads, " head_dim=", config.head_dim,
                                   ": half of the heads are ", width / tp, " columns, and ",
                                   ops::WeightDtypeName(dtype), " sums are cut at ",
                                   ops::SplitK(width, dtype)));
  }
  if (ops::SplitK(config.ffn, dtype) >= config.ffn) {
    return Refuse(tp, absl::StrCat("intermediate_size=", config.ffn, " is too small to be cut"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ShardPlan> ShardPlan::Make(const ModelConfig& config,
                                          ops::WeightDtype dtype,
                                          int tp,
                                          int rank) {
  if (tp < 1 || tp > kMaxTp) return Refuse(tp, absl::StrCat("want 1 or ", kMaxTp));
  ShardPlan plan;
  plan.rank = rank;
  plan.tp = tp;
  plan.head_dim = config.head_dim;
  if (tp == 1) {
    plan.heads = {0, config.num_heads};
    plan.kv_heads = {0, config.num_kv_heads};
    plan.ffn = {0, config.ffn};
    return plan;
  }
  BATON_RETURN_IF_ERROR(CheckTwo(config, dtype, tp));
  plan.heads = Half(rank, config.num_heads / tp, config.num_heads);
  plan.kv_heads = Half(rank, config.num_kv_heads / tp, config.num_kv_heads);
  plan.ffn = Half(rank, ops::SplitK(config.ffn, dtype), config.ffn);
  return plan;
}

ModelConfig ShardPlan::ConfigOf(ModelConfig config) const {
  config.num_heads = static_cast<int>(heads.size());
  config.num_kv_heads = static_cast<int>(kv_heads.size());
  config.ffn = static_cast<int>(ffn.size());
  return config;
}

ShardRange ShardPlan::RowsOf(TensorRole role, int64_t rows) const {
  switch (role) {
    case TensorRole::kQ:
    case TensorRole::kQBias:
      return Times(heads, head_dim);
    case TensorRole::kK:
    case TensorRole::kKBias:
    case TensorRole::kV:
    case TensorRole::kVBias:
      return Times(kv_heads, head_dim);
    case TensorRole::kGate:
    case TensorRole::kUp:
      return ffn;
    default:
      return {0, rows};
  }
}

ShardRange ShardPlan::ColsOf(TensorRole role, int64_t cols) const {
  if (role == TensorRole::kO) return Times(heads, head_dim);
  if (role == TensorRole::kDown) return ffn;
  return {0, cols};
}

absl::Status CheckTp(const ModelConfig& config, absl::string_view weight_dtype, int tp) {
  BATON_ASSIGN_OR_RETURN(const ops::WeightDtype dtype, ops::ParseWeightDtype(weight_dtype));
  return ShardPlan::Make(config, dtype, tp, 0).status();
}

}  // namespace baton::model
