#pragma once

// A model that is a hash over its KV cache: what comes next depends on every byte of keys, values
// and scales of every token before, and so do the keys and values themselves, as in a real model.
// One wrong, foreign, stale or missing byte changes the ids, at once and for certain.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/runtime/model_runner.h"
#include "engine/runtime/sequence.h"
#include "engine/text/tokenizer.h"

namespace baton::sim {

inline constexpr int kVocab = 26;

// What a simulated worker computes with.
class SimModel : public runtime::ModelRunner {
 public:
  // Called in a step after each layer, before the observer: here the time of computing passes.
  std::function<void()> on_layer;
};

struct ModelShape {
  bool real = false;  // a small transformer with random weights on the CPU backend, not the hash
  kv::KvFormat format = kv::KvFormat::kFp8;
  int max_model_len = 0;
};

std::unique_ptr<SimModel> MakeModel(const ModelShape& shape, int num_blocks);
std::unique_ptr<SimModel> MakeRealModel(const ModelShape& shape, int num_blocks);

class HashModel : public SimModel {
 public:
  HashModel(kv::KvFormat format, int num_blocks, int max_model_len);

  absl::Status Step(absl::Span<const runtime::StepSequence> sequences,
                    runtime::LayerObserver* observer,
                    absl::Span<float>* logits,
                    runtime::StepTimings* timings) override;
  const model::ModelConfig& config() const override { return config_; }
  const model::Checkpoint& checkpoint() const override;
  const kv::KvLayout& layout() const override { return layout_; }
  base::Buffer& kv_pool() override { return pool_; }
  int max_model_len() const override { return max_model_len_; }
  ops::WeightDtype weight_dtype() const override { return ops::WeightDtype::kF32; }
  std::string kv_scales_fingerprint() const override { return ""; }
  std::string device() const override { return "hash"; }
  void CopyBlock(kv::BlockId from, kv::BlockId to) override;

 private:
  void Append(const runtime::StepSequence& part, int layer);
  // Over all bytes of the first `rows` rows of a block in a layer.
  uint64_t BlockHash(uint64_t hash, int layer, kv::BlockId block, int rows) const;
  uint64_t PrefixHash(int layer, absl::Span<const kv::BlockId> table, int length) const;

  model::ModelConfig config_;
  kv::KvLayout layout_;
  const int max_model_len_;
  base::Buffer pool_;
  std::vector<float> logits_;
};

// Token `id` is the letter 'a' + id.
const text::Tokenizer& Letters();

// The ids of choice `choice` of a request that is alone in the world.
std::vector<uint32_t> SoloIds(const runtime::EngineRequest& request,
                              uint32_t choice,
                              const ModelShape& shape);

}  // namespace baton::sim
