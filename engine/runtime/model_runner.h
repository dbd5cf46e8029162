#pragma once

// Weights, KV memory and workspace of one worker, and the one way to advance: Step().

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "engine/base/buffer.h"
#include "engine/kv/kv_layout.h"
#include "engine/model/checkpoint.h"
#include "engine/ops/backend.h"

namespace baton::runtime {

class ModelRunner;

struct ModelRunnerOptions {
  std::string model_path;
  bool verify_weights = false;  // the fingerprint covers every byte of the model
  // Weights are made up, in the shape of model_path/config.json: for measurements.
  bool dummy_weights = false;
  std::string backend = "cpu";        // ref, cpu, cuda
  std::string weight_dtype = "auto";  // auto, f32, bf16, int8, q4, fp8
  std::string kv_dtype = "auto";      // auto, fp8, fp8_dynamic, bf16, f32
  int tp = 1;                 // ranks that compute together, each a share of the heads: 1 or 2
  int max_model_len = 0;      // 0: the model's
  int max_step_tokens = 512;  // most tokens in one step: sizes the workspace
  int max_logit_rows = 64;    // most rows whose logits one step returns
  // Blocks of the KV pool: given, or as many as `kv_cache_bytes` holds. 0: 1 GiB on the host; on a
  // device what is free there once the weights are loaded, up to this share of its memory.
  int num_blocks = 0;
  int64_t kv_cache_bytes = 0;
  double memory_utilization = 0.9;
  // The pool can be read and written by another process: it lies in a memfd, or, on a device, in
  // memory that others can map.
  bool shared_kv = false;
  // With shared_kv and a pool on a device: a mirror on the host is kept, for transports that know
  // host memory only.
  bool kv_mirror = true;
  // Works in the pool of this runner, which outlives it and has loaded the same model, perhaps in
  // another precision; KV format, ranks and sizes of the pool are its. What each of the two appends
  // the other reads, so both are used by one thread.
  ModelRunner* kv_owner = nullptr;
  ops::BackendOptions backend_options;  // num_threads: of all ranks together
};

// One sequence's part of a step: `tokens` continue a sequence that has `start` tokens in the cache.
struct StepSequence {
  absl::Span<const uint32_t> tokens;
  int start = 0;
  absl::Span<const kv::BlockId> block_table;  // covers start + tokens.size()
  // Rows of `tokens` whose logits are wanted, ascending: {tokens.size() - 1} for plain decode and
  // for a prompt's last chunk.
  absl::Span<const int> logit_rows;
  // Of each token the draw of `chain` that gave it, or -1 where `tokens` has it. Empty: none was.
  // One chain a step.
  absl::Span<const int32_t> drawn;
  const ops::DrawChain* chain = nullptr;
};

// Called on the engine thread while a step runs. What it does delays the step: hand over, never
// wait.
class LayerObserver {
 public:
  virtual ~LayerObserver() = default;
  // Keys and values of `layer` for all tokens of the step are in the pool, visible to other threads
  // and processes. Where a device does a step in one go, an observer that does not read the pool
  // hears of all layers when the step is over.
  virtual void OnLayerDone(int layer) = 0;
  // Whether it looks at the pool then: if not, a mirror is not kept up to date.
  virtual bool reads_kv_pool() const { return true; }
};

struct StepTimings {
  absl::Duration total;
  absl::Duration append;  // inside QkNormRopeAppend
};

// Engine thread only, but for the const accessors, which are thread-safe.
class ModelRunner {
 public:
  // Errors: INVALID_ARGUMENT (bad file or setting, with file, tensor, reason), RESOURCE_EXHAUSTED
  // (memory).
  static absl::StatusOr<std::unique_ptr<ModelRunner>> Create(const ModelRunnerOptions& options);
  virtual ~ModelRunner() = default;

  // Runs the tokens of all sequences through the model and appends their KV. `logits` is filled
  // with one row of config().vocab f32 per wanted row, in order of sequences and rows; valid until
  // the next Step. Errors: INVALID_ARGUMENT when a limit of the options is exceeded or a block
  // table is too short: nothing is written then.
  virtual absl::Status Step(absl::Span<const StepSequence> sequences,
                            LayerObserver* observer,
                            absl::Span<float>* logits,
                            StepTimings* timings) = 0;

  // What StepAndDraw takes. No rows: it is not there, and tokens are drawn from the logits of Step.
  virtual ops::DrawLimits draw_limits() const { return {}; }
  // Step, but a token is drawn from each row while the logits are on the device: they do not come
  // to the host. Errors: those of Step; INVALID_ARGUMENT when `draws` are not one a row or more
  // than draw_limits.
  virtual absl::Status StepAndDraw(absl::Span<const StepSequence> sequences,
                                   LayerObserver* observer,
                                   const ops::Draws& draws,
                                   StepTimings* timings);

  // As ops::Backend: other work of a step, on the threads that compute.
  virtual int host_threads() const { return 1; }
  virtual void ForEach(int count, absl::FunctionRef<void(int index, int thread)> f) {
    for (int i = 0; i < count; ++i) f(i, 0);
  }

  // Whether steps may have tokens of chains, which are on the same device.
  virtual bool reads_draw_chains() const { return false; }
  // For up to `max_draws` draws (Draws::chain): steps that are not waited for. Null where
  // reads_draw_chains() is false. The runner outlives it. Errors: RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<std::unique_ptr<ops::DrawChain>> NewDrawChain(int max_draws);

  virtual const model::ModelConfig& config() const = 0;
  virtual const model::Checkpoint& checkpoint() const = 0;
  virtual const kv::KvLayout& layout() const = 0;
  // The KV pool: layout().pool_bytes() bytes. Where the backend computes on a device and the pool
  // was asked to be shared, this is a mirror on the host: it holds what steps with an observer have
  // appended, layer by layer as they say so, and what a hand-over writes into it counts once
  // BlocksLanded has been called.
  virtual base::Buffer& kv_pool() = 0;
  // kv_pool(), or null where it is on a device and there is no mirror.
  virtual base::Buffer* host_pool() { return &kv_pool(); }
  // The pool where it lies on a device and others can map it, else null. What another process has
  // written there counts by itself.
  virtual base::Buffer* device_pool() { return nullptr; }
  // What a rank's steps read and write: on the rank's device where the backend computes there, else
  // its part of kv_pool().
  virtual uint8_t* computed_part(int rank) {
    return kv_pool().data() + layout().BlockOffset(0, 0, rank);
  }
  // Another process has written these blocks, all layers, into kv_pool().
  virtual absl::Status BlocksLanded(absl::Span<const kv::BlockId> blocks) {
    return absl::OkStatus();
  }
  virtual int max_model_len() const = 0;
  virtual ops::WeightDtype weight_dtype() const = 0;
  // In which order the backend sums (engine/ops/backend.h).
  virtual uint32_t sum_order_version() const { return ops::kSumOrderVersion; }
  // SHA-256 over all fixed scales ("" for formats without).
  virtual std::string kv_scales_fingerprint() const = 0;
  // [2][Hkv] effective scales of one layer, K then V; empty for formats without.
  virtual absl::Span<const float> kv_scales(int layer) const { return {}; }
  // K and V values, of a sample of the rows appended so far, that are stored as the largest number
  // of e4m3: where scales are fixed, these are saturated or within 4 % of it. Zero in other
  // formats.
  virtual std::array<uint64_t, 2> saturated_samples() const { return {0, 0}; }
  // "cpu avx2 threads=2".
  virtual std::string device() const = 0;
  // Bus addresses of the devices it computes on; empty on the host.
  virtual std::vector<std::string> device_ids() const { return {}; }
  // Copies whole blocks within the pool, all layers: copy-on-write of a shared, partly filled
  // block.
  virtual void CopyBlock(kv::BlockId from, kv::BlockId to) = 0;
  // A block of all layers, layer after layer, to or from host memory of layout().block_bytes() *
  // num_layers.
  virtual void ReadBlock(kv::BlockId block, uint8_t* out);
  virtual void WriteBlock(kv::BlockId block, const uint8_t* in);
};

}  // namespace baton::runtime
