// The kernels for AMX: tiles for many tokens, AVX-512 for the rest.

#include "engine/ops/cpu/level_tables.h"
#include "engine/ops/cpu/simd_avx512.h"
#include "engine/ops/cpu/tile_engine.h"

namespace baton::ops::cpu {

const Kernels* AmxKernels() {
  static constexpr Kernels kKernels = TileLevel<Avx512Vec, HardwareTiles>("amx");
  return &kKernels;
}

}  // namespace baton::ops::cpu
