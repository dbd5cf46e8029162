// The kernels in plain C++: what tests run everywhere, and what an x86 CPU without AVX2 would run.

#include "engine/ops/cpu/attention_kernels.h"
#include "engine/ops/cpu/gemm_kernels.h"
#include "engine/ops/cpu/row_kernels.h"
#include "engine/ops/cpu/simd_portable.h"

namespace baton::ops::cpu {

const Kernels* PortableKernels() {
  using V = PortableVec;
  static constexpr Kernels kKernels = {
      .name = "portable",
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
