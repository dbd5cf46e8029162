#pragma once

// What a model's step must take at least on an H200, from its shape alone: bytes over bandwidth,
// operations over the tensor cores' rate. Measurements are told as percent of these.

#include <cstdint>

#include "engine/model/model_config.h"

namespace baton::device {

// Rates of an H200: of the data sheet for arithmetic, of published copies (read and write) for
// memory.
inline constexpr double kBf16Flops = 989e12, kFp8Flops = 1979e12;
inline constexpr double kBytesPerSecond = 4.3e12;

struct ModelCost {
  double linear_weights = 0;  // of the layers
  double head_weights = 0;
  double kv_bytes_per_token = 0;        // FP8
  double attention_flops_per_pair = 0;  // of a (query, key) pair, all layers
};
ModelCost CostOf(const model::ModelConfig& config);

// Seconds until the first token of one prompt, if all products ran at the data sheet's rate; the
// head is computed for one token.
double PrefillFloor(const ModelCost& cost, int tokens, bool fp8_weights);

// Seconds of one step of `batch` sequences with `context` tokens each: weights, head (bf16) and FP8
// keys and values are read once.
double DecodeFloor(const ModelCost& cost, int batch, int context, bool fp8_weights);

}  // namespace baton::device
