#include "engine/model/qwen3.h"

#include <cmath>
#include <utility>

#include "engine/base/clock.h"
#include "engine/base/status_macros.h"
#include "engine/model/rope_table.h"

namespace baton::model {

absl::StatusOr<std::unique_ptr<Qwen3>> Qwen3::Create(const ModelConfig& config,
                                                     Weights weights,
                                                     int positions,
                                                     int max_tokens,
                                                     ops::Backend& backend) {
  std::unique_ptr<Qwen3> model(new Qwen3(config, std::move(weights), backend));
  model->rope_ = MakeRopeTable(config, positions);
  BATON_RETURN_IF_ERROR(model->AllocateWorkspace(max_tokens));
  return model;
}

absl::Status Qwen3::AllocateWorkspace(int max_tokens) {
  const int q_width = config_.num_heads * config_.head_dim;
  const int qkv_width = q_width + 2 * config_.num_kv_heads * config_.head_dim;
  const auto make = [&](ops::ActivationKind kind, int width) {
    return backend_.NewActivation(kind, max_tokens, width);
  };
  BATON_ASSIGN_OR_RETURN(residual_, make(ops::ActivationKind::kResidual, config_.hidden));
  BATON_ASSIGN_OR_RETURN(normed_, make(ops::ActivationKind::kLinearInput, config_.hidden));
  BATON_ASSIGN_OR_RETURN(qkv_, make(ops::ActivationKind::kProjected, qkv_width));
  BATON_ASSIGN_OR_RETURN(attention_, make(ops::ActivationKind::kLinearInput, q_width));
  BATON_ASSIGN_OR_RETURN(ffn_, make(ops::ActivationKind::kLinearInput, config_.ffn));
  return absl::OkStatus();
}

absl::Status Qwen3::Forward(const ForwardInputs& inputs,
                            absl::FunctionRef<void(int layer)> on_layer,
                            float* logits,
                            ForwardTimings* timings) {
  ops::PassInputs pass;
  pass.model = this;
  pass.ids = inputs.ids;
  pass.positions = inputs.positions;
  pass.slots = inputs.slots;
  pass.sequences = inputs.sequences;
  pass.logit_rows = inputs.logit_rows;
  pass.in_one_go = inputs.in_one_go;
  pass.draws = inputs.draws;
  pass.drawn = inputs.drawn;
  pass.source = inputs.source;
  bool told = false;  // on_layer has been called
  const auto issue = [&](bool whole) {
    told = !whole;
    return Issue(inputs, whole, on_layer, logits, timings);
  };
  BATON_RETURN_IF_ERROR(backend_.RunPass(pass, issue, logits));
  for (int layer = 0; !told && layer < config_.num_layers; ++layer) on_layer(layer);
  return absl::OkStatus();
}

absl::Status Qwen3::Issue(const ForwardInputs& inputs,
                          bool whole,
                          absl::FunctionRef<void(int layer)> on_layer,
                          float* logits,
                          ForwardTimings* timings) {
  BATON_RETURN_IF_ERROR(backend_.Embed(*weights_.embed, inputs.ids, residual_.get()));
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    BATON_RETURN_IF_ERROR(AppendKv(inputs, layer, whole, timings));
    if (!whole) on_layer(layer);
    if (layer + 1 == config_.num_layers && inputs.logit_rows.empty()) return absl::OkStatus();
    BATON_RETURN_IF_ERROR(AttendAndFeedForward(inputs, layer));
  }
  const float eps = static_cast<float>(config_.rms_eps);
  BATON_RETURN_IF_ERROR(backend_.Logits(*residual_, inputs.logit_rows, weights_.final_norm, eps,
                                        weights_.head_matrix(), logits));
  return whole ? absl::OkStatus() : backend_.Synchronize();
}

absl::Status Qwen3::AppendKv(const ForwardInputs& inputs,
                             int layer,
                             bool whole,
                             ForwardTimings* timings) {
  const LayerWeights& weights = weights_.layers[layer];
  const int num_tokens = static_cast<int>(inputs.ids.size());
  const float eps = static_cast<float>(config_.rms_eps);
  BATON_RETURN_IF_ERROR(
      backend_.RmsNorm(*residual_, num_tokens, weights.attn_norm, eps, normed_.get()));
  BATON_RETURN_IF_ERROR(
      backend_.QkvProject(*normed_, num_tokens, *weights.qkv, weights.qkv_bias, qkv_.get()));

  ops::QkNormRopeAppendArgs args;
  args.qkv = qkv_.get();
  args.num_tokens = num_tokens;
  args.num_heads = config_.num_heads;
  args.num_kv_heads = config_.num_kv_heads;
  args.head_dim = config_.head_dim;
  args.q_weight = weights.q_norm;
  args.k_weight = weights.k_norm;
  args.eps = eps;
  args.positions = inputs.positions;
  args.slots = inputs.slots;
  args.rope = rope_;
  args.cache = inputs.layers[layer];
  const absl::Duration start = base::Clock::Real().Now();
  BATON_RETURN_IF_ERROR(backend_.QkNormRopeAppend(args));
  if (whole) return absl::OkStatus();
  BATON_RETURN_IF_ERROR(backend_.Synchronize());
  timings->append += base::Clock::Real().Now() - start;
  return absl::OkStatus();
}

absl::Status Qwen3::AttendAndFeedForward(const ForwardInputs& inputs, int layer) {
  const LayerWeights& weights = weights_.layers[layer];
  const int num_tokens = static_cast<int>(inputs.ids.size());
  const float eps = static_cast<float>(config_.rms_eps);

  ops::PagedAttentionArgs args;
  args.qkv = qkv_.get();
  args.num_tokens = num_tokens;
  args.num_heads = config_.num_heads;
  args.num_kv_heads = config_.num_kv_heads;
  args.head_dim = config_.head_dim;
  args.softmax_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config_.head_dim)));
  args.sequences = inputs.sequences;
  args.cache = inputs.layers[layer];
  args.out = attention_.get();
  BATON_RETURN_IF_ERROR(backend_.PagedAttention(args));
  BATON_RETURN_IF_ERROR(backend_.ProjectAdd(*attention_, num_tokens, *weights.o, residual_.get()));

  BATON_RETURN_IF_ERROR(
      backend_.RmsNorm(*residual_, num_tokens, weights.ffn_norm, eps, normed_.get()));
  BATON_RETURN_IF_ERROR(backend_.GateUpSilu(*normed_, num_tokens, *weights.gate_up, ffn_.get()));
  return backend_.ProjectAdd(*ffn_, num_tokens, *weights.down, residual_.get());
}

}  // namespace baton::model
