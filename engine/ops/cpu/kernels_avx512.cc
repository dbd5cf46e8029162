// The kernels for AVX-512 with VNNI. Compiled with their flags: see CMakeLists.txt.

#include "engine/ops/cpu/attention_kernels.h"
#include "engine/ops/cpu/gemm_kernels.h"
#include "engine/ops/cpu/row_kernels.h"
#include "engine/ops/cpu/simd_avx512.h"

namespace baton::ops::cpu {

const Kernels* Avx512Kernels() {
  using V = Avx512Vec;
  static constexpr Kernels kKernels = {
      .name = "avx512",
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
