#pragma once

// Dots of kQ4 panels: 4-bit codes of 16 outputs by int8 codes of 1..n tokens, in groups of 32 k.
// GEMM and GEMV are the same code; tokens share the unpacked codes.

#include <cstddef>
#include <cstdint>

#include "engine/ops/cpu/kernel_args.h"

namespace baton::ops::cpu {

// Rows of activations in groups of 32: codes, and by group the scale and that times the codes' sum.
struct GroupRows {
  const int8_t* codes;
  size_t code_stride;
  const float* scales;
  size_t scale_stride;
};

// Rows from token t, k from group `group`.
[[gnu::always_inline]] inline GroupRows GroupsOf(const Input& x, int t, int group) {
  return {.codes = reinterpret_cast<const int8_t*>(x.codes) +
                   static_cast<size_t>(t) * x.code_stride + static_cast<size_t>(group) * 32,
          .code_stride = x.code_stride,
          .scales = x.scales + static_cast<size_t>(t) * x.scale_stride + 2 * group,
          .scale_stride = x.scale_stride};
}

// The 16 scales (0) or minimums (1) of a tile.
template <typename V>
[[gnu::always_inline]] inline V LoadQ4Scales(const uint8_t* tile, bool wide, int which) {
  const uint8_t* scales = tile + kQ4CodeBytes;
  return wide ? V::Load(reinterpret_cast<const float*>(scales + 64 * which))
              : V::LoadF16(scales + 32 * which);
}

// Sums of `num_groups` groups from zero, both tiles of a step before the next step: the order of
// memory.
template <typename V, int kTokens>
[[gnu::always_inline]] inline void PanelSumsQ4(
    GroupRows x, const uint8_t* panel, bool wide, int num_groups, V (*out)[kTokens]) {
  const int tile_bytes = wide ? kQ4WideTileBytes : kQ4TileBytes;
  V acc[2][kTokens];
  for (int i = 0; i < 2 * kTokens; ++i) acc[i / kTokens][i % kTokens] = V::Zero();
  for (int group = 0; group < num_groups; ++group, x.codes += 32, x.scales += 2) {
#pragma GCC unroll 1
    for (int tile = 0; tile < 2; ++tile, panel += tile_bytes) {
      const int8_t* codes = x.codes;
      const float* scales = x.scales;
      // Hides that both tiles read the same: the compiler would keep it, on the stack.
      __asm__("" : "+r"(codes), "+r"(scales));
#pragma GCC unroll 6
      for (int line = 0; line < kQ4WideTileBytes / 64; ++line)
        __builtin_prefetch(panel + 64 * line + V::kPrefetchBytes);
      V sums[kTokens];
      V::template DotQ4<kTokens>(panel, codes, x.code_stride, sums);
      const V scale = LoadQ4Scales<V>(panel, wide, 0), minimum = LoadQ4Scales<V>(panel, wide, 1);
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) {
        const float* x_scale = scales + t * x.scale_stride;
        V& sum = acc[tile][t];
        sum = V::Fma(sums[t], V::Mul(scale, V::Broadcast(x_scale[0])), sum);
        sum = V::Fma(minimum, V::Broadcast(x_scale[1]), sum);
      }
    }
  }
  for (int i = 0; i < 2 * kTokens; ++i)
    out[i / kTokens][i % kTokens] = acc[i / kTokens][i % kTokens];
}

}  // namespace baton::ops::cpu
