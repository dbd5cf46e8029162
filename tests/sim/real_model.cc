// A small transformer with random weights on the CPU backend, for simulated workers.

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "tests/sim/hash_model.h"
#include "tests/support/tiny_checkpoint.h"

namespace baton::sim {
namespace {

class RealModel : public SimModel {
 public:
  explicit RealModel(std::unique_ptr<runtime::ModelRunner> runner) : runner_(std::move(runner)) {}

  absl::Status Step(absl::Span<const runtime::StepSequence> sequences,
                    runtime::LayerObserver* observer,
                    absl::Span<float>* logits,
                    runtime::StepTimings* timings) override {
    struct Between : runtime::LayerObserver {
      void OnLayerDone(int layer) override {
        if (model->on_layer) model->on_layer();
        if (observer != nullptr) observer->OnLayerDone(layer);
      }
      RealModel* model;
      runtime::LayerObserver* observer;
    };
    Between between;
    between.model = this;
    between.observer = observer;
    return runner_->Step(sequences, &between, logits, timings);
  }
  const model::ModelConfig& config() const override { return runner_->config(); }
  const model::Checkpoint& checkpoint() const override { return runner_->checkpoint(); }
  const kv::KvLayout& layout() const override { return runner_->layout(); }
  base::Buffer& kv_pool() override { return runner_->kv_pool(); }
  int max_model_len() const override { return runner_->max_model_len(); }
  ops::WeightDtype weight_dtype() const override { return runner_->weight_dtype(); }
  std::string kv_scales_fingerprint() const override { return runner_->kv_scales_fingerprint(); }
  std::string device() const override { return runner_->device(); }
  void CopyBlock(kv::BlockId from, kv::BlockId to) override { runner_->CopyBlock(from, to); }

 private:
  const std::unique_ptr<runtime::ModelRunner> runner_;
};

// Written once; removed with the process.
const std::string& CheckpointPath() {
  static const testing_support::TempDir* const dir = [] {
    static testing_support::TempDir made;
    testing_support::TinyCheckpoint checkpoint;
    checkpoint.vocab = kVocab;
    checkpoint.max_position = 1024;
    checkpoint.WriteTo(made);
    return &made;
  }();
  static const std::string* const path = new std::string(dir->path());
  return *path;
}

}  // namespace

std::unique_ptr<SimModel> MakeRealModel(const ModelShape& shape, int num_blocks) {
  runtime::ModelRunnerOptions options;
  options.model_path = CheckpointPath();
  options.kv_dtype = std::string(kv::KvFormatName(shape.format));
  options.max_model_len = shape.max_model_len;
  options.num_blocks = num_blocks;
  options.backend_options.num_threads = 1;
  absl::StatusOr<std::unique_ptr<runtime::ModelRunner>> runner =
      runtime::ModelRunner::Create(options);
  BATON_CHECK(runner.ok(), "model: ", runner.status().ToString());
  return std::make_unique<RealModel>(*std::move(runner));
}

}  // namespace baton::sim
