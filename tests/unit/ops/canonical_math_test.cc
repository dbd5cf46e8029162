#include "engine/ops/canonical_math.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>

#include "gtest/gtest.h"
#include "engine/ops/cpu/simd_portable.h"
#include "engine/ops/flush_denormals.h"

namespace baton::ops {
namespace {

// Distance in units of the last place of the exact value.
double UlpError(float got, double exact) {
  if (exact == 0) return got == 0 ? 0 : INFINITY;
  return std::fabs(got - exact) / std::ldexp(1.0, std::ilogb(exact) - 23);
}

TEST(CanonicalMath, ExpIsWithinTwoUlp) {
  const ScopedFlushDenormals flush;
  double worst = 0;
  for (uint32_t bits = 0; bits < 0x42b17218; bits += 977) {  // 0 .. 88.72
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const float x = base::FloatFromBits(bits | sign);
      if (x < -87.0f) continue;
      worst = std::max(worst, UlpError(CanonicalExp(x), std::exp(static_cast<double>(x))));
    }
  }
  EXPECT_LE(worst, 2.0);
}

TEST(CanonicalMath, ExpHasItsLimits) {
  const ScopedFlushDenormals flush;
  EXPECT_EQ(CanonicalExp(-INFINITY), 0.0f);
  EXPECT_EQ(CanonicalExp(-88.0f), 0.0f);
  EXPECT_EQ(CanonicalExp(0.0f), 1.0f);
  EXPECT_EQ(CanonicalExp(89.0f), INFINITY);
  EXPECT_EQ(CanonicalExp(INFINITY), INFINITY);
  EXPECT_TRUE(std::isnan(CanonicalExp(NAN)));
  EXPECT_TRUE(std::isfinite(CanonicalExp(88.72f)));
}

TEST(CanonicalMath, SiluIsCloseToTheExactValue) {
  const ScopedFlushDenormals flush;
  double worst = 0;
  for (float x = -80.0f; x < 80.0f; x += 0.0037f) {
    const double exact = x / (1.0 + std::exp(-static_cast<double>(x)));
    worst = std::max(worst, UlpError(CanonicalSilu(x), exact));
  }
  EXPECT_LE(worst, 4.0);  // exp (2), the addition and the division (1 each)
}

TEST(CanonicalMath, SineAndCosineAreExactToTheLastPlaceOfF32) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 200000; ++i) {
    const double x =
        std::ldexp(static_cast<double>(random() >> 11), -53) * (i % 2 == 0 ? 10.0 : 1e6);
    double sine, cosine;
    CanonicalSinCos(x, &sine, &cosine);
    ASSERT_NEAR(sine, std::sin(x), 1e-12) << x;
    ASSERT_NEAR(cosine, std::cos(x), 1e-12) << x;
  }
}

// The vector types run the same source; here the portable one, lane by lane. The machine's own are
// in parity/ops.
TEST(CanonicalMath, SixteenLanesGiveTheBitsOfOne) {
  using cpu::PortableVec;
  const ScopedFlushDenormals flush;
  std::mt19937 random(7);
  for (int i = 0; i < 20000; ++i) {
    float x[16], exps[16], silus[16];
    for (float& value : x) value = base::FloatFromBits(static_cast<uint32_t>(random()));
    PortableVec::Store(exps, Exp(PortableVec::Load(x)));
    PortableVec::Store(silus, Silu(PortableVec::Load(x)));
    for (int lane = 0; lane < 16; ++lane) {
      const float e = CanonicalExp(x[lane]), s = CanonicalSilu(x[lane]);
      ASSERT_TRUE(std::memcmp(&e, &exps[lane], 4) == 0 || (std::isnan(e) && std::isnan(exps[lane])))
          << x[lane];
      ASSERT_TRUE(std::memcmp(&s, &silus[lane], 4) == 0 ||
                  (std::isnan(s) && std::isnan(silus[lane])))
          << x[lane];
    }
  }
}

TEST(ScopedFlushDenormals, FlushesAndRestores) {
  volatile float tiny = base::FloatFromBits(0x00400000), one = 1.0f;
  EXPECT_NE(tiny * one, 0.0f);
  {
    const ScopedFlushDenormals flush;
    EXPECT_EQ(tiny * one, 0.0f);
  }
  EXPECT_NE(tiny * one, 0.0f);
}

}  // namespace
}  // namespace baton::ops
