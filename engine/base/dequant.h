#pragma once

// Element formats of stored weights, and their exact value in f32: the GGML block formats, f32,
// f16, bf16, and e4m3, whose scales are a tensor of their own (GGUF has none of it).

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"

namespace baton::base {

enum class WeightFormat { kF32, kF16, kBf16, kQ8_0, kQ4_0, kQ4_1, kQ4_K, kQ6_K, kF8E4m3 };

struct WeightFormatInfo {
  WeightFormat format;
  const char* name;       // "f32", "q4_k", ...: how messages and flags call it
  uint32_t ggml_type;     // its number in GGUF files
  uint32_t block_values;  // values are stored in blocks of this many, along a row
  uint32_t block_bytes;
};

const WeightFormatInfo& InfoOf(WeightFormat format);
inline absl::string_view NameOf(WeightFormat format) { return InfoOf(format).name; }
std::optional<WeightFormat> WeightFormatFromGgml(uint32_t ggml_type);
// Of GGUF files: "f32 f16 bf16 q8_0 q4_0 q4_1 q4_k q6_k", for messages.
absl::string_view AcceptedWeightFormats();

// Bytes of a row of `num_values`, which must be a multiple of block_values.
size_t RowBytes(WeightFormat format, int64_t num_values);

// Writes the `num_values` of one row as f32, each rounded as GGML's reference code does;
// `num_values` must be a multiple of block_values. `row` needs no alignment. Does not depend on the
// FTZ/DAZ mode of the thread.
void DequantizeRow(WeightFormat format, const uint8_t* row, int64_t num_values, float* out);

// For the 4-bit formats (q4_0, q4_1, q4_k): codes [num_values] in 0..15, and one scale and minimum
// per 32 values, so that scale * code + minimum, with the product rounded first, is bit for bit
// what DequantizeRow gives. False, and nothing written, for other formats.
bool UnpackRowQ4(WeightFormat format,
                 const uint8_t* row,
                 int64_t num_values,
                 uint8_t* codes,
                 float* scales,
                 float* minimums);

float F16ToF32(uint16_t bits);
// Nearest even; beyond the largest finite value infinity; NaN stays NaN.
uint16_t F32ToF16(float value);
float Bf16ToF32(uint16_t bits);

}  // namespace baton::base
