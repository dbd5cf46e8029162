#include "engine/runtime/ranks.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "engine/model/weights.h"
#include "engine/ops/cpu/thread_pool.h"

namespace baton::runtime {

absl::StatusOr<std::unique_ptr<Ranks>> Ranks::Create(const model::ModelConfig& config,
                                                     const RanksOptions& options) {
  // Before anything starts.
  BATON_RETURN_IF_ERROR(
      model::ShardPlan::Make(config, options.weight_dtype, options.tp, 0).status());
  std::unique_ptr<Ranks> ranks(new Ranks(config, options));
  for (int rank = 0; rank < options.tp; ++rank) BATON_RETURN_IF_ERROR(ranks->AddRank(rank));
  return ranks;
}

absl::Status Ranks::AddRank(int rank) {
  Rank& added = ranks_.emplace_back();
  BATON_ASSIGN_OR_RETURN(added.shard,
                         model::ShardPlan::Make(config_, options_.weight_dtype, options_.tp, rank));
  BATON_ASSIGN_OR_RETURN(
      added.backend, ops::CreateBackend(options_.backend, options_.weight_dtype, OptionsOfRank()));
  if (options_.tp == 1) return absl::OkStatus();
  return added.backend->JoinGroup(&group_.end(rank));
}

ops::BackendOptions Ranks::OptionsOfRank() const {
  ops::BackendOptions options = options_.backend_options;
  if (options_.tp == 1) return options;
  const int threads = options.num_threads > 0 ? options.num_threads : ops::cpu::NumUsableCpus();
  options.num_threads = std::max(1, threads / options_.tp);
  options.pin_threads = false;  // the ranks' threads would meet on the same cores
  return options;
}

absl::Status Ranks::Load(const model::Checkpoint& checkpoint) {
  std::vector<model::Weights> weights(ranks_.size());
  threads_.Run([&](int rank) {
    absl::StatusOr<model::Weights> loaded = model::LoadWeights(
        checkpoint, ranks_[rank].shard, options_.weight_dtype, *ranks_[rank].backend);
    ranks_[rank].status = loaded.status();
    if (loaded.ok()) weights[rank] = *std::move(loaded);
  });
  BATON_RETURN_IF_ERROR(TakeStatus());
  const std::shared_ptr<const ops::Matrix> embed = weights[0].embed, head = weights[0].head;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank].weight_bytes = rank == 0 ? weights[0].bytes() : weights[rank].layer_bytes();
    weights[rank].embed = embed;
    weights[rank].head = head;
    Rank& r = ranks_[rank];
    BATON_ASSIGN_OR_RETURN(
        r.model, model::Qwen3::Create(r.shard.ConfigOf(config_), std::move(weights[rank]),
                                      options_.positions, options_.max_step_tokens, *r.backend));
  }
  return absl::OkStatus();
}

void Ranks::SetPool(const kv::KvLayout& layout,
                    uint8_t* pool,
                    absl::FunctionRef<absl::Span<const float>(int layer)> scales) {
  rank_layout_ = layout.OfRank();
  for (int rank = 0; rank < layout.tp; ++rank) {
    Rank& r = ranks_[rank];
    r.scales.resize(layout.num_layers);
    for (int layer = 0; layer < layout.num_layers; ++layer) {
      const absl::Span<const float> all = scales(layer);
      for (size_t side = 0; side < all.size(); side += layout.num_kv_heads) {
        const auto ours = all.subspan(side + r.shard.kv_heads.begin, rank_layout_.num_kv_heads);
        r.scales[layer].insert(r.scales[layer].end(), ours.begin(), ours.end());
      }
      r.caches.push_back(
          {&rank_layout_, pool + layout.BlockOffset(layer, 0, rank), r.scales[layer]});
    }
  }
}

absl::Status Ranks::Forward(const model::ForwardInputs& inputs,
                            absl::FunctionRef<void(int layer)> on_layer,
                            float* logits,
                            model::ForwardTimings* timings) {
  const auto silent = [](int layer) {};
  threads_.Run([&](int rank) {
    Rank& r = ranks_[rank];
    model::ForwardInputs ours = inputs;
    ours.layers = r.caches;
    model::ForwardTimings own;
    r.status = rank == 0 ? r.model->Forward(ours, on_layer, logits, timings)
                         : r.model->Forward(ours, silent, logits, &own);
    if (!r.status.ok()) group_.Abort(r.status);
  });
  const absl::Status status = TakeStatus();
  if (!status.ok()) group_.Reset();
  return status;
}

absl::Status Ranks::TakeStatus() {
  for (const Rank& rank : ranks_) BATON_RETURN_IF_ERROR(rank.status);
  return absl::OkStatus();
}

std::string Ranks::description() const {
  const std::string one = backend().description();
  return options_.tp == 1 ? one : absl::StrCat(one, " tp=", options_.tp);
}

std::vector<std::string> Ranks::device_ids() const {
  std::vector<std::string> ids;
  for (const Rank& rank : ranks_) {
    const std::string id = rank.backend->device_id();
    if (!id.empty() && std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  }
  return ids;
}

size_t Ranks::weight_bytes() const {
  size_t total = 0;
  for (const Rank& rank : ranks_) total += rank.weight_bytes;
  return total;
}

}  // namespace baton::runtime
