#pragma once

// The fixed scales of the fp8 cache: one per (layer, K|V, kv head), a power of two, known before
// the first token, so that every worker with the same checkpoint stores the same bytes.

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/kv/kv_layout.h"
#include "engine/model/checkpoint.h"

namespace baton::model {

class KvScaleTable {
 public:
  KvScaleTable() = default;
  KvScaleTable(int num_layers, int num_kv_heads)
      : num_kv_heads_(num_kv_heads),
        values_(static_cast<size_t>(num_layers) * 2 * num_kv_heads, 1.0f) {}

  bool empty() const { return values_.empty(); }
  // [2][Hkv]: K then V.
  absl::Span<const float> layer(int layer) const {
    return absl::MakeConstSpan(values_).subspan(static_cast<size_t>(layer) * 2 * num_kv_heads_,
                                                2 * num_kv_heads_);
  }
  float& at(int layer, int side, int head) {
    return values_[(static_cast<size_t>(layer) * 2 + side) * num_kv_heads_ + head];
  }
  // True where the checkpoint brought them.
  bool from_checkpoint() const { return from_checkpoint_; }
  void set_from_checkpoint() { from_checkpoint_ = true; }
  // SHA-256 of all values, in hex; "" when empty.
  std::string Fingerprint() const;

 private:
  int num_kv_heads_ = 0;
  bool from_checkpoint_ = false;
  std::vector<float> values_;  // [L][2][Hkv]
};

// `requested` is auto, fp8, fp8_dynamic, bf16 or f32. auto: fp8 with QK-norm, whose keys have a
// tight bound, else fp8_dynamic.
// Errors: INVALID_ARGUMENT naming the accepted values.
absl::StatusOr<kv::KvFormat> ResolveKvFormat(const ModelConfig& config,
                                             absl::string_view requested);

// The scales of the fp8 format; the effective ones go into two log lines, one for K and one for V.
//
// Where the checkpoint brings scales: those, rounded up to a power of two. (Checkpoint::Open
// refuses scales for some layers only.) Else from the weights alone, bound / 448 rounded up to a
// power of two, so that nothing can saturate. The bounds of a head, with b the bias:
//   V           max_i sqrt(E) * ||w_norm * W_v[i]||_2 + |b_i|. A normed row has at most the norm
//               sqrt(E) before its weight; then Cauchy and Schwarz.
//   K, QK-norm  sqrt(D) * max|w_k|. A normed head has at most the norm sqrt(D); a rotation keeps
//               the norm of a pair. Times the attention factor of RoPE, on cos and sin.
//   K, no norm  As V for each row; a rotated pair is at most the root of both squares. Times the
//               attention factor.
// In double, in a fixed order. Held within 2^-96 and 2^96; a bound that is not finite gets the
// upper end, and the damaged model shows itself in its logits.
KvScaleTable MakeKvScales(const Checkpoint& checkpoint);

// The smallest power of two that is at least `value`, within the limits above; 1 for 0.
float RoundUpToPowerOfTwo(double value);

}  // namespace baton::model
