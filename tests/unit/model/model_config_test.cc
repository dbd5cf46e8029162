#include "engine/model/model_config.h"

#include <cmath>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "engine/base/gguf.h"
#include "engine/base/json.h"
#include "tests/support/model_files.h"

namespace baton::model {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::GgufBytes;
using testing_support::RawFloats;

// A config that is accepted, with `extra` members behind; a later member wins.
std::string Config(absl::string_view extra = "", absl::string_view arch = "Qwen3ForCausalLM") {
  return absl::StrCat(
      R"({"architectures":[")", arch, R"("],"hidden_size":64,"num_hidden_layers":2,)",
      R"("num_attention_heads":4,"num_key_value_heads":2,"head_dim":64,"intermediate_size":96,)",
      R"("vocab_size":256,"rms_norm_eps":1e-6,"rope_theta":10000.0,)",
      R"("max_position_embeddings":32768)", extra.empty() ? "" : ",", extra, "}");
}

absl::StatusOr<ModelConfig> Parse(absl::string_view extra = "",
                                  absl::string_view arch = "Qwen3ForCausalLM") {
  return ParseHfConfig("config.json", Config(extra, arch), "");
}

// The message of the refusal; "accepted" when there is none.
std::string Refusal(absl::string_view extra, absl::string_view arch = "Qwen3ForCausalLM") {
  const absl::StatusOr<ModelConfig> config = Parse(extra, arch);
  if (config.ok()) return "accepted";
  EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(config.status().message()), HasSubstr("config.json"));
  return std::string(config.status().message());
}

TEST(ModelConfigTest, ReadsEveryField) {
  auto config = ParseHfConfig(
      "config.json",
      Config(R"("tie_word_embeddings":true,"eos_token_id":7,"bos_token_id":3,"hidden_act":"silu")"),
      R"({"eos_token_id":[9,7],"do_sample":true,"temperature":0.6,"top_k":20,"top_p":0.95,"min_p":0.01,)"
      R"("repetition_penalty":1.1})");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->arch, Arch::kQwen3);
  EXPECT_EQ(config->num_layers, 2);
  EXPECT_EQ(config->hidden, 64);
  EXPECT_EQ(config->num_heads, 4);
  EXPECT_EQ(config->num_kv_heads, 2);
  EXPECT_EQ(config->head_dim, 64);
  EXPECT_EQ(config->ffn, 96);
  EXPECT_EQ(config->vocab, 256);
  EXPECT_EQ(config->rms_eps, 1e-6);
  EXPECT_EQ(config->rope_theta, 10000);
  EXPECT_EQ(config->max_position, 32768);
  EXPECT_TRUE(config->tied_head);
  EXPECT_THAT(config->eos_ids, ElementsAre(7, 9));
  EXPECT_EQ(config->bos_id, 3u);
  EXPECT_EQ(config->defaults.temperature, 0.6);
  EXPECT_EQ(config->defaults.top_k, 20);
  EXPECT_EQ(config->defaults.top_p, 0.95);
  EXPECT_EQ(config->defaults.min_p, 0.01);
  EXPECT_EQ(config->defaults.repetition_penalty, 1.1);
}

TEST(ModelConfigTest, ArchitecturesDifferInNormAndBias) {
  auto qwen3 = Parse();
  auto qwen2 = Parse("", "Qwen2ForCausalLM");
  auto llama = Parse("", "LlamaForCausalLM");
  ASSERT_TRUE(qwen3.ok() && qwen2.ok() && llama.ok());
  EXPECT_TRUE(qwen3->qk_norm && !qwen3->attention_bias);
  EXPECT_TRUE(!qwen2->qk_norm && qwen2->attention_bias);
  EXPECT_TRUE(!llama->qk_norm && !llama->attention_bias);
}

TEST(ModelConfigTest, HeadDimIsDerivedOnlyWhereAbsent) {
  EXPECT_EQ(Parse(R"("head_dim":128)")->head_dim, 128);
  EXPECT_EQ(Parse(R"("head_dim":null)", "LlamaForCausalLM")->head_dim, 16);
  EXPECT_EQ(Parse(R"("head_dim":null)", "Qwen2ForCausalLM")->head_dim, 16);
  EXPECT_EQ(Parse(R"("head_dim":null)")->head_dim, 128);  // transformers' default for Qwen3
  EXPECT_EQ(Parse(R"("num_key_value_heads":null)")->num_kv_heads, 4);
}

TEST(ModelConfigTest, GenerationConfigMayAskForGreedy) {
  auto config = ParseHfConfig("config.json", Config(), R"({"do_sample":false,"temperature":0.7})");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->defaults.temperature, 0.0);
  EXPECT_TRUE(config->eos_ids.empty());
  for (const char* bad : {R"({"temperature":-1})", R"({"top_p":0})", R"({"top_p":1.5})",
                          R"({"min_p":2})", R"({"repetition_penalty":0})", R"({"top_k":"all"})",
                          R"({"eos_token_id":256})", R"({"eos_token_id":["<eos>"]})", "[]", "{"}) {
    EXPECT_FALSE(ParseHfConfig("config.json", Config(), bad).ok()) << bad;
  }
}

TEST(ModelConfigTest, RefusesWhatItCannotComputeByName) {
  EXPECT_THAT(Refusal("", "Qwen3MoeForCausalLM"),
              HasSubstr("Qwen3MoeForCausalLM\" is not supported, accepted: Qwen3"));
  EXPECT_THAT(Refusal("", "MistralForCausalLM"), HasSubstr("accepted: Qwen3ForCausalLM"));
  EXPECT_THAT(Refusal(R"("architectures":null)"), HasSubstr("architectures"));
  EXPECT_THAT(Refusal(R"("architectures":["Qwen3ForCausalLM","X"])"), HasSubstr("architectures"));
  EXPECT_THAT(Refusal(R"("hidden_act":"gelu")"),
              HasSubstr("\"gelu\" is not supported, accepted: silu"));
  EXPECT_THAT(Refusal(R"("num_experts":8)"), HasSubstr("mixtures of experts"));
  EXPECT_THAT(Refusal(R"("quantization_config":{"quant_method":"awq"})"), HasSubstr("\"awq\""));
  EXPECT_THAT(Refusal(R"("attention_bias":true)"), HasSubstr("attention_bias"));
  EXPECT_THAT(Refusal(R"("mlp_bias":true)", "LlamaForCausalLM"), HasSubstr("mlp_bias"));
  EXPECT_THAT(Refusal(R"("partial_rotary_factor":0.5)"), HasSubstr("partial_rotary_factor"));
  EXPECT_THAT(Refusal(R"("rope_interleaved":true)"), HasSubstr("rope_interleaved"));
}

TEST(ModelConfigTest, RefusesASlidingWindowOnlyWhereItIsInUse) {
  EXPECT_EQ(Refusal(R"("sliding_window":4096,"use_sliding_window":false)"), "accepted");
  EXPECT_EQ(Refusal(R"("sliding_window":null,"use_sliding_window":true)"), "accepted");
  EXPECT_EQ(Refusal(R"("sliding_window":4096,"use_sliding_window":true,"max_window_layers":2)"),
            "accepted");
  EXPECT_EQ(Refusal(R"("layer_types":["full_attention","full_attention"])"), "accepted");
  EXPECT_THAT(Refusal(R"("sliding_window":4096,"use_sliding_window":true,"max_window_layers":1)"),
              HasSubstr("sliding windows are not supported"));
  EXPECT_THAT(Refusal(R"("layer_types":["full_attention","sliding_attention"])"),
              HasSubstr("sliding_attention"));
}

TEST(ModelConfigTest, RefusesFieldsThatAreMissingOfAnotherKindOrOutOfRange) {
  for (const char* field : {"hidden_size", "num_hidden_layers", "num_attention_heads",
                            "intermediate_size", "vocab_size", "max_position_embeddings"}) {
    for (const char* value :
         {"null", "0", "-1", "1.5", "\"64\"", "true", "[]", "1e99", "99999999999999999999"}) {
      const std::string refusal = Refusal(absl::StrCat("\"", field, "\":", value));
      EXPECT_THAT(refusal, HasSubstr(absl::StrCat("field=", field))) << value;
    }
  }
  EXPECT_THAT(Refusal(R"("num_key_value_heads":3)"), HasSubstr("does not divide"));
  EXPECT_THAT(Refusal(R"("num_key_value_heads":0)"), HasSubstr("num_key_value_heads"));
  EXPECT_THAT(Refusal(R"("head_dim":63)"), HasSubstr("is odd"));
  EXPECT_THAT(Refusal(R"("rms_norm_eps":0)"), HasSubstr("rms_norm_eps"));
  EXPECT_THAT(Refusal(R"("rope_theta":-1)"), HasSubstr("rope_theta"));
  EXPECT_THAT(Refusal(R"("tie_word_embeddings":1)"), HasSubstr("tie_word_embeddings"));
  EXPECT_THAT(Refusal(R"("eos_token_id":256)"), HasSubstr("outside the vocabulary"));
  EXPECT_FALSE(ParseHfConfig("config.json", "not json", "").ok());
  EXPECT_FALSE(ParseHfConfig("config.json", "[]", "").ok());
}

struct LimitCase {
  const char* extra;
  int limit;
};

// Case 18.1: the limit is the trained context times the factor, once.
TEST(ModelConfigTest, TheContextLimitIsWorkedOutOnce) {
  const LimitCase kCases[] = {
      {"", 32768},
      {R"("rope_scaling":null)", 32768},
      {R"("rope_scaling":{"rope_type":"default"})", 32768},
      {R"("rope_parameters":{"rope_type":"default","rope_theta":1e6})", 32768},
      {R"("rope_scaling":{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":32768})",
       131072},
      {R"("rope_scaling":{"type":"yarn","factor":4.0,"original_max_position_embeddings":32768})",
       131072},
      {R"("rope_scaling":{"type":"yarn","factor":4.0})", 131072},
      {R"("rope_parameters":{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":32768})",
       131072},
      // max_position_embeddings that includes the factor already, and Qwen3's, which includes room
      // for the answer
      {R"("max_position_embeddings":131072,"rope_scaling":{"rope_type":"yarn","factor":4.0,)"
       R"("original_max_position_embeddings":32768})",
       131072},
      {R"("max_position_embeddings":40960,"rope_scaling":{"rope_type":"yarn","factor":4.0,)"
       R"("original_max_position_embeddings":32768})",
       131072},
      {R"("rope_scaling":{"rope_type":"linear","factor":2.5})", 81920},
  };
  for (const LimitCase& c : kCases) {
    auto config = Parse(c.extra);
    ASSERT_TRUE(config.ok()) << c.extra << " " << config.status();
    EXPECT_EQ(config->max_position, c.limit) << c.extra;
    EXPECT_EQ(ResolveMaxModelLen(*config, 0).value(), c.limit);
    EXPECT_EQ(ResolveMaxModelLen(*config, c.limit).value(), c.limit);
    EXPECT_EQ(ResolveMaxModelLen(*config, 1).value(), 1);
    const absl::Status above = ResolveMaxModelLen(*config, c.limit + 1).status();
    EXPECT_EQ(above.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(above.message()),
                HasSubstr(absl::StrCat("max_model_len=", c.limit + 1)));
    EXPECT_THAT(std::string(above.message()), HasSubstr(absl::StrCat("limit=", c.limit)));
    EXPECT_EQ(ResolveMaxModelLen(*config, -1).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

// Case 18.1
TEST(ModelConfigTest, RefusesRopeScalingItDoesNotKnowByName) {
  for (const char* type : {"llama3", "dynamic", "longrope", "su", "mrope", "YARN"}) {
    EXPECT_THAT(
        Refusal(absl::StrCat(R"("rope_scaling":{"rope_type":")", type, R"(","factor":2.0})")),
        HasSubstr(absl::StrCat("\"", type, "\" is not supported, accepted: default linear yarn")));
  }
  EXPECT_THAT(Refusal(R"("rope_scaling":{"factor":2.0})"),
              HasSubstr("rope_type reason=is missing"));
  EXPECT_THAT(Refusal(R"("rope_scaling":{"rope_type":"yarn"})"),
              HasSubstr("factor reason=is missing"));
  EXPECT_THAT(Refusal(R"("rope_scaling":{"rope_type":"yarn","factor":0.5})"),
              HasSubstr("rope_scaling.factor"));
  EXPECT_THAT(Refusal(R"("rope_scaling":{"rope_type":"yarn","factor":1e9})"),
              HasSubstr("rope_scaling.factor"));
  EXPECT_THAT(Refusal(R"("rope_scaling":"yarn")"), HasSubstr("is no object"));
  EXPECT_THAT(Refusal(R"("rope_scaling":{"rope_type":"yarn","factor":2.0},)"
                      R"("rope_parameters":{"rope_type":"default"})"),
              HasSubstr("disagrees with rope_parameters"));
  EXPECT_THAT(Refusal(R"("rope_parameters":{"full_attention":{"rope_type":"default"}})"),
              HasSubstr("one RoPE per layer type"));
}

// Both spellings of each config, against transformers. The power is taken in double and rounded
// here, in f32 there: at most 1 ulp apart, and the rest of the formula adds at most 3 roundings.
TEST(ModelConfigTest, InverseFrequenciesAndAttentionFactorEqualTransformers) {
  auto golden =
      base::ParseJson(testing_support::ReadWhole(BATON_SOURCE_DIR "/tests/golden/rope.json"));
  ASSERT_TRUE(golden.ok()) << golden.status();
  ASSERT_GE(golden->items().size(), 20u);
  for (const base::JsonValue& item : golden->items()) {
    std::string extra;
    for (const base::JsonMember& member : item.Find("config")->members()) {
      absl::StrAppend(&extra, extra.empty() ? "" : ",", "\"", member.key, "\":");
      if (!member.value.is_object()) {
        absl::StrAppend(&extra, member.value.is_null() ? "null" : member.value.text());
        continue;
      }
      std::vector<std::string> inner;
      for (const base::JsonMember& field : member.value.members()) {
        const char* quote = field.value.is_string() ? "\"" : "";
        const std::string text =
            field.value.is_bool() ? (field.value.is_true() ? "true" : "false") : field.value.text();
        inner.push_back(absl::StrCat("\"", field.key, "\":", quote, text, quote));
      }
      absl::StrAppend(&extra, "{", absl::StrJoin(inner, ","), "}");
    }
    auto config = Parse(extra);
    ASSERT_TRUE(config.ok()) << extra << " " << config.status();
    const std::vector<float> inv_freq = RopeInvFreq(*config);
    const auto& expected = item.Find("inv_freq")->items();
    ASSERT_EQ(inv_freq.size(), expected.size());
    for (size_t i = 0; i < inv_freq.size(); ++i) {
      const float want = static_cast<float>(*expected[i].AsDouble());
      EXPECT_NEAR(inv_freq[i], want, 4 * 6e-8 * want) << extra << " dimension " << i;
    }
    EXPECT_FLOAT_EQ(RopeAttentionFactor(*config), *item.Find("attention_factor")->AsDouble())
        << extra;
  }
}

// ---- GGUF

// The metadata of a small model; SmolLM2's keys.
GgufBytes Llama(uint32_t rows = 8) {
  GgufBytes bytes;
  bytes.AddString("general.architecture", "llama")
      .AddString("general.name", "Tiny")
      .AddU32("llama.block_count", 2)
      .AddU32("llama.context_length", 8192)
      .AddU32("llama.embedding_length", 4)
      .AddU32("llama.feed_forward_length", 8)
      .AddU32("llama.attention.head_count", 2)
      .AddU32("llama.attention.head_count_kv", 1)
      .AddF32("llama.rope.freq_base", 100000)
      .AddF32("llama.attention.layer_norm_rms_epsilon", 1e-5f)
      .AddTensor("token_embd.weight", 0, {4, rows}, std::string(16 * rows, '\0'));
  return bytes;
}

absl::StatusOr<ModelConfig> FromGguf(const GgufBytes& bytes) {
  const std::string built = bytes.Build();
  auto file = base::GgufFile::Parse("m.gguf",
                                    {reinterpret_cast<const uint8_t*>(built.data()), built.size()});
  if (!file.ok()) return file.status();
  return GgufConfig(**file);
}

std::string GgufRefusal(const GgufBytes& bytes) {
  const auto config = FromGguf(bytes);
  return config.ok() ? "accepted" : std::string(config.status().message());
}

TEST(GgufConfigTest, ReadsEveryField) {
  auto config =
      FromGguf(Llama()
                   .AddU32("llama.vocab_size", 8)
                   .AddU32("llama.rope.dimension_count", 2)
                   .AddU32("tokenizer.ggml.eos_token_id", 2)
                   .AddU32("tokenizer.ggml.bos_token_id", 1)
                   .AddStrings("tokenizer.ggml.tokens", {"<|endoftext|>", "<|im_start|>",
                                                         "<|im_end|>", "a", "b", "c", "d", "e"})
                   .AddI32s("tokenizer.ggml.token_type", {3, 3, 3, 1, 1, 1, 1, 1})
                   .AddF32("general.sampling.temp", 0.5f));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->arch, Arch::kLlama);
  EXPECT_EQ(config->name, "Tiny");
  EXPECT_EQ(config->num_layers, 2);
  EXPECT_EQ(config->hidden, 4);
  EXPECT_EQ(config->num_heads, 2);
  EXPECT_EQ(config->num_kv_heads, 1);
  EXPECT_EQ(config->head_dim, 2);
  EXPECT_EQ(config->ffn, 8);
  EXPECT_EQ(config->vocab, 8);
  EXPECT_EQ(config->max_position, 8192);
  EXPECT_EQ(config->rope_theta, 100000);
  EXPECT_TRUE(config->tied_head);
  EXPECT_THAT(config->eos_ids, ElementsAre(0, 2));  // <|endoftext|> by its text
  EXPECT_EQ(config->bos_id, 1u);
  EXPECT_EQ(config->defaults.temperature, 0.5);
}

// Case 18.1
TEST(GgufConfigTest, RopeScalingSetsTheLimitOnce) {
  auto yarn = FromGguf(Llama()
                           .AddString("llama.rope.scaling.type", "yarn")
                           .AddF32("llama.rope.scaling.factor", 4)
                           .AddU32("llama.rope.scaling.original_context_length", 2048));
  ASSERT_TRUE(yarn.ok()) << yarn.status();
  EXPECT_EQ(yarn->max_position, 8192);
  EXPECT_NEAR(yarn->rope.attention_factor, 0.1 * std::log(4.0) + 1, 1e-12);
  auto linear = FromGguf(Llama()
                             .AddString("llama.rope.scaling.type", "linear")
                             .AddF32("llama.rope.scaling.factor", 2));
  ASSERT_TRUE(linear.ok()) << linear.status();
  EXPECT_EQ(linear->max_position, 16384);
  EXPECT_EQ(FromGguf(Llama().AddF32("llama.rope.scale_linear", 2))->max_position, 16384);
  EXPECT_EQ(FromGguf(Llama().AddString("llama.rope.scaling.type", "none"))->max_position, 8192);
}

TEST(GgufConfigTest, RefusesWhatItCannotComputeByName) {
  EXPECT_THAT(GgufRefusal(GgufBytes().AddString("general.architecture", "qwen3moe")),
              HasSubstr("\"qwen3moe\" is not supported, accepted: qwen3 qwen2 llama"));
  EXPECT_THAT(GgufRefusal(GgufBytes()), HasSubstr("general.architecture"));
  EXPECT_THAT(GgufRefusal(Llama().AddU32("llama.expert_count", 8)),
              HasSubstr("mixtures of experts"));
  EXPECT_THAT(GgufRefusal(Llama().AddU32("llama.attention.sliding_window", 512)),
              HasSubstr("sliding"));
  EXPECT_THAT(GgufRefusal(Llama().AddU32("llama.rope.dimension_count", 1)),
              HasSubstr("rope.dimension_count"));
  EXPECT_THAT(GgufRefusal(Llama().AddU32("llama.attention.value_length", 4)),
              HasSubstr("value_length"));
  EXPECT_THAT(GgufRefusal(Llama().AddU32("llama.vocab_size", 9)), HasSubstr("vocab_size"));
  EXPECT_THAT(GgufRefusal(Llama().AddTensor("rope_freqs.weight", 0, {1}, RawFloats({1}))),
              HasSubstr("llama3"));
  EXPECT_THAT(GgufRefusal(Llama().AddString("llama.rope.scaling.type", "longrope")),
              HasSubstr("\"longrope\" is not supported, accepted: none linear yarn"));
  EXPECT_THAT(GgufRefusal(Llama().AddString("llama.rope.scaling.type", "yarn")),
              HasSubstr("factor reason=is missing"));
}

TEST(GgufConfigTest, RefusesKeysThatAreMissingOrOfAnotherKind) {
  EXPECT_THAT(GgufRefusal(GgufBytes().AddString("general.architecture", "qwen3")),
              HasSubstr("qwen3.block_count reason=is missing"));
  GgufBytes bytes;
  bytes.AddString("general.architecture", "qwen2").AddString("qwen2.block_count", "two");
  EXPECT_THAT(GgufRefusal(bytes), HasSubstr("qwen2.block_count reason=is no integer"));
}

}  // namespace
}  // namespace baton::model
