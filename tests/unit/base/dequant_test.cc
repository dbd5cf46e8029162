#include "engine/base/dequant.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "engine/base/gguf.h"
#include "tests/support/model_files.h"

namespace baton::base {
namespace {

using testing_support::ReadWhole;

constexpr char kFormatsGolden[] = BATON_SOURCE_DIR "/tests/golden/gguf/formats";

// What the `gguf` package dequantises the tensors of formats.gguf to, in the order of the file.
std::vector<float> GoldenValues() {
  const std::string bytes = ReadWhole(std::string(kFormatsGolden) + ".f32");
  std::vector<float> values(bytes.size() / sizeof(float));
  memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

TEST(DequantTest, EveryFormatEqualsTheReferencePackage) {
  auto file = GgufFile::Open(std::string(kFormatsGolden) + ".gguf");
  ASSERT_TRUE(file.ok()) << file.status();
  const std::vector<float> golden = GoldenValues();
  ASSERT_EQ((*file)->tensors().size(), 8u);
  size_t at = 0;
  for (const GgufTensor& tensor : (*file)->tensors()) {
    EXPECT_EQ(tensor.name, std::string(NameOf(tensor.format)));
    const int64_t cols = tensor.shape[0];
    std::vector<float> row(cols);
    for (int64_t r = 0; r < tensor.shape[1]; ++r) {
      DequantizeRow(tensor.format, tensor.data.data() + r * RowBytes(tensor.format, cols), cols,
                    row.data());
      for (int64_t c = 0; c < cols; ++c, ++at) {
        ASSERT_EQ(row[c], golden[at]) << tensor.name << " row " << r << " column " << c;
      }
    }
  }
  EXPECT_EQ(at, golden.size());
}

TEST(DequantTest, FourBitCodesScalesAndMinimumsGiveTheSameValues) {
  auto file = GgufFile::Open(std::string(kFormatsGolden) + ".gguf");
  ASSERT_TRUE(file.ok()) << file.status();
  int num_formats = 0;
  for (const GgufTensor& tensor : (*file)->tensors()) {
    const int64_t cols = tensor.shape[0];
    std::vector<float> row(cols), scales(cols / 32), minimums(cols / 32);
    std::vector<uint8_t> codes(cols);
    const uint8_t* data = tensor.data.data();
    if (!UnpackRowQ4(tensor.format, data, cols, codes.data(), scales.data(), minimums.data()))
      continue;
    ++num_formats;
    DequantizeRow(tensor.format, data, cols, row.data());
    for (int64_t c = 0; c < cols; ++c) {
      ASSERT_LE(codes[c], 15);
      const float product = scales[c / 32] * codes[c];
      ASSERT_EQ(product + minimums[c / 32], row[c]) << tensor.name << " column " << c;
    }
  }
  EXPECT_EQ(num_formats, 3);
}

// Against arithmetic on the fields of the number, for all 65,536 of them.
TEST(DequantTest, EveryF16HasItsExactValue) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const int exponent = (bits >> 10) & 31;
    const int mantissa = bits & 1023;
    const double sign = (bits >> 15) != 0 ? -1 : 1;
    const float value = F16ToF32(static_cast<uint16_t>(bits));
    if (exponent == 31) {
      EXPECT_EQ(std::isnan(value), mantissa != 0) << bits;
      EXPECT_EQ(std::isinf(value), mantissa == 0) << bits;
    } else {
      const double expected =
          exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
      EXPECT_EQ(value, static_cast<float>(sign * expected)) << bits;
    }
    EXPECT_EQ(std::signbit(value), sign < 0) << bits;
  }
}

TEST(DequantTest, F16OfAnF32IsTheNearestAndOfATieTheEvenOne) {
  for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = F16ToF32(half);
    EXPECT_EQ(F32ToF16(value), half);
    EXPECT_EQ(F32ToF16(-value), half | 0x8000);
    // Between this one and the next (behind the largest there would be 2^16).
    const float next = bits == 0x7bff ? 65536.0f : F16ToF32(static_cast<uint16_t>(bits + 1));
    const float middle = (value + next) / 2;
    EXPECT_EQ(F32ToF16(middle), bits % 2 == 0 ? half : half + 1) << bits;
    EXPECT_EQ(F32ToF16(std::nextafter(middle, 0.0f)), half) << bits;
    EXPECT_EQ(F32ToF16(std::nextafter(middle, next)), half + 1) << bits;
  }
  EXPECT_EQ(F32ToF16(1e30f), 0x7c00);
  EXPECT_EQ(F32ToF16(-INFINITY), 0xfc00);
  EXPECT_TRUE(std::isnan(F16ToF32(F32ToF16(NAN))));
  EXPECT_EQ(F32ToF16(1e-40f), 0);
}

TEST(DequantTest, Bf16IsTheUpperHalfOfF32) {
  EXPECT_EQ(Bf16ToF32(0x3f80), 1.0f);
  EXPECT_EQ(Bf16ToF32(0xc2f7), -123.5f);
  EXPECT_EQ(std::bit_cast<uint32_t>(Bf16ToF32(0x0001)), 0x00010000u);
}

TEST(DequantTest, EveryGgmlTypeNumberIsKnownOrRefused) {
  int num_known = 0;
  for (uint32_t type = 0; type < 64; ++type) {
    const auto format = WeightFormatFromGgml(type);
    if (!format) continue;
    ++num_known;
    EXPECT_EQ(InfoOf(*format).ggml_type, type);
    EXPECT_EQ(InfoOf(*format).format, *format);
    EXPECT_NE(std::string(AcceptedWeightFormats()).find(std::string(NameOf(*format))),
              std::string::npos);
  }
  EXPECT_EQ(num_known, 8);
}

}  // namespace
}  // namespace baton::base
