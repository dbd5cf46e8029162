#include "engine/ops/cpu/avx512_model_names.h"
#include "engine/ops/cpu/simd_avx512.h"
#include "tests/parity/simd_checks.h"

namespace baton::tests {

int SimdDifferencesAvx512Model(char* report, int size) {
  return SimdChecks<ops::cpu::Avx512Vec>(report, size).Run();
}

}  // namespace baton::tests
