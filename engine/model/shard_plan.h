#pragma once

// Which part of a decoder each rank of a tensor-parallel group has.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/model/checkpoint.h"
#include "engine/model/model_config.h"
#include "engine/ops/backend.h"

namespace baton::model {

inline constexpr int kMaxTp = 2;  // the canonical order of sums has two halves

struct ShardRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
};

// Query and KV heads, and F, cut among the ranks. What both ranks compute in full: embedding,
// norms, residual. q, k, v, gate and up are cut by rows, o and down by columns, at the very place
// where the canonical order of sums cuts K, so that rank 0 has the low half and rank 1 the high
// one. The head is not cut in memory (it is the embedding where they are tied): each rank computes
// its share of the logits.
struct ShardPlan {
  int rank = 0;
  int tp = 1;
  int head_dim = 0;
  ShardRange heads;
  ShardRange kv_heads;
  ShardRange ffn;

  // Errors: INVALID_ARGUMENT with the numbers: tp is not 1 or 2; KV heads are not divisible by it;
  // the heads' boundary is not where sums of `dtype` are cut; F is too small to be cut.
  static absl::StatusOr<ShardPlan> Make(const ModelConfig& config,
                                        ops::WeightDtype dtype,
                                        int tp,
                                        int rank);

  // The decoder that the rank computes.
  ModelConfig ConfigOf(ModelConfig config) const;
  // The rank's rows and columns of a tensor that has `rows` or `cols` of them.
  ShardRange RowsOf(TensorRole role, int64_t rows) const;
  ShardRange ColsOf(TensorRole role, int64_t cols) const;
};

// Whether a model can be cut into `tp` ranks that compute in `weight_dtype`. Errors: as
// ShardPlan::Make and ops::ParseWeightDtype.
absl::Status CheckTp(const ModelConfig& config, absl::string_view weight_dtype, int tp);

}  // namespace baton::model
