// The kernels for AMX: tiles for many tokens, AVX-512 for the rest.

#include "engine/ops/cpu/amx_kernels.h"
#include "engine/ops/cpu/row_kernels.h"
#include "engine/ops/cpu/simd_avx512.h"
#include "engine/ops/cpu/tile_engine.h"

namespace baton::ops::cpu {

const Kernels* AmxKernels() {
  using V = Avx512Vec;
  using Tiles = HardwareTiles;
  static constexpr Kernels kKernels = {
      .name = "amx",
      .tiles = true,
      .code_bytes = sizeof(V::Code),
      .code_value = &V::CodeValue,
      .attention_bytes = sizeof(AttentionScratch),
      .gemm = &AmxGemm<V, Tiles>::Panels,
      .rms_norm = &RmsNormRows<V>,
      .quantize = &QuantizeInput<V>,
      .rope_append = &RopeAppend<V>::Tokens,
      .attention = &Attention<V, AmxDots<V, Tiles>>::Run,
  };
  return &kKernels;
}

}  // namespace baton::ops::cpu
