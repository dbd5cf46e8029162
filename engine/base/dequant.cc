#include "engine/base/dequant.h"

#include <bit>
#include <cstring>

#include "engine/base/fp8.h"

namespace baton::base {
namespace {

constexpr uint32_t kNotInGguf = 0xffffffff;
constexpr WeightFormatInfo kFormats[] = {
    {WeightFormat::kF32, "f32", 0, 1, 4},
    {WeightFormat::kF16, "f16", 1, 1, 2},
    {WeightFormat::kBf16, "bf16", 30, 1, 2},
    {WeightFormat::kQ8_0, "q8_0", 8, 32, 34},
    {WeightFormat::kQ4_0, "q4_0", 2, 32, 18},
    {WeightFormat::kQ4_1, "q4_1", 3, 32, 20},
    {WeightFormat::kQ4_K, "q4_k", 12, 256, 144},
    {WeightFormat::kQ6_K, "q6_k", 14, 256, 210},
    {WeightFormat::kF8E4m3, "f8_e4m3", kNotInGguf, 1, 1},
};

uint16_t Load16(const uint8_t* bytes) {
  uint16_t value;
  memcpy(&value, bytes, sizeof(value));
  return value;
}

float LoadF16(const uint8_t* bytes) { return F16ToF32(Load16(bytes)); }

void DequantizeF16(const uint8_t* row, int64_t num_values, float* out) {
  for (int64_t i = 0; i < num_values; ++i) out[i] = LoadF16(row + 2 * i);
}

void DequantizeBf16(const uint8_t* row, int64_t num_values, float* out) {
  for (int64_t i = 0; i < num_values; ++i) out[i] = Bf16ToF32(Load16(row + 2 * i));
}

// Block: scale f16, 32 x i8.
void DequantizeQ8_0(const uint8_t* block, float* out) {
  const float scale = LoadF16(block);
  for (int i = 0; i < 32; ++i)
    out[i] = scale * static_cast<float>(static_cast<int8_t>(block[2 + i]));
}

// 16 bytes hold 32 codes: the low halves are values 0..15, the high halves 16..31.
void UnpackNibbles32(const uint8_t* packed, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = packed[i] & 15;
    codes[16 + i] = packed[i] >> 4;
  }
}

// Block: scale f16, 32 codes of 4 bits, each 8 too large.
void UnpackQ4_0(const uint8_t* block, uint8_t* codes, float* scales, float* minimums) {
  scales[0] = LoadF16(block);
  minimums[0] = -8.0f * scales[0];
  UnpackNibbles32(block + 2, codes);
}

// Block: scale f16, minimum f16, 32 codes of 4 bits.
void UnpackQ4_1(const uint8_t* block, uint8_t* codes, float* scales, float* minimums) {
  scales[0] = LoadF16(block);
  minimums[0] = LoadF16(block + 2);
  UnpackNibbles32(block + 4, codes);
}

struct ScaleAndMinimum {
  uint8_t scale;
  uint8_t minimum;
};

// The 6-bit scale and minimum of group `group` (0..7) from the 12 packed bytes of a q4_k block:
// groups 0..3 in the low six bits of bytes 0..3 and 4..7, groups 4..7 split over bytes 8..11 and
// the high two bits of the others.
ScaleAndMinimum UnpackScaleQ4_K(const uint8_t* packed, int group) {
  if (group < 4) {
    return {static_cast<uint8_t>(packed[group] & 63), static_cast<uint8_t>(packed[group + 4] & 63)};
  }
  const uint8_t low = packed[group + 4];
  return {static_cast<uint8_t>((low & 15) | ((packed[group - 4] >> 6) << 4)),
          static_cast<uint8_t>((low >> 4) | ((packed[group] >> 6) << 4))};
}

// Block: scale of scales f16, scale of minimums f16, 12 bytes of 6-bit scales and minimums, 256
// codes of 4 bits in four runs of 32 bytes: low halves are one group of 32, high halves the next.
void UnpackQ4_K(const uint8_t* block, uint8_t* codes, float* scales, float* minimums) {
  const float scale = LoadF16(block);
  const float minimum = LoadF16(block + 2);
  for (int group = 0; group < 8; ++group) {
    const ScaleAndMinimum packed = UnpackScaleQ4_K(block + 4, group);
    scales[group] = scale * static_cast<float>(packed.scale);
    minimums[group] = -(minimum * static_cast<float>(packed.minimum));
  }
  for (int run = 0; run < 4; ++run) {
    const uint8_t* bytes = block + 16 + 32 * run;
    for (int i = 0; i < 32; ++i) {
      codes[64 * run + i] = bytes[i] & 15;
      codes[64 * run + 32 + i] = bytes[i] >> 4;
    }
  }
}

// Block: 128 bytes of low 4 bits, 64 bytes of high 2 bits, 16 scales i8 (one per 16 values), scale
// of scales f16; each 6-bit code is 32 too large.
void DequantizeQ6_K(const uint8_t* block, float* out) {
  const float scale = LoadF16(block + 208);
  for (int half = 0; half < 2; ++half) {
    const uint8_t* low = block + 64 * half;
    const uint8_t* high = block + 128 + 32 * half;
    const uint8_t* scales = block + 192 + 8 * half;
    for (int i = 0; i < 128; ++i) {
      const int quarter = i / 32;
      const int column = i % 32;
      const uint8_t low_byte = low[32 * (quarter & 1) + column];
      const int low_bits = quarter < 2 ? low_byte & 15 : low_byte >> 4;
      const int high_bits = (high[column] >> (2 * quarter)) & 3;
      const float group_scale = scale * static_cast<float>(static_cast<int8_t>(scales[i / 16]));
      out[128 * half + i] = group_scale * static_cast<float>((low_bits | (high_bits << 4)) - 32);
    }
  }
}

using UnpackQ4Fn = void (*)(const uint8_t* block, uint8_t* codes, float* scales, float* minimums);

UnpackQ4Fn UnpackerOf(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ4_0:
      return UnpackQ4_0;
    case WeightFormat::kQ4_1:
      return UnpackQ4_1;
    case WeightFormat::kQ4_K:
      return UnpackQ4_K;
    default:
      return nullptr;
  }
}

void DequantizeQ4Block(UnpackQ4Fn unpack, uint32_t block_values, const uint8_t* block, float* out) {
  uint8_t codes[256];
  float scales[8];
  float minimums[8];
  unpack(block, codes, scales, minimums);
  for (uint32_t group = 0; group < block_values / 32; ++group) {
    const float scale = scales[group];
    const float minimum = minimums[group];
    for (int i = 0; i < 32; ++i) {
      out[32 * group + i] = scale * static_cast<float>(codes[32 * group + i]) + minimum;
    }
  }
}

}  // namespace

const WeightFormatInfo& InfoOf(WeightFormat format) { return kFormats[static_cast<int>(format)]; }

std::optional<WeightFormat> WeightFormatFromGgml(uint32_t ggml_type) {
  for (const WeightFormatInfo& info : kFormats) {
    if (info.ggml_type == ggml_type && ggml_type != kNotInGguf) return info.format;
  }
  return std::nullopt;
}

absl::string_view AcceptedWeightFormats() { return "f32 f16 bf16 q8_0 q4_0 q4_1 q4_k q6_k"; }

size_t RowBytes(WeightFormat format, int64_t num_values) {
  const WeightFormatInfo& info = InfoOf(format);
  return static_cast<size_t>(num_values) / info.block_values * info.block_bytes;
}

void DequantizeRow(WeightFormat format, const uint8_t* row, int64_t num_values, float* out) {
  if (format == WeightFormat::kF32) {
    memcpy(out, row, static_cast<size_t>(num_values) * sizeof(float));
    return;
  }
  if (format == WeightFormat::kF16) return DequantizeF16(row, num_values, out);
  if (format == WeightFormat::kBf16) return DequantizeBf16(row, num_values, out);
  if (format == WeightFormat::kF8E4m3) {
    for (int64_t i = 0; i < num_values; ++i) out[i] = FloatFromFp8(row[i]);
    return;
  }
  const WeightFormatInfo& info = InfoOf(format);
  const UnpackQ4Fn unpack = UnpackerOf(format);
  for (int64_t done = 0; done < num_values; done += info.block_values) {
    if (unpack != nullptr) {
      DequantizeQ4Block(unpack, info.block_values, row, out + done);
    } else if (format == WeightFormat::kQ8_0) {
      DequantizeQ8_0(row, out + done);
    } else {
      DequantizeQ6_K(row, out + done);
    }
    row += info.block_bytes;
  }
}

bool UnpackRowQ4(WeightFormat format,
                 const uint8_t* row,
                 int64_t num_values,
                 uint8_t* codes,
                 float* scales,
                 float* minimums) {
  const UnpackQ4Fn unpack = UnpackerOf(format);
  if (unpack == nullptr) return false;
  const WeightFormatInfo& info = InfoOf(format);
  for (int64_t done = 0; done < num_values; done += info.block_values) {
    unpack(row, codes + done, scales + done / 32, minimums + done / 32);
    row += info.block_bytes;
  }
  return true;
}

// No f32 subnormal is touched on the way, so the result holds with FTZ/DAZ too.
float F16ToF32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = bits & 0x7c00u;
  const uint32_t mantissa = bits & 0x03ffu;
  uint32_t magnitude = (static_cast<uint32_t>(bits & 0x7fffu) << 13) + (112u << 23);
  if (exponent == 0x7c00u) magnitude += 112u << 23;  // inf and NaN
  if (exponent == 0) {
    // Subnormal: mantissa * 2^-24. One unit in the last place of 0.5f is 2^-24.
    magnitude = std::bit_cast<uint32_t>(std::bit_cast<float>(0x3f000000u | mantissa) - 0.5f);
  }
  return std::bit_cast<float>(sign | magnitude);
}

uint16_t F32ToF16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  const auto round = [](uint32_t x, uint32_t shift) {
    return (x + (1u << (shift - 1)) - 1 + (x >> shift & 1u)) >> shift;
  };
  uint32_t half = 0;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x47800000u) {  // 2^16
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // 2^-14
    half = round(magnitude - (112u << 23), 13);
  } else if (const uint32_t exponent = magnitude >> 23; exponent >= 102) {  // 2^-25
    half = round((magnitude & 0x7fffffu) | 0x800000u, 126 - exponent);
  }
  return static_cast<uint16_t>(sign | half);
}

float Bf16ToF32(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

}  // namespace baton::base
