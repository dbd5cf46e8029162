// The kernels for AVX-512 with VNNI. Compiled with their flags: see CMakeLists.txt.

#include "engine/ops/cpu/level_tables.h"
#include "engine/ops/cpu/simd_avx512.h"

namespace baton::ops::cpu {

const Kernels* Avx512Kernels() {
  static constexpr Kernels kKernels = VectorLevel<Avx512Vec>("avx512");
  return &kKernels;
}

}  // namespace baton::ops::cpu
