// The AMX kernels over tiles in software and AVX2 vectors, for tests on machines without AMX.

#include "engine/ops/cpu/amx_kernels.h"
#include "engine/ops/cpu/row_kernels.h"
#include "engine/ops/cpu/simd_avx2.h"
#include "engine/ops/cpu/tile_engine.h"

namespace baton::ops::cpu {

const Kernels* AmxModelKernels() {
  using V = Avx2Vec;
  using Tiles = SoftwareTiles;
  static constexpr Kernels kKernels = {
      .name = "amx_model",
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
