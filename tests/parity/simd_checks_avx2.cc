#include "engine/ops/cpu/simd_avx2.h"
#include "tests/parity/simd_checks.h"

namespace baton::tests {

int SimdDifferencesAvx2(char* report, int size) {
  return SimdChecks<ops::cpu::Avx2Vec>(report, size).Run();
}

}  // namespace baton::tests
