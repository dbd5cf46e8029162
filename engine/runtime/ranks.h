#pragma once

// The ranks that compute a model together: one, or two that share heads and F.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/kv/kv_layout.h"
#include "engine/model/checkpoint.h"
#include "engine/model/qwen3.h"
#include "engine/model/shard_plan.h"
#include "engine/ops/backend.h"
#include "engine/parallel/local_group.h"
#include "engine/parallel/rank_threads.h"

namespace baton::runtime {

struct RanksOptions {
  int tp = 1;
  std::string backend;
  ops::WeightDtype weight_dtype = ops::WeightDtype::kBf16;
  ops::BackendOptions backend_options;  // num_threads: of all ranks together
  int positions = 0;                    // of the RoPE table
  int max_step_tokens = 0;
};

// Owns of each rank the backend, the share of the weights, the workspace and the thread. Rank 0
// runs on the thread that calls. Engine thread only.
class Ranks {
 public:
  // Errors: those of ShardPlan::Make, CreateBackend and Backend::JoinGroup.
  static absl::StatusOr<std::unique_ptr<Ranks>> Create(const model::ModelConfig& config,
                                                       const RanksOptions& options);

  // Reads the weights, all ranks at the same time. Errors: those of LoadWeights.
  absl::Status Load(const model::Checkpoint& checkpoint);
  // Where keys and values are; `scales(layer)` [2][Hkv] of all heads, or empty, stays where it is
  // only during the call.
  void SetPool(const kv::KvLayout& layout,
               uint8_t* pool,
               absl::FunctionRef<absl::Span<const float>(int layer)> scales);

  // Qwen3::Forward on all ranks; inputs.layers is filled in here. `on_layer` runs on the caller's
  // thread once all ranks have appended. A rank that fails takes the others with it.
  absl::Status Forward(const model::ForwardInputs& inputs,
                       absl::FunctionRef<void(int layer)> on_layer,
                       float* logits,
                       model::ForwardTimings* timings);

  // Rank 0's, for copies within the pool.
  ops::Backend& backend() const { return *ranks_[0].backend; }
  // "cpu avx2 threads=1 tp=2".
  std::string description() const;
  size_t weight_bytes() const;
  // Of the ranks' devices, each once; empty on the host.
  std::vector<std::string> device_ids() const;

 private:
  struct Rank {
    model::ShardPlan shard;
    std::unique_ptr<ops::Backend> backend;
    std::unique_ptr<model::Qwen3> model;
    size_t weight_bytes = 0;
    std::vector<std::vector<float>> scales;  // by layer: [2][heads of the rank], or empty
    std::vector<ops::KvCacheView> caches;    // by layer
    absl::Status status;                     // of the last job
  };

  Ranks(const model::ModelConfig& config, const RanksOptions& options)
      : config_(config), options_(options), group_(options.tp), threads_(options.tp) {}
  absl::Status AddRank(int rank);
  ops::BackendOptions OptionsOfRank() const;
  // The first error, by rank.
  absl::Status TakeStatus();

  const model::ModelConfig config_;
  const RanksOptions options_;
  kv::KvLayout rank_layout_;
  parallel::LocalGroup group_;
  std::vector<Rank> ranks_;
  parallel::RankThreads threads_;
};

}  // namespace baton::runtime
