// The vector types of the CPU kernels against plain C++, member by member.

#include <iostream>

#include "gtest/gtest.h"
#include "engine/ops/cpu/isa.h"
#include "tests/parity/simd_checks.h"

namespace baton::tests {
namespace {

TEST(SimdParity, EveryMemberGivesTheBitsOfPlainCode) {
  std::cout << "levels here: " << ops::cpu::AvailableLevels() << "\n";
  char report[400] = "";
  if (ops::cpu::DetectedFeatures().avx2) {
    EXPECT_EQ(SimdDifferencesAvx2(report, sizeof(report)), 0) << "avx2: " << report;
    EXPECT_EQ(SimdDifferencesAvx512Model(report, sizeof(report)), 0) << "avx512_model: " << report;
  }
  if (ops::cpu::DetectedFeatures().avx512) {
    EXPECT_EQ(SimdDifferencesAvx512(report, sizeof(report)), 0) << "avx512: " << report;
    EXPECT_EQ(Avx512ModelDifferences(report, sizeof(report)), 0) << "instructions: " << report;
  }
}

}  // namespace
}  // namespace baton::tests
