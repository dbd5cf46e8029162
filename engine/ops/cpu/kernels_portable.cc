// The kernels in plain C++: what tests run everywhere, and what an x86 CPU without AVX2 would run.

#include "engine/ops/cpu/level_tables.h"
#include "engine/ops/cpu/simd_portable.h"

namespace baton::ops::cpu {

const Kernels* PortableKernels() {
  static constexpr Kernels kKernels = VectorLevel<PortableVec>("portable");
  return &kKernels;
}

}  // namespace baton::ops::cpu
