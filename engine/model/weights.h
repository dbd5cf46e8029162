#pragma once

// The packed weights of one decoder, or of one rank's share of it, and in which precision they
// compute.

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/model/checkpoint.h"
#include "engine/model/shard_plan.h"
#include "engine/ops/backend.h"

namespace baton::model {

// Shapes are those of the rank's share: its heads and its part of F.
struct LayerWeights {
  std::vector<float> attn_norm;          // [E]
  std::unique_ptr<ops::Matrix> qkv;      // [(Hq + 2*Hkv) * D, E]: rows of q, k, v
  std::vector<float> qkv_bias;           // [(Hq + 2*Hkv) * D], or empty
  std::vector<float> q_norm;             // [D], or empty
  std::vector<float> k_norm;             // [D], or empty
  std::unique_ptr<ops::Matrix> o;        // [E, Hq * D]
  std::vector<float> ffn_norm;           // [E]
  std::unique_ptr<ops::Matrix> gate_up;  // [2F, E]: rows of gate, up, packed with interleave_half
  std::unique_ptr<ops::Matrix> down;     // [E, F]
};

struct Weights {
  const ops::Matrix& head_matrix() const { return head != nullptr ? *head : *embed; }
  size_t layer_bytes() const;  // of the layers' matrices
  size_t bytes() const;        // of all matrices

  // Shared, because ranks in one process read the same embedding and head.
  std::shared_ptr<const ops::Matrix> embed;  // [V, E]
  std::shared_ptr<const ops::Matrix> head;   // [V, E]; null when tied: the embedding is the head
  std::vector<float> final_norm;             // [E]
  std::vector<LayerWeights> layers;          // [L]
};

// What weights compute in. `requested` is auto, f32, bf16, int8, q4 or fp8. auto is the nearest to
// what is stored: bf16 for f32, f16 and bf16; int8 for q8_0 and q6_k; q4 for the 4-bit formats; fp8
// for e4m3. On a device, which has neither int8 nor q4, it is bf16 for those. A file
// of several formats is taken by the one that holds most of its bytes, because one deployment
// computes in one precision.
// Errors: INVALID_ARGUMENT naming the accepted values.
absl::StatusOr<ops::WeightDtype> ResolveWeightDtype(const Checkpoint& checkpoint,
                                                    absl::string_view requested,
                                                    bool on_device = false);

// Reads and packs the rank's share of everything, on all of the backend's threads; rank 0 logs a
// line per tenth where it takes long. Ranks other than 0 are left without embedding and head where
// the backend's matrices are shared: they take those of rank 0. `dtype` is what the weights compute
// in: with kFp8 every matrix of a layer is rounded to e4m3, whatever the backend. Errors: those of
// Backend::Pack, with the tensor's name.
absl::StatusOr<Weights> LoadWeights(const Checkpoint& checkpoint,
                                    const ShardPlan& shard,
                                    ops::WeightDtype dtype,
                                    ops::Backend& backend);

}  // namespace baton::model
