#include "engine/model/tensor_names.h"

#include "absl/strings/str_cat.h"

namespace baton::model {
namespace {

struct RoleNames {
  TensorRole role;
  const char* name;
  const char* hf;    // behind "model.layers.<i>." for roles that are per layer
  const char* gguf;  // behind "blk.<i>."
  bool per_layer;
};

constexpr RoleNames kRoles[kNumTensorRoles] = {
    {TensorRole::kEmbed, "embed", "model.embed_tokens.weight", "token_embd.weight", false},
    {TensorRole::kAttnNorm, "attn_norm", "input_layernorm.weight", "attn_norm.weight", true},
    {TensorRole::kQ, "q", "self_attn.q_proj.weight", "attn_q.weight", true},
    {TensorRole::kK, "k", "self_attn.k_proj.weight", "attn_k.weight", true},
    {TensorRole::kV, "v", "self_attn.v_proj.weight", "attn_v.weight", true},
    {TensorRole::kQBias, "q_bias", "self_attn.q_proj.bias", "attn_q.bias", true},
    {TensorRole::kKBias, "k_bias", "self_attn.k_proj.bias", "attn_k.bias", true},
    {TensorRole::kVBias, "v_bias", "self_attn.v_proj.bias", "attn_v.bias", true},
    {TensorRole::kO, "o", "self_attn.o_proj.weight", "attn_output.weight", true},
    {TensorRole::kQNorm, "q_norm", "self_attn.q_norm.weight", "attn_q_norm.weight", true},
    {TensorRole::kKNorm, "k_norm", "self_attn.k_norm.weight", "attn_k_norm.weight", true},
    {TensorRole::kFfnNorm, "ffn_norm", "post_attention_layernorm.weight", "ffn_norm.weight", true},
    {TensorRole::kGate, "gate", "mlp.gate_proj.weight", "ffn_gate.weight", true},
    {TensorRole::kUp, "up", "mlp.up_proj.weight", "ffn_up.weight", true},
    {TensorRole::kDown, "down", "mlp.down_proj.weight", "ffn_down.weight", true},
    {TensorRole::kFinalNorm, "final_norm", "model.norm.weight", "output_norm.weight", false},
    {TensorRole::kHead, "head", "lm_head.weight", "output.weight", false},
};

const RoleNames& NamesOf(TensorRole role) { return kRoles[static_cast<int>(role)]; }

bool IsExpected(const ModelConfig& config, TensorRole role) {
  switch (role) {
    case TensorRole::kQBias:
    case TensorRole::kKBias:
    case TensorRole::kVBias:
      return config.attention_bias;
    case TensorRole::kQNorm:
    case TensorRole::kKNorm:
      return config.qk_norm;
    case TensorRole::kHead:
      return !config.tied_head;
    default:
      return true;
  }
}

bool IsVector(TensorRole role) {
  switch (role) {
    case TensorRole::kAttnNorm:
    case TensorRole::kQBias:
    case TensorRole::kKBias:
    case TensorRole::kVBias:
    case TensorRole::kQNorm:
    case TensorRole::kKNorm:
    case TensorRole::kFfnNorm:
    case TensorRole::kFinalNorm:
      return true;
    default:
      return false;
  }
}

Shape ExpectedShape(const ModelConfig& config, TensorRole role) {
  const int64_t q_rows = int64_t{config.num_heads} * config.head_dim;
  const int64_t kv_rows = int64_t{config.num_kv_heads} * config.head_dim;
  switch (role) {
    case TensorRole::kEmbed:
    case TensorRole::kHead:
      return {config.vocab, config.hidden};
    case TensorRole::kAttnNorm:
    case TensorRole::kFfnNorm:
    case TensorRole::kFinalNorm:
      return {1, config.hidden};
    case TensorRole::kQ:
      return {q_rows, config.hidden};
    case TensorRole::kK:
    case TensorRole::kV:
      return {kv_rows, config.hidden};
    case TensorRole::kQBias:
      return {1, q_rows};
    case TensorRole::kKBias:
    case TensorRole::kVBias:
      return {1, kv_rows};
    case TensorRole::kO:
      return {config.hidden, q_rows};
    case TensorRole::kQNorm:
    case TensorRole::kKNorm:
      return {1, config.head_dim};
    case TensorRole::kGate:
    case TensorRole::kUp:
      return {config.ffn, config.hidden};
    case TensorRole::kDown:
      return {config.hidden, config.ffn};
  }
  return {};
}

ExpectedTensor Expect(const ModelConfig& config, TensorRole role, int layer) {
  const RoleNames& names = NamesOf(role);
  ExpectedTensor expected = {
      role, layer, names.hf, names.gguf, ExpectedShape(config, role), IsVector(role)};
  if (names.per_layer) {
    expected.hf_name = absl::StrCat("model.layers.", layer, ".", names.hf);
    expected.gguf_name = absl::StrCat("blk.", layer, ".", names.gguf);
  }
  return expected;
}

}  // namespace

absl::string_view NameOf(TensorRole role) { return NamesOf(role).name; }

bool IsPerLayer(TensorRole role) { return NamesOf(role).per_layer; }

std::vector<ExpectedTensor> ExpectedTensors(const ModelConfig& config) {
  std::vector<ExpectedTensor> expected;
  for (const RoleNames& names : kRoles) {
    if (!IsExpected(config, names.role)) continue;
    const int count = names.per_layer ? config.num_layers : 1;
    for (int i = 0; i < count; ++i) {
      expected.push_back(Expect(config, names.role, names.per_layer ? i : -1));
    }
  }
  return expected;
}

}  // namespace baton::model
