#include "engine/model/model_config.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

#include "engine/base/status_macros.h"

namespace baton::model {
namespace {

constexpr double kRopeFactorMax = 1024;
constexpr int kPositionsMax = 1 << 27;

// Names a field that is out of its range. The ranges keep every product of sizes far from overflow.
class RangeCheck {
 public:
  explicit RangeCheck(const std::string& path) : path_(path) {}

  template <typename T>
  void In(absl::string_view field, T value, T min, T max) {
    if (value >= min && value <= max) return;  // NaN is in no range
    Fail(field, absl::StrCat("value=", value, " accepted=", min, "..", max));
  }
  void True(absl::string_view field, bool condition, absl::string_view reason) {
    if (!condition) Fail(field, reason);
  }
  absl::Status status() const { return status_; }

 private:
  void Fail(absl::string_view field, absl::string_view reason) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(
        absl::StrCat("bad model config: file=", path_, " field=", field, " reason=", reason));
  }

  const std::string& path_;
  absl::Status status_;
};

void CheckRope(const ModelConfig& config, RangeCheck* check) {
  const RopeScaling& rope = config.rope;
  check->In("rope_theta", config.rope_theta, 1.0001, 1e12);
  check->In("rope_scaling.factor", rope.factor, 1.0, kRopeFactorMax);
  if (rope.kind != RopeScaling::Kind::kYarn) return;
  check->In("rope_scaling.original_max_position_embeddings", rope.original_max_position, 1,
            kPositionsMax);
  check->In("rope_scaling.attention_factor", rope.attention_factor, 1e-3, 1e3);
  check->In("rope_scaling.beta_fast", rope.beta_fast, 1e-3, 1e6);
  check->In("rope_scaling.beta_slow", rope.beta_slow, 1e-3, 1e6);
  check->True("rope_scaling.beta_fast", rope.beta_fast >= rope.beta_slow, "is below beta_slow");
}

void CheckDefaults(const GenerationDefaults& defaults, RangeCheck* check) {
  if (defaults.temperature) check->In("temperature", *defaults.temperature, 0.0, 100.0);
  if (defaults.top_k) check->In("top_k", *defaults.top_k, 0, 1 << 30);
  if (defaults.top_p) check->In("top_p", *defaults.top_p, 1e-9, 1.0);
  if (defaults.min_p) check->In("min_p", *defaults.min_p, 0.0, 1.0);
  if (defaults.repetition_penalty) {
    check->In("repetition_penalty", *defaults.repetition_penalty, 1e-3, 1e3);
  }
}

// The dimension whose wave turns `rotations` times within the original context.
double CorrectionDim(double rotations, const ModelConfig& config) {
  const double wave = config.rope.original_max_position / (rotations * 2 * std::numbers::pi);
  return config.head_dim * std::log(wave) / (2 * std::log(config.rope_theta));
}

// YaRN: dimensions that turn often keep their frequency, those that turn seldom are stretched by
// the factor, with a ramp between the two (Peng et al. 2023, as in transformers'
// modeling_rope_utils). `wavelengths` [head_dim / 2] are theta ** (2i / D).
std::vector<float> YarnInvFreq(const ModelConfig& config, const std::vector<float>& wavelengths) {
  const RopeScaling& rope = config.rope;
  double low = CorrectionDim(rope.beta_fast, config);
  double high = CorrectionDim(rope.beta_slow, config);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(config.head_dim - 1));
  if (low == high) high += 0.001;
  std::vector<float> inv_freq(wavelengths.size());
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    const float position = static_cast<float>(i) - static_cast<float>(low);
    const float ramp = std::clamp(position / static_cast<float>(high - low), 0.0f, 1.0f);
    const float keep = 1.0f - ramp;
    const float stretched = 1.0f / (static_cast<float>(rope.factor) * wavelengths[i]);
    inv_freq[i] = stretched * (1.0f - keep) + (1.0f / wavelengths[i]) * keep;
  }
  return inv_freq;
}

}  // namespace

absl::string_view NameOf(Arch arch) {
  switch (arch) {
    case Arch::kQwen3:
      return "qwen3";
    case Arch::kQwen2:
      return "qwen2";
    case Arch::kLlama:
      return "llama";
  }
  return "unknown";
}

absl::Status ValidateConfig(const std::string& path, const ModelConfig& config) {
  RangeCheck check(path);
  check.In("num_hidden_layers", config.num_layers, 1, 1024);
  check.In("hidden_size", config.hidden, 1, 1 << 17);
  check.In("num_attention_heads", config.num_heads, 1, 1024);
  check.In("num_key_value_heads", config.num_kv_heads, 1, 1024);
  check.In("head_dim", config.head_dim, 2, 1024);
  check.In("intermediate_size", config.ffn, 1, 1 << 20);
  check.In("vocab_size", config.vocab, 1, 1 << 22);
  check.In("rms_norm_eps", config.rms_eps, 1e-12, 1e-1);
  CheckRope(config, &check);  // before the limit that was worked out from it
  check.In("max_position_embeddings", config.max_position, 1, kPositionsMax);
  check.True("head_dim", config.head_dim % 2 == 0, "is odd");
  check.True("num_key_value_heads",
             config.num_kv_heads > 0 && config.num_heads % config.num_kv_heads == 0,
             "does not divide num_attention_heads");
  for (uint32_t id : config.eos_ids) {
    check.True("eos_token_id", id < static_cast<uint32_t>(config.vocab),
               "is outside the vocabulary");
  }
  CheckDefaults(config.defaults, &check);
  return check.status();
}

absl::StatusOr<int> ResolveMaxModelLen(const ModelConfig& config, int requested) {
  if (requested == 0) return config.max_position;
  if (requested < 0 || requested > config.max_position) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_model_len cannot be served: max_model_len=", requested, " limit=", config.max_position,
        " (from the model's config, RoPE scaling included)"));
  }
  return requested;
}

// Each step is rounded to f32, as in transformers: theta ** (2i / D), its inverse, the scaling.
std::vector<float> RopeInvFreq(const ModelConfig& config) {
  std::vector<float> wavelengths(config.head_dim / 2);
  for (size_t i = 0; i < wavelengths.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(config.head_dim);
    wavelengths[i] = static_cast<float>(std::pow(config.rope_theta, static_cast<double>(exponent)));
  }
  if (config.rope.kind == RopeScaling::Kind::kYarn) return YarnInvFreq(config, wavelengths);
  std::vector<float> inv_freq(wavelengths.size());
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    inv_freq[i] = 1.0f / wavelengths[i];
    if (config.rope.kind == RopeScaling::Kind::kLinear) {
      inv_freq[i] /= static_cast<float>(config.rope.factor);
    }
  }
  return inv_freq;
}

float RopeAttentionFactor(const ModelConfig& config) {
  if (config.rope.kind != RopeScaling::Kind::kYarn) return 1.0f;
  return static_cast<float>(config.rope.attention_factor);
}

double DefaultYarnAttentionFactor(double factor) {
  return factor <= 1 ? 1.0 : 0.1 * std::log(factor) + 1.0;
}

std::string Describe(const ModelConfig& config) {
  const RopeScaling& rope = config.rope;
  return absl::StrFormat(
      "arch=%s layers=%d hidden=%d heads=%d kv_heads=%d head_dim=%d ffn=%d vocab=%d eps=%.9g "
      "qk_norm=%d attention_bias=%d tied_head=%d rope_theta=%.17g rope_kind=%d rope_factor=%.17g "
      "rope_original=%d rope_attention=%.17g rope_beta=%.9g,%.9g rope_truncate=%d max_position=%d "
      "eos=%s",
      NameOf(config.arch), config.num_layers, config.hidden, config.num_heads, config.num_kv_heads,
      config.head_dim, config.ffn, config.vocab, config.rms_eps, config.qk_norm,
      config.attention_bias, config.tied_head, config.rope_theta, static_cast<int>(rope.kind),
      rope.factor, rope.original_max_position, rope.attention_factor, rope.beta_fast,
      rope.beta_slow, rope.truncate, config.max_position, absl::StrJoin(config.eos_ids, ","));
}

}  // namespace baton::model
