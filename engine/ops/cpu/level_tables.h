#pragma once

// The table of one level's kernels, from its vector type V (and its tiles). Levels differ in these
// types and in the compiler's flags, in nothing else.

#include "engine/ops/cpu/amx_kernels.h"
#include "engine/ops/cpu/attention_kernels.h"
#include "engine/ops/cpu/gemm_kernels.h"
#include "engine/ops/cpu/kernel_args.h"
#include "engine/ops/cpu/row_kernels.h"

namespace baton::ops::cpu {

template <typename V>
constexpr Kernels VectorLevel(const char* name) {
  return {
      .name = name,
      .tiles = false,
      .code_bytes = sizeof(typename V::Code),
      .code_value = &V::CodeValue,
      .attention_bytes = sizeof(AttentionScratch),
      .gemm = &Gemm<V>::Panels,
      .rms_norm = &RmsNormRows<V>,
      .quantize = &QuantizeInput<V>,
      .largest = &LargestOfInput<V>,
      .rope_append = &RopeAppend<V>::Tokens,
      .attention = &Attention<V, VectorDots<V>>::Run,
  };
}

// Tiles for many tokens, V for the rest.
template <typename V, typename Tiles>
constexpr Kernels TileLevel(const char* name) {
  Kernels kernels = VectorLevel<V>(name);
  kernels.tiles = true;
  kernels.gemm = &AmxGemm<V, Tiles>::Panels;
  kernels.attention = &Attention<V, AmxDots<V, Tiles>>::Run;
  return kernels;
}

}  // namespace baton::ops::cpu
