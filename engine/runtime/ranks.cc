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
  ranks->ranks_.resize(options.tp);
  BATON_RETURN_IF_ERROR(ranks->OnEach([&](int rank) { return ranks->SetUp(rank); }));
  return ranks;
}

absl::Status Ranks::SetUp(int rank) {
  Rank& r = ranks_[rank];
  BATON_ASSIGN_OR_RETURN(r.shard,
                         model::ShardPlan::Make(config_, options_.weight_dtype, options_.tp, rank));
  absl::StatusOr<std::unique_ptr<ops::Backend>> backend =
      ops::CreateBackend(options_.backend, options_.weight_dtype, OptionsOfRank(rank));
  if (options_.tp == 1) {
    BATON_ASSIGN_OR_RETURN(r.backend, std::move(backend));
    return absl::OkStatus();
  }
  if (!backend.ok())
    return Annotate(backend.status(), absl::StrCat("rank ", rank, " of tp=", options_.tp));
  r.backend = *std::move(backend);
  return r.backend->JoinGroup(&group_.end(rank));
}

Ranks::~Ranks() {
  // What a rank has on a device is given back by its thread, when no other computes with it.
  OnEach([&](int rank) {
    return ranks_[rank].backend != nullptr ? ranks_[rank].backend->Synchronize() : absl::OkStatus();
  }).IgnoreError();
  threads_.Run([&](int rank) {
    ranks_[rank].model.reset();
    ranks_[rank].backend.reset();
  });
}

absl::StatusOr<ops::DeviceMemory> Ranks::device_memory() const {
  ops::DeviceMemory least;
  for (const Rank& rank : ranks_) {
    BATON_ASSIGN_OR_RETURN(const ops::DeviceMemory memory, rank.backend->device_memory());
    if (&rank == &ranks_[0] || memory.free_bytes < least.free_bytes) least = memory;
  }
  return least;
}

absl::Status Ranks::OnEach(absl::FunctionRef<absl::Status(int rank)> job) {
  threads_.Run([&](int rank) {
    ranks_[rank].status = job(rank);
    if (!ranks_[rank].status.ok()) group_.Abort(ranks_[rank].status);
  });
  absl::Status first;
  for (const Rank& rank : ranks_) first.Update(rank.status);
  if (!first.ok()) group_.Reset();
  return first;
}

ops::BackendOptions Ranks::OptionsOfRank(int rank) const {
  ops::BackendOptions options = options_.backend_options;
  options.device = rank;
  if (options_.tp == 1) return options;
  const int threads = options.num_threads > 0 ? options.num_threads : ops::cpu::NumUsableCpus();
  options.num_threads = std::max(1, threads / options_.tp);
  options.pin_threads = false;  // the ranks' threads would meet on the same cores
  return options;
}

absl::Status Ranks::Load(const model::Checkpoint& checkpoint) {
  std::vector<model::Weights> weights(ranks_.size());
  BATON_RETURN_IF_ERROR(OnEach([&](int rank) -> absl::Status {
    BATON_ASSIGN_OR_RETURN(weights[rank],
                           model::LoadWeights(checkpoint, ranks_[rank].shard, options_.weight_dtype,
                                              *ranks_[rank].backend));
    return absl::OkStatus();
  }));
  const std::shared_ptr<const ops::Matrix> embed = weights[0].embed, head = weights[0].head;
  return OnEach([&](int rank) -> absl::Status {
    Rank& r = ranks_[rank];
    model::Weights& ours = weights[rank];
    r.weight_bytes = ours.embed != nullptr ? ours.bytes() : ours.layer_bytes();
    if (ours.embed == nullptr) {
      ours.embed = embed;
      ours.head = head;
    }
    BATON_ASSIGN_OR_RETURN(
        r.model, model::Qwen3::Create(r.shard.ConfigOf(config_), std::move(ours),
                                      options_.positions, options_.max_step_tokens, *r.backend));
    return absl::OkStatus();
  });
}

void Ranks::SetPool(const kv::KvLayout& layout,
                    absl::FunctionRef<uint8_t*(int rank)> part,
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
          {&rank_layout_, part(rank) + rank_layout_.BlockOffset(layer, 0), r.scales[layer]});
    }
  }
}

absl::Status Ranks::Forward(const model::ForwardInputs& inputs,
                            const OnAppended* on_appended,
                            absl::FunctionRef<void(int layer)> on_layer,
                            float* logits,
                            model::ForwardTimings* timings) {
  return OnEach([&](int rank) -> absl::Status {
    Rank& r = ranks_[rank];
    model::ForwardInputs ours = inputs;
    ours.layers = r.caches;
    model::ForwardTimings own;
    absl::Status appended;
    const auto after_layer = [&](int layer) {
      if (appended.ok() && on_appended != nullptr)
        appended = AfterAppend(*on_appended, rank, layer);
      if (appended.ok() && rank == 0) on_layer(layer);
    };
    BATON_RETURN_IF_ERROR(r.model->Forward(ours, after_layer, logits, rank == 0 ? timings : &own));
    return appended;
  });
}

absl::Status Ranks::AfterAppend(const OnAppended& on_appended, int rank, int layer) {
  const absl::Status status = on_appended(rank, layer);
  if (!status.ok()) {
    group_.Abort(status);
    return status;
  }
  return options_.tp == 1 ? absl::OkStatus() : group_.end(rank).Barrier();
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
