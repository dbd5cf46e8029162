#include "engine/runtime/model_runner.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/model/kv_scales.h"
#include "engine/model/weights.h"
#include "engine/runtime/kv_budget.h"
#include "engine/runtime/ranks.h"
#include "engine/runtime/saturation_sample.h"
#include "engine/runtime/step_inputs.h"

namespace baton::runtime {
namespace {

// f(rank, offset in the pool, bytes) for a block, rank by rank and layer by layer.
template <typename F>
void ForEachPart(const kv::KvLayout& layout, kv::BlockId block, const F& f) {
  for (int rank = 0; rank < layout.tp; ++rank) {
    for (int layer = 0; layer < layout.num_layers; ++layer)
      f(rank, layout.BlockOffset(layer, block, rank), layout.rank_block_bytes());
  }
}

// Everything a step needs, in the order it is made.
class Runner : public ModelRunner {
 public:
  absl::Status Init(const ModelRunnerOptions& options) {
    if (options.dummy_weights) {
      BATON_ASSIGN_OR_RETURN(checkpoint_, model::Checkpoint::OpenDummy(options.model_path));
    } else {
      BATON_ASSIGN_OR_RETURN(checkpoint_,
                             model::Checkpoint::Open(options.model_path, options.verify_weights));
    }
    BATON_RETURN_IF_ERROR(ResolveOptions(options));
    BATON_RETURN_IF_ERROR(LoadModel(options));
    if (kv_owner_ == nullptr) BATON_RETURN_IF_ERROR(SizePool(options));
    BATON_RETURN_IF_ERROR(AllocateMemory(options));
    LogReady(options);
    return absl::OkStatus();
  }

  absl::Status Step(absl::Span<const StepSequence> sequences,
                    LayerObserver* observer,
                    absl::Span<float>* logits,
                    StepTimings* timings) override {
    BATON_RETURN_IF_ERROR(RunStep(sequences, observer, nullptr, timings));
    if (logits != nullptr)
      *logits = absl::MakeSpan(logits_data(), inputs_->logit_rows().size() * config().vocab);
    return absl::OkStatus();
  }

  ops::DrawLimits draw_limits() const override { return draw_limits_; }

  absl::Status StepAndDraw(absl::Span<const StepSequence> sequences,
                           LayerObserver* observer,
                           const ops::Draws& draws,
                           StepTimings* timings) override {
    if (draw_limits_.rows == 0)
      return ModelRunner::StepAndDraw(sequences, observer, draws, timings);
    return RunStep(sequences, observer, &draws, timings);
  }
  int host_threads() const override { return backend().host_threads(); }
  void ForEach(int count, absl::FunctionRef<void(int index, int thread)> f) override {
    backend().ForEach(count, f);
  }
  bool reads_draw_chains() const override { return draw_limits_.rows > 0; }
  absl::StatusOr<std::unique_ptr<ops::DrawChain>> NewDrawChain(int max_draws) override {
    return backend().NewDrawChain(max_draws);
  }

  const model::ModelConfig& config() const override { return checkpoint_->config(); }
  const model::Checkpoint& checkpoint() const override { return *checkpoint_; }
  const kv::KvLayout& layout() const override { return layout_; }
  base::Buffer& kv_pool() override { return kv_owner_ != nullptr ? kv_owner_->kv_pool() : pool_; }
  uint8_t* computed_part(int rank) override {
    if (kv_owner_ != nullptr) return kv_owner_->computed_part(rank);
    return device_pools_.empty() ? ModelRunner::computed_part(rank) : device_pools_[rank].data();
  }
  base::Buffer* host_pool() override {
    if (kv_owner_ != nullptr) return kv_owner_->host_pool();
    return pool_.size() > 0 ? &pool_ : nullptr;
  }
  base::Buffer* device_pool() override {
    if (kv_owner_ != nullptr) return kv_owner_->device_pool();
    return device_pools_.size() == 1 ? &device_pools_[0] : nullptr;
  }
  int max_model_len() const override { return max_model_len_; }
  ops::WeightDtype weight_dtype() const override { return weight_dtype_; }
  uint32_t sum_order_version() const override { return backend().sum_order_version(); }
  std::string kv_scales_fingerprint() const override { return scales_.Fingerprint(); }
  absl::Span<const float> kv_scales(int layer) const override {
    if (kv_owner_ != nullptr) return kv_owner_->kv_scales(layer);
    return scales_.empty() ? absl::Span<const float>() : scales_.layer(layer);
  }
  std::array<uint64_t, 2> saturated_samples() const override { return saturation_.counts(); }
  std::string device() const override { return ranks_->description(); }
  std::vector<std::string> device_ids() const override { return ranks_->device_ids(); }

  void CopyBlock(kv::BlockId from, kv::BlockId to) override {
    BATON_CHECK(
        from >= 0 && from < layout_.num_blocks && to >= 0 && to < layout_.num_blocks && from != to,
        "from=", from, " to=", to, " num_blocks=", layout_.num_blocks);
    const size_t from_distance = static_cast<size_t>(from) * layout_.rank_block_bytes();
    const size_t to_distance = static_cast<size_t>(to) * layout_.rank_block_bytes();
    ForEachPart(layout_, 0, [&](int rank, size_t base, size_t bytes) {
      const size_t target = base + to_distance, source = base + from_distance;
      if (is_mirrored()) std::memcpy(pool_.data() + target, pool_.data() + source, bytes);
      ReportCopy(
          ranks_->backend(rank).CopyInPool(Computed(rank, target), Computed(rank, source), bytes));
    });
  }

  void ReadBlock(kv::BlockId block, uint8_t* out) override {
    if (backend().pools_on_host()) return ModelRunner::ReadBlock(block, out);
    BATON_CHECK(block >= 0 && block < layout_.num_blocks);
    ForEachPart(layout_, block, [&](int rank, size_t offset, size_t bytes) {
      ReportCopy(ranks_->backend(rank).CopyFromPool(out, Computed(rank, offset), bytes));
      out += bytes;
    });
  }

  void WriteBlock(kv::BlockId block, const uint8_t* in) override {
    if (backend().pools_on_host()) return ModelRunner::WriteBlock(block, in);
    BATON_CHECK(block >= 0 && block < layout_.num_blocks);
    ForEachPart(layout_, block, [&](int rank, size_t offset, size_t bytes) {
      ReportCopy(ranks_->backend(rank).CopyToPool(Computed(rank, offset), in, bytes));
      in += bytes;
    });
  }

  absl::Status BlocksLanded(absl::Span<const kv::BlockId> blocks) override {
    if (!is_mirrored()) return absl::OkStatus();
    absl::Status status;
    for (const kv::BlockId block : blocks) {
      ForEachPart(layout_, block, [&](int rank, size_t offset, size_t bytes) {
        status.Update(
            ranks_->backend(rank).CopyToPool(Computed(rank, offset), pool_.data() + offset, bytes));
      });
    }
    return status;
  }

 private:
  // With `draws` tokens are drawn, else logits_ is filled in.
  absl::Status RunStep(absl::Span<const StepSequence> sequences,
                       LayerObserver* observer,
                       const ops::Draws* draws,
                       StepTimings* timings) {
    const absl::Duration start = base::Clock::Real().Now();
    BATON_RETURN_IF_ERROR(inputs_->Fill(sequences));
    model::ForwardInputs forward;
    forward.ids = inputs_->ids();
    forward.positions = inputs_->positions();
    forward.slots = inputs_->slots();
    forward.sequences = inputs_->sequences();
    forward.logit_rows = inputs_->logit_rows();
    forward.in_one_go = observer == nullptr || !observer->reads_kv_pool();
    forward.draws = draws;
    forward.drawn = inputs_->drawn();
    forward.source = inputs_->chain();
    const auto on_layer = [&](int layer) {
      if (observer != nullptr) observer->OnLayerDone(layer);
    };
    const auto make_visible = [&](int rank, int layer) { return MakeVisible(rank, layer); };
    const Ranks::OnAppended on_appended = make_visible;
    const bool is_read = !device_pools_.empty() && observer != nullptr && observer->reads_kv_pool();
    model::ForwardTimings forward_timings;
    BATON_RETURN_IF_ERROR(ranks_->Forward(forward, is_read ? &on_appended : nullptr, on_layer,
                                          draws == nullptr ? logits_data() : nullptr,
                                          &forward_timings));
    SampleSaturation(sequences);
    if (timings != nullptr) *timings = {base::Clock::Real().Now() - start, forward_timings.append};
    return absl::OkStatus();
  }

  absl::Status ResolveOptions(const ModelRunnerOptions& options) {
    if (options.max_step_tokens < 1 || options.max_logit_rows < 1) {
      return absl::InvalidArgumentError(absl::StrCat("max_step_tokens=", options.max_step_tokens,
                                                     " max_logit_rows=", options.max_logit_rows,
                                                     ": must be at least 1"));
    }
    BATON_ASSIGN_OR_RETURN(max_model_len_,
                           model::ResolveMaxModelLen(config(), options.max_model_len));
    if (options.kv_owner != nullptr) return ShareKv(options);
    BATON_ASSIGN_OR_RETURN(layout_.format, model::ResolveKvFormat(config(), options.kv_dtype));
    layout_.num_layers = config().num_layers;
    layout_.num_kv_heads = config().num_kv_heads;
    layout_.head_dim = config().head_dim;
    layout_.tp = options.tp;
    if (options.num_blocks < 0 || (options.num_blocks == 0 && options.kv_cache_bytes != 0 &&
                                   options.kv_cache_bytes < static_cast<int64_t>(BlockBytes()))) {
      return absl::InvalidArgumentError(absl::StrCat("kv cache: num_blocks=", options.num_blocks,
                                                     " kv_cache_bytes=", options.kv_cache_bytes,
                                                     " bytes_per_block=", BlockBytes()));
    }
    return absl::OkStatus();
  }

  size_t BlockBytes() const { return layout_.block_bytes() * layout_.num_layers; }

  // The weights are loaded: what a device has left is known.
  absl::Status SizePool(const ModelRunnerOptions& options) {
    BATON_ASSIGN_OR_RETURN(const ops::DeviceMemory memory, ranks_->device_memory());
    KvBudgetInputs inputs;
    inputs.num_blocks = options.num_blocks;
    inputs.kv_cache_bytes = options.kv_cache_bytes;
    inputs.utilization = options.memory_utilization;
    inputs.memory = memory;
    inputs.block_bytes = BlockBytes();
    inputs.device_block_bytes = layout_.rank_block_bytes() * layout_.num_layers;
    inputs.workspace_bytes = WorkspaceBytes(config(), options);
    inputs.host_bytes_max =
        options.shared_kv && !backend().pools_on_host() ? HalfOfHostMemory() : 0;
    inputs.max_model_len = max_model_len_;
    inputs.max_model_len_chosen = options.max_model_len > 0;
    BATON_ASSIGN_OR_RETURN(const KvBudget budget, PlanKvPool(inputs));
    layout_.num_blocks = budget.num_blocks;
    for (const std::string& warning : budget.warnings) BATON_LOG(Warning, warning);
    if (memory.total_bytes > 0) {
      BATON_LOG(Info, "device memory total_bytes=", memory.total_bytes,
                " free_bytes=", memory.free_bytes, " utilization=", options.memory_utilization,
                " workspace_bytes=", inputs.workspace_bytes, " kv_bytes=", layout_.pool_bytes());
    }
    return absl::OkStatus();
  }

  absl::Status ShareKv(const ModelRunnerOptions& options) {
    kv_owner_ = options.kv_owner;
    if (checkpoint_->fingerprint() != kv_owner_->checkpoint().fingerprint()) {
      return absl::InvalidArgumentError(
          absl::StrCat(options.model_path, ": not the model that the KV pool is of"));
    }
    layout_ = kv_owner_->layout();
    return absl::OkStatus();
  }

  absl::Status LoadModel(const ModelRunnerOptions& options) {
    BATON_ASSIGN_OR_RETURN(
        const ops::WeightDtype dtype,
        model::ResolveWeightDtype(*checkpoint_, options.weight_dtype, options.backend == "cuda"));
    weight_dtype_ = dtype;
    RanksOptions ranks;
    ranks.tp = layout_.tp;
    ranks.backend = options.backend;
    ranks.weight_dtype = dtype;
    ranks.backend_options = options.backend_options;
    ranks.positions = max_model_len_;
    ranks.max_step_tokens = options.max_step_tokens;
    BATON_ASSIGN_OR_RETURN(ranks_, Ranks::Create(config(), ranks));
    BATON_LOG(Info, "model load", LogField("path", options.model_path),
              " arch=", model::NameOf(config().arch), " layers=", config().num_layers,
              " stored=", base::NameOf(checkpoint_->main_format()),
              " weight_dtype=", ops::WeightDtypeName(dtype), " requested=", options.weight_dtype,
              LogField("device", device()));
    if (layout_.format == kv::KvFormat::kFp8 && kv_owner_ == nullptr)
      scales_ = model::MakeKvScales(*checkpoint_);
    return ranks_->Load(*checkpoint_);
  }

  absl::Status AllocatePool(const ModelRunnerOptions& options) {
    const size_t pool_bytes = layout_.pool_bytes();
    if (backend().pools_on_host() || (layout_.tp == 1 && !options.shared_kv)) {
      BATON_ASSIGN_OR_RETURN(pool_, backend().NewPool(pool_bytes, options.shared_kv));
      return absl::OkStatus();
    }
    for (int rank = 0; rank < layout_.tp; ++rank) {
      // (Parts on several devices are nothing that others can map as one pool.)
      const bool is_shared = options.shared_kv && layout_.tp == 1;
      BATON_ASSIGN_OR_RETURN(base::Buffer part,
                             ranks_->backend(rank).NewPool(pool_bytes / layout_.tp, is_shared));
      device_pools_.push_back(std::move(part));
    }
    if (options.shared_kv && options.kv_mirror) {
      BATON_ASSIGN_OR_RETURN(pool_, base::Buffer::AllocateShared("baton-kv", pool_bytes));
    }
    return absl::OkStatus();
  }

  absl::Status AllocateMemory(const ModelRunnerOptions& options) {
    if (kv_owner_ == nullptr) BATON_RETURN_IF_ERROR(AllocatePool(options));
    BATON_ASSIGN_OR_RETURN(logits_,
                           base::Buffer::Allocate(static_cast<size_t>(options.max_logit_rows) *
                                                  config().vocab * sizeof(float)));
    ranks_->SetPool(
        layout_, [this](int rank) { return computed_part(rank); },
        [this](int layer) { return kv_scales(layer); });
    BATON_ASSIGN_OR_RETURN(const bool draws,
                           backend().ReserveDraws(DrawLimitsOf(options.max_logit_rows)));
    if (draws) draw_limits_ = DrawLimitsOf(options.max_logit_rows);
    StepLimits limits;
    limits.max_tokens = options.max_step_tokens;
    limits.max_logit_rows = options.max_logit_rows;
    limits.max_model_len = max_model_len_;
    limits.vocab_size = config().vocab;
    limits.num_blocks = layout_.num_blocks;
    inputs_ = std::make_unique<StepInputs>(limits);
    return absl::OkStatus();
  }

  // A pool that is another's is looked at by its owner, one on a device by nobody.
  void SampleSaturation(absl::Span<const StepSequence> sequences) {
    if (layout_.format != kv::KvFormat::kFp8) return;
    if (kv_owner_ != nullptr || !backend().pools_on_host()) return;
    saturation_.Look(layout_, pool_.data(), sequences);
  }

  void LogReady(const ModelRunnerOptions& options) const {
    BATON_LOG(Info, "model ready weight_bytes=", ranks_->weight_bytes(), " tp=", layout_.tp,
              " kv_dtype=", kv::KvFormatName(layout_.format), " requested=", options.kv_dtype,
              " kv_blocks=", layout_.num_blocks,
              " kv_tokens=", int64_t{layout_.num_blocks} * kv::kBlockTokens,
              " kv_bytes=", layout_.pool_bytes(), " max_model_len=", max_model_len_,
              " max_step_tokens=", options.max_step_tokens);
  }

  // Host and device each have a copy of the pool.
  bool is_mirrored() const { return !device_pools_.empty() && pool_.size() > 0; }
  // Where the computing side has what lies at `offset` in the pool, which is in the rank's part.
  uint8_t* Computed(int rank, size_t offset) {
    return computed_part(rank) + (offset - layout_.BlockOffset(0, 0, rank));
  }
  void ReportCopy(const absl::Status& copied) {
    // A device that cannot copy any more fails the next step too.
    if (!copied.ok()) BATON_LOG(Error, "copy block", LogField("error", copied.ToString()));
  }

  // What the running step has appended to a layer is where other threads and processes look for it:
  // on the rank's device, or on the host. On the rank's thread.
  absl::Status MakeVisible(int rank, int layer) {
    // (A mirror's copies wait for the device too.)
    return is_mirrored() ? MirrorAppended(rank, layer) : ranks_->backend(rank).Synchronize();
  }

  // What the running step has appended to a layer, from a rank's device to the host.
  absl::Status MirrorAppended(int rank, int layer) {
    kv::BlockId last = -1;
    for (const int64_t slot : inputs_->slots()) {  // a sequence's slots of one block lie together
      const auto block = static_cast<kv::BlockId>(slot / kv::kBlockTokens);
      if (slot < 0 || block == last) continue;
      last = block;
      const size_t offset = layout_.BlockOffset(layer, block, rank);
      BATON_RETURN_IF_ERROR(ranks_->backend(rank).CopyFromPool(
          pool_.data() + offset, Computed(rank, offset), layout_.rank_block_bytes()));
    }
    return absl::OkStatus();
  }

  ops::Backend& backend() const { return ranks_->backend(); }
  float* logits_data() { return reinterpret_cast<float*>(logits_.data()); }

  std::unique_ptr<model::Checkpoint> checkpoint_;
  int max_model_len_ = 0;
  ops::WeightDtype weight_dtype_ = ops::WeightDtype::kBf16;
  kv::KvLayout layout_;
  model::KvScaleTable scales_;
  ModelRunner* kv_owner_ = nullptr;  // has pool and scales; null: this one has
  std::unique_ptr<Ranks> ranks_;
  base::Buffer pool_;
  // Where the backend computes on devices and the pool is shared or of several ranks: by rank, on
  // its device; pool_ is a mirror or empty.
  std::vector<base::Buffer> device_pools_;
  base::Buffer logits_;
  ops::DrawLimits draw_limits_;
  std::unique_ptr<StepInputs> inputs_;
  SaturationSample saturation_;
};

}  // namespace

absl::Status ModelRunner::StepAndDraw(absl::Span<const StepSequence> sequences,
                                      LayerObserver* observer,
                                      const ops::Draws& draws,
                                      StepTimings* timings) {
  return absl::UnimplementedError("step: this backend draws no tokens");
}

absl::StatusOr<std::unique_ptr<ops::DrawChain>> ModelRunner::NewDrawChain(int max_draws) {
  return std::unique_ptr<ops::DrawChain>();
}

void ModelRunner::ReadBlock(kv::BlockId block, uint8_t* out) {
  BATON_CHECK(block >= 0 && block < layout().num_blocks);
  ForEachPart(layout(), block, [&](int rank, size_t offset, size_t bytes) {
    std::memcpy(out, kv_pool().data() + offset, bytes);
    out += bytes;
  });
}

void ModelRunner::WriteBlock(kv::BlockId block, const uint8_t* in) {
  BATON_CHECK(block >= 0 && block < layout().num_blocks);
  ForEachPart(layout(), block, [&](int rank, size_t offset, size_t bytes) {
    std::memcpy(kv_pool().data() + offset, in, bytes);
    in += bytes;
  });
}

absl::StatusOr<std::unique_ptr<ModelRunner>> ModelRunner::Create(
    const ModelRunnerOptions& options) {
  auto runner = std::make_unique<Runner>();
  BATON_RETURN_IF_ERROR(runner->Init(options));
  return runner;
}

}  // namespace baton::runtime
