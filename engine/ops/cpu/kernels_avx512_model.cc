// The AVX-512 and AMX kernels, from the same sources, over instructions and tiles in software: what
// tests run on machines without them.

#include "engine/ops/cpu/avx512_model_names.h"
#include "engine/ops/cpu/level_tables.h"
#include "engine/ops/cpu/simd_avx512.h"
#include "engine/ops/cpu/tile_engine.h"

namespace baton::ops::cpu {

const Kernels* Avx512ModelKernels() {
  static constexpr Kernels kKernels = VectorLevel<Avx512Vec>("avx512_model");
  return &kKernels;
}

const Kernels* AmxModelKernels() {
  static constexpr Kernels kKernels = TileLevel<Avx512Vec, SoftwareTiles>("amx_model");
  return &kKernels;
}

}  // namespace baton::ops::cpu
