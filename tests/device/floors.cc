#include "tests/device/floors.h"

namespace baton::device {

ModelCost CostOf(const model::ModelConfig& c) {
  ModelCost cost;
  const double q = 1.0 * c.num_heads * c.head_dim, kv = 1.0 * c.num_kv_heads * c.head_dim;
  cost.linear_weights = c.num_layers * (c.hidden * (2 * q + 2 * kv) + 3.0 * c.hidden * c.ffn);
  cost.head_weights = 1.0 * c.vocab * c.hidden;
  cost.kv_bytes_per_token = 2 * kv * c.num_layers;
  cost.attention_flops_per_pair = 4 * q * c.num_layers;  // two products, two operations a term
  return cost;
}

double PrefillFloor(const ModelCost& cost, int tokens, bool fp8_weights) {
  const double pairs = 0.5 * tokens * (tokens + 1.0);
  const double flops = 2 * cost.linear_weights * tokens + cost.attention_flops_per_pair * pairs;
  return flops / (fp8_weights ? kFp8Flops : kBf16Flops) + 2 * cost.head_weights / kBytesPerSecond;
}

double DecodeFloor(const ModelCost& cost, int batch, int context, bool fp8_weights) {
  const double bytes = cost.linear_weights * (fp8_weights ? 1 : 2) + 2 * cost.head_weights +
                       cost.kv_bytes_per_token * batch * (context + 1.0);
  return bytes / kBytesPerSecond;
}

}  // namespace baton::device
