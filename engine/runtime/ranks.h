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

  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  // Reads the weights, all ranks at the same time. Errors: those of LoadWeights.
  absl::Status Load(const model::Checkpoint& checkpoint);
  // Where keys and values are: part(rank), laid out as layout.OfRank(). `scales(layer)` [2][Hkv] of
  // all heads, or empty, stays where it is only during the call.
  void SetPool(const kv::KvLayout& layout,
               absl::FunctionRef<uint8_t*(int rank)> part,
               absl::FunctionRef<absl::Span<const float>(int layer)> scales);

  // Qwen3::Forward on all ranks; inputs.layers is filled in here. `on_appended` (or null) runs on
  // each rank's thread when all have appended, `on_layer` on the caller's when that is over. A rank
  // that fails takes the others with it.
  using OnAppended = absl::FunctionRef<absl::Status(int rank, int layer)>;
  absl::Status Forward(const model::ForwardInputs& inputs,
                       const OnAppended* on_appended,
                       absl::FunctionRef<void(int layer)> on_layer,
                       float* logits,
                       model::ForwardTimings* timings);

  // For copies in a rank's part of the pool, while no rank computes.
  ops::Backend& backend(int rank) const { return *ranks_[rank].backend; }
  // Rank 0's.
  ops::Backend& backend() const { return *ranks_[0].backend; }
  // "cpu avx2 threads=1 tp=2".
  std::string description() const;
  size_t weight_bytes() const;
  // Of the rank's device that has the least left; total 0 on the host.
  absl::StatusOr<ops::DeviceMemory> device_memory() const;
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
  absl::Status SetUp(int rank);
  ops::BackendOptions OptionsOfRank(int rank) const;
  absl::Status AfterAppend(const OnAppended& on_appended, int rank, int layer);
  // job(rank) on each rank's thread. The first error, by rank.
  absl::Status OnEach(absl::FunctionRef<absl::Status(int rank)> job);

  const model::ModelConfig config_;
  const RanksOptions options_;
  kv::KvLayout rank_layout_;
  parallel::LocalGroup group_;
  std::vector<Rank> ranks_;
  parallel::RankThreads threads_;
};

}  // namespace baton::runtime
