#pragma once

// The one forward pass: Qwen3, and with fewer parts Qwen2- and Llama-shaped decoders, over any
// backend.

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "engine/model/model_config.h"
#include "engine/model/weights.h"
#include "engine/ops/backend.h"

namespace baton::model {

// T tokens of B sequences, in the shapes of backend.h. Everything has been checked by the caller.
struct ForwardInputs {
  absl::Span<const int32_t> ids;                  // [T] in [0, vocab)
  absl::Span<const int32_t> positions;            // [T] in [0, positions of the RoPE table)
  absl::Span<const int64_t> slots;                // [T] where keys and values go
  absl::Span<const ops::SequenceView> sequences;  // [B]
  absl::Span<const int32_t> logit_rows;           // [R] tokens whose logits are wanted
  absl::Span<const ops::KvCacheView> layers;      // [L]
  // on_layer may come for all layers when the pass is over.
  bool in_one_go = false;
  // As in ops::PassInputs: with draws no logits are written.
  const ops::Draws* draws = nullptr;
  absl::Span<const int32_t> drawn;  // [T] or empty
  const ops::DrawChain* source = nullptr;
};

struct ForwardTimings {
  absl::Duration append;  // inside QkNormRopeAppend, all layers
};

// Owns weights, RoPE table and workspace; borrows the backend. Engine thread only. A pass allocates
// nothing.
class Qwen3 {
 public:
  // `positions`: length of the RoPE table. `max_tokens`: most tokens in one pass.
  // Errors: those of Backend::NewActivation.
  static absl::StatusOr<std::unique_ptr<Qwen3>> Create(const ModelConfig& config,
                                                       Weights weights,
                                                       int positions,
                                                       int max_tokens,
                                                       ops::Backend& backend);

  // Appends keys and values of all tokens in every layer and writes `logits` [R, V] on the host.
  // `on_layer(layer)` is called when the layer's keys and values are in the cache and visible to
  // other threads and processes, before the layer's attention: a hand-over overlaps with the rest
  // of the layer and the next. (Or see in_one_go.) With no rows wanted, what follows the last
  // layer's append is left out: nothing would read it. Errors: those of the backend.
  absl::Status Forward(const ForwardInputs& inputs,
                       absl::FunctionRef<void(int layer)> on_layer,
                       float* logits,
                       ForwardTimings* timings);

 private:
  Qwen3(const ModelConfig& config, Weights weights, ops::Backend& backend)
      : config_(config), weights_(std::move(weights)), backend_(backend) {}
  absl::Status AllocateWorkspace(int max_tokens);
  // `whole`: nothing is waited for in between, and on_layer is not called.
  absl::Status Issue(const ForwardInputs& inputs,
                     bool whole,
                     absl::FunctionRef<void(int layer)> on_layer,
                     float* logits,
                     ForwardTimings* timings);
  absl::Status AppendKv(const ForwardInputs& inputs,
                        int layer,
                        bool whole,
                        ForwardTimings* timings);
  absl::Status AttendAndFeedForward(const ForwardInputs& inputs, int layer);

  ModelConfig config_;
  Weights weights_;
  ops::Backend& backend_;
  std::vector<float> rope_;
  std::unique_ptr<ops::Activation> residual_;   // [T, E]
  std::unique_ptr<ops::Activation> normed_;     // [T, E]
  std::unique_ptr<ops::Activation> qkv_;        // [T, (Hq + 2 * Hkv) * D]
  std::unique_ptr<ops::Activation> attention_;  // [T, Hq * D]
  std::unique_ptr<ops::Activation> ffn_;        // [T, F]
};

}  // namespace baton::model
