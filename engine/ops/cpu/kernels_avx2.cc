// The kernels for AVX2 and FMA. Compiled with their flags: see CMakeLists.txt.

#include "engine/ops/cpu/attention_kernels.h"
#include "engine/ops/cpu/gemm_kernels.h"
#include "engine/ops/cpu/row_kernels.h"
#include "engine/ops/cpu/simd_avx2.h"

namespace baton::ops::cpu {

const Kernels* Avx2Kernels() {
  using V = Avx2Vec;
  static constexpr Kernels kKernels = {
      .name = "avx2",
      .tiles = false,
      .code_bytes = sizeof(V::Code),
      .code_value = &V::CodeValue,
      .attention_bytes = sizeof(AttentionScratch),
      .gemm = &Gemm<V>::Panels,
      .rms_norm = &RmsNormRows<V>,
      .quantize = &QuantizeInput<V>,
      .rope_append = &RopeAppend<V>::Tokens,
      .attention = &Attention<V, VectorDots<V>>::Run,
  };
  return &kKernels;
}

}  // namespace baton::ops::cpu
