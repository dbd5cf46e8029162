#include "engine/base/fp8.h"

#include <xmmintrin.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace baton::base {
namespace {

// All finite magnitudes of E4M3 in order, from its definition in double arithmetic; index = code.
std::vector<double> Magnitudes() {
  std::vector<double> values;
  for (int code = 0; code < 127; ++code) {
    const int exponent = code / 8, mantissa = code % 8;
    values.push_back(exponent == 0 ? std::ldexp(mantissa, -9)
                                   : std::ldexp(8 + mantissa, exponent - 10));
  }
  return values;
}

// The rule of the format by search, sharing nothing with the code under test: the nearest
// magnitude, the even code of two equally near, the largest for everything beyond.
uint8_t NearestCode(double value, const std::vector<double>& magnitudes) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return sign | 0x7f;
  const double magnitude = std::fabs(value);
  int best = 126;
  for (int code = 0; code < 127; ++code) {
    const double distance = std::fabs(magnitudes[code] - magnitude);
    const double best_distance = std::fabs(magnitudes[best] - magnitude);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0 && best != code))
      best = code;
  }
  return std::isinf(value) ? sign | 126 : sign | best;
}

// Case 13.1: every bf16 value, in both denormal modes.
TEST(Fp8, ConversionIsExactForAllBf16Inputs) {
  const std::vector<double> magnitudes = Magnitudes();
  const unsigned saved = _mm_getcsr();
  for (const unsigned mode : {0u, 0x8040u}) {
    int wrong = 0;
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const float value = FloatFromBf16(static_cast<uint16_t>(bits));
      _mm_setcsr((saved & ~0x8040u) | mode);
      const uint8_t code = Fp8FromFloat(value);
      _mm_setcsr(saved & ~0x8040u);
      const uint8_t want = NearestCode(value, magnitudes);
      if (code != want && ++wrong < 5)
        ADD_FAILURE() << "bf16 " << std::hex << bits << ": " << int{code} << " want " << int{want};
    }
    EXPECT_EQ(wrong, 0);
  }
  _mm_setcsr(saved);
}

// Case 13.1: the values by name.
TEST(Fp8, SaturatesAndKeepsNan) {
  EXPECT_EQ(Fp8FromFloat(447), 0x7e);
  EXPECT_EQ(Fp8FromFloat(448), 0x7e);
  EXPECT_EQ(Fp8FromFloat(449), 0x7e);
  EXPECT_EQ(Fp8FromFloat(464), 0x7e);
  EXPECT_EQ(Fp8FromFloat(-1e4f), 0xfe);
  EXPECT_EQ(Fp8FromFloat(std::numeric_limits<float>::infinity()), 0x7e);
  EXPECT_EQ(Fp8FromFloat(-std::numeric_limits<float>::infinity()), 0xfe);
  EXPECT_EQ(Fp8FromFloat(std::nanf("")) & 0x7f, 0x7f);
  EXPECT_EQ(Fp8FromFloat(-0.0f), 0x80);
  EXPECT_EQ(Fp8FromFloat(std::ldexp(1.0f, -10)), 0x00);  // a tie with zero: even
  EXPECT_EQ(Fp8FromFloat(std::ldexp(1.5f, -10)), 0x01);
  EXPECT_EQ(Fp8FromFloat(std::ldexp(3.0f, -10)), 0x02);  // a tie of 1 and 2: even
  EXPECT_EQ(Fp8FromFloat(std::ldexp(7.6f, -9)), 0x08);   // up into the normal ones
}

TEST(Fp8, EveryCodeComesBack) {
  const std::vector<double> magnitudes = Magnitudes();
  for (int code = 0; code < 256; ++code) {
    const float value = FloatFromFp8(static_cast<uint8_t>(code));
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
      continue;
    }
    EXPECT_EQ(std::fabs(value), magnitudes[code & 0x7f]);
    EXPECT_EQ(std::signbit(value), code >= 128);
    EXPECT_EQ(Fp8FromFloat(value), code);
  }
}

TEST(Bf16, RoundsToNearestEven) {
  EXPECT_EQ(Bf16FromFloat(1.0f), 0x3f80);
  EXPECT_EQ(Bf16FromFloat(FloatFromBits(0x3f808000)), 0x3f80);  // tie, even below
  EXPECT_EQ(Bf16FromFloat(FloatFromBits(0x3f818000)), 0x3f82);  // tie, even above
  EXPECT_EQ(Bf16FromFloat(FloatFromBits(0x3f808001)), 0x3f81);
  EXPECT_EQ(Bf16FromFloat(FloatFromBits(0x7f7fffff)), 0x7f80);  // beyond the largest: infinity
  EXPECT_TRUE(std::isnan(FloatFromBf16(Bf16FromFloat(FloatFromBits(0x7f800001)))));
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = FloatFromBf16(static_cast<uint16_t>(bits));
    if (std::isnan(value)) continue;
    ASSERT_EQ(Bf16FromFloat(value), bits);
  }
}

}  // namespace
}  // namespace baton::base
