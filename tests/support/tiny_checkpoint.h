#pragma once

// A small Hugging Face checkpoint of a shape and with values that a test chooses.

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/model_files.h"

namespace baton::testing_support {

struct TinyCheckpoint {
  std::string architecture = "Qwen3ForCausalLM";  // Qwen2ForCausalLM, LlamaForCausalLM
  int num_layers = 2;
  int hidden = 32;
  int num_heads = 4;
  int num_kv_heads = 2;
  int head_dim = 16;
  int ffn = 64;
  int vocab = 48;
  int max_position = 256;
  bool tied = true;
  std::string rope_scaling = "null";  // JSON
  uint32_t seed = 1;
  // Values of a tensor, by its name, instead of random ones; a new name is an additional tensor of
  // one dimension.
  std::map<std::string, std::vector<float>> values;

  bool qk_norm() const { return architecture == "Qwen3ForCausalLM"; }
  bool bias() const { return architecture == "Qwen2ForCausalLM"; }

  // Every tensor the architecture has, in a fixed order, with its shape.
  std::vector<std::pair<std::string, std::vector<int64_t>>> Tensors() const {
    std::vector<std::pair<std::string, std::vector<int64_t>>> tensors;
    const int64_t q_rows = int64_t{num_heads} * head_dim;
    const int64_t kv_rows = int64_t{num_kv_heads} * head_dim;
    tensors.push_back({"model.embed_tokens.weight", {vocab, hidden}});
    for (int layer = 0; layer < num_layers; ++layer) {
      const auto add = [&](const char* name, std::vector<int64_t> shape) {
        tensors.push_back({absl::StrCat("model.layers.", layer, ".", name), std::move(shape)});
      };
      add("input_layernorm.weight", {hidden});
      add("self_attn.q_proj.weight", {q_rows, hidden});
      add("self_attn.k_proj.weight", {kv_rows, hidden});
      add("self_attn.v_proj.weight", {kv_rows, hidden});
      if (bias()) {
        add("self_attn.q_proj.bias", {q_rows});
        add("self_attn.k_proj.bias", {kv_rows});
        add("self_attn.v_proj.bias", {kv_rows});
      }
      if (qk_norm()) {
        add("self_attn.q_norm.weight", {head_dim});
        add("self_attn.k_norm.weight", {head_dim});
      }
      add("self_attn.o_proj.weight", {hidden, q_rows});
      add("post_attention_layernorm.weight", {hidden});
      add("mlp.gate_proj.weight", {ffn, hidden});
      add("mlp.up_proj.weight", {ffn, hidden});
      add("mlp.down_proj.weight", {hidden, ffn});
    }
    tensors.push_back({"model.norm.weight", {hidden}});
    if (!tied) tensors.push_back({"lm_head.weight", {vocab, hidden}});
    return tensors;
  }

  std::string ConfigJson() const {
    return absl::StrCat(
        "{\"architectures\":[\"", architecture, "\"],\"model_type\":\"",
        qk_norm() ? "qwen3"
        : bias()  ? "qwen2"
                  : "llama",
        "\",\"hidden_act\":\"silu\",\"hidden_size\":", hidden,
        ",\"num_hidden_layers\":", num_layers, ",\"num_attention_heads\":", num_heads,
        ",\"num_key_value_heads\":", num_kv_heads, ",\"head_dim\":", head_dim,
        ",\"intermediate_size\":", ffn, ",\"vocab_size\":", vocab,
        ",\"max_position_embeddings\":", max_position,
        ",\"rms_norm_eps\":1e-6,\"rope_theta\":10000,\"rope_scaling\":", rope_scaling,
        ",\"tie_word_embeddings\":", tied ? "true" : "false", ",\"eos_token_id\":1}");
  }

  // Stored as f32.
  void WriteTo(const TempDir& dir) const {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    SafetensorsBytes file;
    std::map<std::string, std::vector<float>> rest = values;
    for (const auto& [name, shape] : Tensors()) {
      const bool is_norm = name.find("norm.weight") != std::string::npos;
      std::vector<float> data(shape.size() == 1 ? shape[0] : shape[0] * shape[1]);
      for (float& value : data) value = is_norm ? 1 + 0.2f * normal(random) : 0.4f * normal(random);
      if (const auto chosen = rest.find(name); chosen != rest.end()) {
        data = chosen->second;
        rest.erase(chosen);
      }
      file.Add(name, "F32", shape, RawFloats(data));
    }
    for (const auto& [name, data] : rest)
      file.Add(name, "F32", {static_cast<int64_t>(data.size())}, RawFloats(data));
    dir.Write("model.safetensors", file.Build());
    dir.Write("config.json", ConfigJson());
  }
};

}  // namespace baton::testing_support
