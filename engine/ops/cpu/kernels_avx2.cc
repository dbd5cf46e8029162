// The kernels for AVX2 and FMA. Compiled with their flags: see CMakeLists.txt.

#include "engine/ops/cpu/level_tables.h"
#include "engine/ops/cpu/simd_avx2.h"

namespace baton::ops::cpu {

const Kernels* Avx2Kernels() {
  static constexpr Kernels kKernels = VectorLevel<Avx2Vec>("avx2");
  return &kKernels;
}

}  // namespace baton::ops::cpu
