#include "engine/model/kv_scales.h"

#include <openssl/sha.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/parallel_for.h"
#include "engine/base/status_macros.h"

namespace baton::model {
namespace {

constexpr int kMaxExponent = 96;
constexpr double kLargestE4m3 = 448;
constexpr int kKeySide = 0;
constexpr int kValueSide = 1;

std::vector<float> ReadVector(const Checkpoint& checkpoint, TensorRole role, int layer) {
  std::vector<float> values(checkpoint.shape(role, layer).cols);
  checkpoint.ReadRow(role, layer, 0, values.data());
  return values;
}

// NaN counts as infinite: std::max would drop it.
double Larger(double a, double b) {
  return std::isnan(b) ? std::numeric_limits<double>::infinity() : std::max(a, b);
}

// sqrt(E) * ||w_norm * W[row]||_2 + |b|: what no element of this row's product with a normed vector
// exceeds.
class ProjectionBound {
 public:
  ProjectionBound(const Checkpoint& checkpoint, TensorRole weight, TensorRole bias, int layer)
      : checkpoint_(checkpoint),
        weight_(weight),
        layer_(layer),
        norm_(ReadVector(checkpoint, TensorRole::kAttnNorm, layer)),
        row_(norm_.size()) {
    if (checkpoint.Has(bias, layer)) bias_ = ReadVector(checkpoint, bias, layer);
  }

  double OfRow(int64_t row) {
    checkpoint_.ReadRow(weight_, layer_, row, row_.data());
    double squares = 0;
    for (size_t i = 0; i < row_.size(); ++i) {
      const double product = double{norm_[i]} * row_[i];
      squares += product * product;
    }
    const double bias = bias_.empty() ? 0.0 : std::abs(double{bias_[row]});
    return std::sqrt(static_cast<double>(row_.size())) * std::sqrt(squares) + bias;
  }

 private:
  const Checkpoint& checkpoint_;
  TensorRole weight_;
  int layer_;
  std::vector<float> norm_;
  std::vector<float> bias_;
  std::vector<float> row_;
};

double ValueBound(const Checkpoint& checkpoint, int layer, int head) {
  ProjectionBound bound(checkpoint, TensorRole::kV, TensorRole::kVBias, layer);
  const int64_t head_dim = checkpoint.config().head_dim;
  double largest = 0;
  for (int64_t i = 0; i < head_dim; ++i)
    largest = Larger(largest, bound.OfRow(head * head_dim + i));
  return largest;
}

double NormedKeyBound(const Checkpoint& checkpoint, int layer) {
  double largest = 0;
  for (const float weight : ReadVector(checkpoint, TensorRole::kKNorm, layer)) {
    largest = Larger(largest, std::abs(double{weight}));
  }
  return std::sqrt(static_cast<double>(checkpoint.config().head_dim)) * largest;
}

// Rotation turns (i, i + D/2) by some angle: at most the norm of the pair.
double ProjectedKeyBound(const Checkpoint& checkpoint, int layer, int head) {
  ProjectionBound bound(checkpoint, TensorRole::kK, TensorRole::kKBias, layer);
  const int64_t head_dim = checkpoint.config().head_dim;
  double largest = 0;
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    const double low = bound.OfRow(head * head_dim + i);
    const double high = bound.OfRow(head * head_dim + i + head_dim / 2);
    largest = Larger(largest, std::sqrt(low * low + high * high));
  }
  return largest;
}

double KeyBound(const Checkpoint& checkpoint, int layer, int head) {
  const double projected = checkpoint.config().qk_norm ? NormedKeyBound(checkpoint, layer)
                                                       : ProjectedKeyBound(checkpoint, layer, head);
  return projected * std::abs(double{RopeAttentionFactor(checkpoint.config())});
}

void LogScales(const KvScaleTable& table, int num_layers, int num_kv_heads) {
  for (int side : {kKeySide, kValueSide}) {
    std::string line;
    for (int layer = 0; layer < num_layers; ++layer) {
      const absl::Span<const float> scales =
          table.layer(layer).subspan(side * num_kv_heads, num_kv_heads);
      const auto [low, high] = std::minmax_element(scales.begin(), scales.end());
      absl::StrAppend(&line, layer == 0 ? "" : ",", *low);
      if (*low != *high) absl::StrAppend(&line, "..", *high);
    }
    BATON_LOG(Info, "kv scales source=", table.from_checkpoint() ? "checkpoint" : "weights",
              side == kKeySide ? " k=" : " v=", line);
  }
}

KvScaleTable FromCheckpoint(const Checkpoint& checkpoint) {
  const ModelConfig& config = checkpoint.config();
  KvScaleTable table(config.num_layers, config.num_kv_heads);
  table.set_from_checkpoint();
  for (int layer = 0; layer < config.num_layers; ++layer) {
    const KvScales scales = *checkpoint.kv_scales(layer);
    for (int head = 0; head < config.num_kv_heads; ++head) {
      table.at(layer, kKeySide, head) = RoundUpToPowerOfTwo(scales.k[head]);
      table.at(layer, kValueSide, head) = RoundUpToPowerOfTwo(scales.v[head]);
    }
  }
  return table;
}

KvScaleTable FromWeights(const Checkpoint& checkpoint) {
  const ModelConfig& config = checkpoint.config();
  KvScaleTable table(config.num_layers, config.num_kv_heads);
  base::ParallelFor(int64_t{config.num_layers} * config.num_kv_heads, [&](int64_t task) {
    const int layer = static_cast<int>(task / config.num_kv_heads);
    const int head = static_cast<int>(task % config.num_kv_heads);
    table.at(layer, kKeySide, head) =
        RoundUpToPowerOfTwo(KeyBound(checkpoint, layer, head) / kLargestE4m3);
    table.at(layer, kValueSide, head) =
        RoundUpToPowerOfTwo(ValueBound(checkpoint, layer, head) / kLargestE4m3);
  });
  return table;
}

}  // namespace

float RoundUpToPowerOfTwo(double value) {
  if (value == 0) return 1.0f;
  if (!std::isfinite(value)) return std::ldexp(1.0f, kMaxExponent);
  int exponent;
  const double fraction =
      std::frexp(value, &exponent);  // value = fraction * 2^exponent, fraction in [0.5, 1)
  if (fraction == 0.5) --exponent;
  return std::ldexp(1.0f, std::clamp(exponent, -kMaxExponent, kMaxExponent));
}

std::string KvScaleTable::Fingerprint() const {
  if (values_.empty()) return "";
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(values_.data()), values_.size() * sizeof(float),
         digest);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest), sizeof(digest)));
}

absl::StatusOr<kv::KvFormat> ResolveKvFormat(const ModelConfig& config,
                                             absl::string_view requested) {
  if (requested == "auto") return config.qk_norm ? kv::KvFormat::kFp8 : kv::KvFormat::kFp8Dynamic;
  return kv::ParseKvFormat(requested);
}

KvScaleTable MakeKvScales(const Checkpoint& checkpoint) {
  const KvScaleTable table =
      checkpoint.kv_scales(0).has_value() ? FromCheckpoint(checkpoint) : FromWeights(checkpoint);
  LogScales(table, checkpoint.config().num_layers, checkpoint.config().num_kv_heads);
  return table;
}

}  // namespace baton::model
