#pragma once

// A small Hugging Face checkpoint of a shape and with values that a test chooses.

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/ops/quantize.h"
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
  bool fp8 = false;  // the layers' matrices are stored in e4m3, with scales for 128 x 128 weights
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
        fp8 ? ",\"quantization_config\":{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\","
              "\"activation_scheme\":\"dynamic\",\"weight_block_size\":[128,128]}"
            : "",
        ",\"tie_word_embeddings\":", tied ? "true" : "false", ",\"eos_token_id\":1}");
  }

  static void AddFp8(const std::string& name,
                     const std::vector<int64_t>& shape,
                     const std::vector<float>& data,
                     SafetensorsBytes* file) {
    constexpr int64_t kSide = ops::kFp8Block;
    const int64_t down = (shape[0] + kSide - 1) / kSide, across = (shape[1] + kSide - 1) / kSide;
    std::string codes(data.size(), '\0');
    std::vector<float> scales;
    for (int64_t block = 0; block < down * across; ++block) {
      const int64_t first_row = block / across * kSide, first_col = block % across * kSide;
      const int64_t last_row = std::min(first_row + kSide, shape[0]);
      const int width = static_cast<int>(std::min(kSide, shape[1] - first_col));
      uint32_t largest = 0;
      for (int64_t row = first_row; row < last_row; ++row)
        largest =
            std::max(largest, ops::LargestMagnitudeBits(&data[row * shape[1] + first_col], width));
      scales.push_back(ops::Fp8BlockScale(largest));
      for (int64_t row = first_row; row < last_row; ++row) {
        const int64_t at = row * shape[1] + first_col;
        ops::QuantizeFp8(&data[at], width, scales.back(), reinterpret_cast<uint8_t*>(&codes[at]));
      }
    }
    file->Add(name, "F8_E4M3", shape, codes);
    file->Add(name + "_scale_inv", "F32", {down, across}, RawFloats(scales));
  }

  // Stored as f32, or with `fp8`.
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
      if (fp8 && shape.size() == 2 && name.find(".layers.") != std::string::npos) {
        AddFp8(name, shape, data, &file);
      } else {
        file.Add(name, "F32", shape, RawFloats(data));
      }
    }
    for (const auto& [name, data] : rest)
      file.Add(name, "F32", {static_cast<int64_t>(data.size())}, RawFloats(data));
    dir.Write("model.safetensors", file.Build());
    dir.Write("config.json", ConfigJson());
  }
};

}  // namespace baton::testing_support
