#pragma once

// One decoder layer with random weights, driven through the operation interface of any backend.
// Everything a backend writes is recorded under a name, so that two backends (or two ways to cut
// the work) can be compared bit for bit.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/buffer.h"
#include "engine/kv/kv_layout.h"
#include "engine/ops/backend.h"

namespace baton::tests {

struct LayerShape {
  int hidden = 64, ffn = 96, vocab = 40;
  int num_heads = 4, num_kv_heads = 2, head_dim = 32;
  bool qk_norm = true, bias = false;
  ops::WeightDtype weights = ops::WeightDtype::kBf16;
  kv::KvFormat format = kv::KvFormat::kFp8;
  int num_blocks = 16, max_tokens = 160, num_positions = 600;
  uint64_t seed = 1;
  std::string Describe() const;
};

// The tokens of one step: each sequence continues with `tokens` at `start`.
struct LayerSequence {
  std::vector<int32_t> tokens;
  int start = 0;
  std::vector<kv::BlockId> block_table;
  bool store = true;  // false: slot -1
};

using Record = std::vector<std::pair<std::string, std::vector<float>>>;

// "" when equal bit for bit (NaN equals NaN), else where the first difference is.
std::string FirstDifference(const Record& a, const Record& b);

class LayerPipeline {
 public:
  // Aborts the test program on a failure: the shapes are ours.
  LayerPipeline(ops::Backend* backend, const LayerShape& shape);

  // All operations of the layer, then logits of every row.
  absl::Status Step(const std::vector<LayerSequence>& sequences, Record* record);
  // The KV pool's bytes, and a way to spoil them.
  base::Buffer& pool() { return pool_; }
  const kv::KvLayout& layout() const { return layout_; }

 private:
  std::unique_ptr<ops::Matrix> Weights(int rows, int cols, uint64_t salt, bool interleave_half);
  std::unique_ptr<ops::Activation> Room(ops::ActivationKind kind, int width);
  absl::Status Keep(const char* name,
                    const ops::Activation& activation,
                    int num_tokens,
                    int width,
                    Record* record);

  ops::Backend* backend_;
  LayerShape shape_;
  kv::KvLayout layout_;
  base::Buffer pool_;
  std::vector<float> norm1_, norm2_, q_weight_, k_weight_, bias_, rope_, scales_;
  std::unique_ptr<ops::Matrix> table_, qkv_, o_, gate_up_, down_;
  std::unique_ptr<ops::Activation> residual_, normed_, projected_, attended_, inner_;
};

// Uniform in [-1, 1), a pure function of its arguments.
float Noise(uint64_t seed, uint64_t salt, uint64_t index);

}  // namespace baton::tests
