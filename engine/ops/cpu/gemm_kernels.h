#pragma once

// Dots of a panel of 32 outputs with 1..n tokens in the canonical order, and their fused epilogues,
// over a vector type V of 16 lanes (16 outputs). GEMM and GEMV are the same code with other tile
// sizes.

#include <cstddef>
#include <cstdint>

#include "engine/ops/cpu/input_kernels.h"
#include "engine/ops/cpu/kernel_args.h"
#include "engine/ops/cpu/q4_kernels.h"

namespace baton::ops::cpu {

// Dots of one tile (16 outputs) with kTokens rows of a over some steps of 16 lines, `step_bytes`
// apart; their sums are added to acc [kTokens].
template <typename V, int kTokens>
struct TileSums {
  // One token reads weights from memory.
  [[gnu::always_inline]] static inline void Prefetch(const uint8_t* line) {
    if constexpr (kTokens == 1) __builtin_prefetch(line + V::kPrefetchBytes);
  }
  // Several tokens keep a panel busy for so long that the next one can come from memory meanwhile:
  // it lies `ahead` bytes behind this one. 0: nothing follows, or it is in a cache.
  [[gnu::always_inline]] static inline void PrefetchAhead(const uint8_t* tile, size_t ahead) {
    if (kTokens == 1 || ahead == 0) return;
#pragma GCC unroll 16
    for (int line = 0; line < 16; ++line) __builtin_prefetch(tile + ahead + 64 * line, 0, 2);
  }

  // bf16: 32 k a step. a: f32 rows of bf16 values. The even and the odd chain of each output stay
  // in registers over a step.
  [[gnu::always_inline]] static inline void Bf16(const float* a,
                                                 size_t stride,
                                                 const uint8_t* b,
                                                 size_t step_bytes,
                                                 int num_steps,
                                                 size_t ahead,
                                                 V* acc) {
    if constexpr (V::kChainsInTurn && kTokens > 3) {
      ChainsInTurn(a, stride, b, step_bytes, num_steps, ahead, acc);
      return;
    }
    constexpr int kUnroll = kTokens == 1 ? 16 : 4;  // pairs
    for (int step = 0; step < num_steps; ++step, b += step_bytes, a += 32) {
      PrefetchAhead(b, ahead);
      V even[kTokens], odd[kTokens];
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) even[t] = odd[t] = V::Zero();
      const float* x = a;
      const uint8_t* lines = b;
#pragma GCC unroll 1
      for (int group = 0; group < 16 / kUnroll; ++group, x += 2 * kUnroll, lines += 64 * kUnroll) {
        // Hides where the pointers come from: the compiler would keep one for each access.
        __asm__("" : "+r"(x), "+r"(lines));
#pragma GCC unroll 16
        for (int pair = 0; pair < kUnroll; ++pair) {
          Prefetch(lines + 64 * pair);
          const V w = V::PairsEven(lines + 64 * pair);
#pragma GCC unroll 16
          for (int t = 0; t < kTokens; ++t)
            even[t] = V::Fma(V::Broadcast(x[t * stride + 2 * pair]), w, even[t]);
          const V v = V::PairsOdd(lines + 64 * pair);
#pragma GCC unroll 16
          for (int t = 0; t < kTokens; ++t)
            odd[t] = V::Fma(V::Broadcast(x[t * stride + 2 * pair + 1]), v, odd[t]);
        }
      }
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) acc[t] = V::Add(acc[t], V::Add(even[t], odd[t]));
    }
  }

  // The same with all even chains of a step before its odd ones: twice the tokens for the same
  // registers, so half the work on weights. For vector types of few registers; a function of its
  // own, or the compiler spends them on the caller's pointers.
  [[gnu::noinline]] static void ChainsInTurn(const float* a,
                                             size_t stride,
                                             const uint8_t* b,
                                             size_t step_bytes,
                                             int num_steps,
                                             size_t ahead,
                                             V* acc) {
    for (int step = 0; step < num_steps; ++step, b += step_bytes, a += 32) {
      PrefetchAhead(b, ahead);
      V even[kTokens], odd[kTokens];
      alignas(64) float saved[kTokens * 16];
      Chain<false>(a, stride, b, even);
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) V::Store(saved + 16 * t, even[t]);
      __asm__ volatile("" ::: "memory");  // they stay there: no register is left
      Chain<true>(a, stride, b, odd);
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t)
        acc[t] = V::Add(acc[t], V::Add(V::Load(saved + 16 * t), odd[t]));
    }
  }

  // One chain of each token over a step.
  template <bool kOdd>
  [[gnu::always_inline]] static inline void Chain(const float* a,
                                                  size_t stride,
                                                  const uint8_t* lines,
                                                  V* sum) {
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) sum[t] = V::Zero();
    const float* x = a + (kOdd ? 1 : 0);
    const float* x3 = x + 3 * stride;  // rows 3, 4, 5 by the same three distances as rows 0, 1, 2
#pragma GCC unroll 1
    for (int group = 0; group < 4; ++group, x += 8, x3 += 8, lines += 4 * 64) {
      __asm__("" : "+r"(x), "+r"(x3), "+r"(lines));  // as in Bf16
#pragma GCC unroll 16
      for (int pair = 0; pair < 4; ++pair) {
        const V w = kOdd ? V::PairsOdd(lines + 64 * pair) : V::PairsEven(lines + 64 * pair);
#pragma GCC unroll 16
        for (int t = 0; t < kTokens; ++t) {
          const float* row = t < 3 ? x + t * stride : x3 + (t - 3) * stride;
          sum[t] = V::Fma(V::Broadcast(row[2 * pair]), w, sum[t]);
        }
      }
    }
  }

  // f32: 16 k a step; each output is one chain over lines [0, num_lines).
  [[gnu::always_inline]] static inline void F32(
      const float* a, size_t stride, const uint8_t* b, size_t step_bytes, int num_lines, V* acc) {
    V sum[kTokens];
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) sum[t] = acc[t];
    for (; num_lines > 0; num_lines -= 16, b += step_bytes, a += 16) {
      const int lines = num_lines < 16 ? num_lines : 16;
      for (int line = 0; line < lines; ++line) {
        Prefetch(b + 64 * line);
        const V w = V::Load(reinterpret_cast<const float*>(b + 64 * line));
#pragma GCC unroll 16
        for (int t = 0; t < kTokens; ++t)
          sum[t] = V::Fma(V::Broadcast(a[t * stride + line]), w, sum[t]);
      }
    }
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) acc[t] = sum[t];
  }

  // int8: 64 k a step, exact.
  [[gnu::always_inline]] static inline void Int8(const typename V::Code* a,
                                                 size_t stride,
                                                 const uint8_t* b,
                                                 size_t step_bytes,
                                                 int num_steps,
                                                 size_t ahead,
                                                 typename V::CodeSums* acc,
                                                 typename V::LineSums* line_acc) {
    typename V::CodeSums sums[kTokens];
    typename V::LineSums line_sums = *line_acc;
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) sums[t] = acc[t];
    for (int step = 0; step < num_steps; ++step, b += step_bytes, a += 64) {
      PrefetchAhead(b, ahead);
#pragma GCC unroll 2
      for (int line = 0; line < 16; ++line) {
        Prefetch(b + 64 * line);
        V::template DotLine<kTokens>(b + 64 * line, a + 4 * line, stride, sums, &line_sums);
      }
    }
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) acc[t] = sums[t];
    *line_acc = line_sums;
  }
};

// One token: both tiles of a step go before the next step, because weights come from memory, and
// should in the order they lie there. Two passes over a panel, a tile each, lose a third of the
// bandwidth. (More tokens find the panel in a cache, but for their first.)
template <int kTokens>
inline constexpr bool kStepByStep = kTokens == 1;

// Sums of one panel of f32 or bf16 lines for kTokens rows from zero, both tiles. `count`: lines of
// f32, steps of bf16.
template <typename V, bool kF32, int kTokens>
[[gnu::always_inline]] inline void PanelSums(const float* a,
                                             size_t stride,
                                             const uint8_t* panel,
                                             int count,
                                             V (*out)[kTokens],
                                             size_t ahead = 0) {
  using Sums = TileSums<V, kTokens>;
  constexpr size_t kStepBytes = 2 * kTileBytes;
  constexpr int kAtOnce = kF32 ? 16 : 1;  // of `count` in a step
  for (int i = 0; i < 2 * kTokens; ++i) out[i / kTokens][i % kTokens] = V::Zero();
  const int most = kStepByStep<kTokens> ? kAtOnce : count;
  for (; count > 0; count -= most, panel += kStepBytes, a += kF32 ? 16 : 32) {
    const int now = count < most ? count : most;
#pragma GCC unroll 2
    for (int tile = 0; tile < 2; ++tile) {
      if constexpr (kF32) {
        Sums::F32(a, stride, panel + tile * kTileBytes, kStepBytes, now, out[tile]);
      } else {
        Sums::Bf16(a, stride, panel + tile * kTileBytes, kStepBytes, now, ahead, out[tile]);
      }
    }
  }
}

// f.template operator()<size>(), size in [1, kMost].
template <int kMost, typename F>
[[gnu::always_inline]] inline void CallWithSize(int size, F f) {
  if constexpr (kMost > 1) {
    if (size < kMost) return CallWithSize<kMost - 1>(size, f);
  }
  f.template operator()<kMost>();
}

// Calls f.template operator()<n>(first) for groups of n rows that cover [begin, end), n at most
// kMost. As few groups as that takes, of nearly one size, since each is a pass over the weights
// whatever its size; of many sizes (each of which is code of its own) only a few.
template <int kMost, typename F>
[[gnu::always_inline]] inline void ForGroups(int begin, int end, F f) {
  constexpr int kEach = kMost <= 6 ? kMost : 3;  // every size up to here
  while (begin < end) {
    const int left = end - begin;
    int size = 0;
    if (kMost >= 12 && left >= 12) {
      f.template operator()<kMost >= 12 ? 12 : 1>(begin);
      size = 12;
    } else if (kMost >= 12 && left >= 6) {
      f.template operator()<kMost >= 12 ? 6 : 1>(begin);
      size = 6;
    } else {
      const int groups = (left + kEach - 1) / kEach;
      size = (left + groups - 1) / groups;
      CallWithSize<kEach>(size, [&]<int kSize>() { f.template operator()<kSize>(begin); });
    }
    begin += size;
  }
}

// int8: the exact sums of `num_steps` chunks of 64 k as f32, both tiles. `stride` in codes.
template <typename V, int kTokens>
[[gnu::always_inline]] inline void PanelSumsInt8(const typename V::Code* a,
                                                 size_t stride,
                                                 const uint8_t* panel,
                                                 int num_steps,
                                                 V (*out)[kTokens],
                                                 size_t ahead) {
  constexpr size_t kStepBytes = 2 * kTileBytes;
  typename V::CodeSums sums[2][kTokens];
  typename V::LineSums line_sums[2] = {V::ZeroLineSums(), V::ZeroLineSums()};
  for (int i = 0; i < 2 * kTokens; ++i) sums[i / kTokens][i % kTokens] = V::ZeroSums();
  const int now = kStepByStep<kTokens> ? 1 : num_steps;
  for (; num_steps > 0; num_steps -= now, panel += kStepBytes, a += 64) {
#pragma GCC unroll 2
    for (int tile = 0; tile < 2; ++tile) {
      TileSums<V, kTokens>::Int8(a, stride, panel + tile * kTileBytes, kStepBytes, now, ahead,
                                 sums[tile], &line_sums[tile]);
    }
  }
  for (int i = 0; i < 2 * kTokens; ++i) {
    const int tile = i / kTokens, t = i % kTokens;
    out[tile][t] = V::FinishSums(sums[tile][t], line_sums[tile]);
  }
}

// What becomes of the sums of one token and one panel: `low` over all of K, or (kAdd) `low` and
// `high` over its two halves.
template <typename V>
[[gnu::always_inline]] inline void FinishToken(
    const GemmArgs& args, int panel, int t, const V* low, const V* high) {
  if (args.epilogue == Epilogue::kSiluMul) {
    const int k = panel * kTileRows;
    const int left = args.num_rows / 2 - k;
    StoreInput(args.input_out, t, k, V::Mul(Silu(low[0]), low[1]), left < 16 ? left : 16);
    return;
  }
#pragma GCC unroll 2
  for (int tile = 0; tile < 2; ++tile) {
    const int row = panel * kPanelRows + tile * kTileRows;
    const int left = args.num_rows - row;
    if (left <= 0) return;
    float* out = args.out + static_cast<size_t>(t) * args.out_stride + row;
    V sum = low[tile];
    if (args.epilogue == Epilogue::kAdd) {
      sum = V::Add(LoadPartial<V>(out, left), V::Add(low[tile], high[tile]));
    } else if (args.bias != nullptr) {
      sum = V::Add(sum, LoadPartial<V>(args.bias + row, left));
    }
    StorePartial(out, sum, left);
  }
}

template <typename V>
struct Gemm {
  // Panels [begin, end) for all tokens. Each panel's weights are read from memory once.
  static void Panels(const GemmArgs& args, int begin, int end, const Scratch& scratch) {
    for (int panel = begin; panel < end; ++panel) {
      const uint8_t* data = args.w.data + static_cast<size_t>(panel) * args.w.panel_bytes;
      switch (args.w.dtype) {
        case Dtype::kF32:
          Tokens<Dtype::kF32>(args, data, panel);
          break;
        case Dtype::kInt8:
          Tokens<Dtype::kInt8>(args, data, panel);
          break;
        case Dtype::kQ4:
          Tokens<Dtype::kQ4>(args, data, panel);
          break;
        case Dtype::kBf16:
          Tokens<Dtype::kBf16>(args, data, panel);
          break;
      }
    }
  }

 private:
  // The first tokens bring the next panel; the others find it.
  static size_t Ahead(const GemmArgs& args, int panel, int t) {
    return t == 0 && (panel + 1) * kTileRows < args.num_rows ? args.w.panel_bytes : 0;
  }

  template <Dtype kDtype>
  static void Tokens(const GemmArgs& args, const uint8_t* data, int panel) {
    constexpr int kMost = kDtype == Dtype::kInt8  ? V::kInt8Tokens
                          : kDtype == Dtype::kQ4  ? V::kQ4Tokens
                          : kDtype == Dtype::kF32 ? V::kF32Tokens
                                                  : V::kGemmTokens;
    ForGroups<kMost>(0, args.num_tokens,
                     [&]<int kTokens>(int t) { Block<kDtype, kTokens>(args, data, panel, t); });
  }

  template <Dtype kDtype, int kTokens>
  static void Block(const GemmArgs& args, const uint8_t* data, int panel, int t) {
    V low[2][kTokens], high[2][kTokens];
    const bool halves = args.epilogue == Epilogue::kAdd;
    const int cut = halves ? args.w.cut_step : args.w.num_steps;
    Sums<kDtype, kTokens>(args, data, panel, t, 0, cut, low);
    Sums<kDtype, kTokens>(args, data, panel, t, cut, args.w.num_steps,
                          high);  // zeros where there is one part
    for (int i = 0; i < kTokens; ++i) {
      const V token_low[2] = {low[0][i], low[1][i]};
      const V token_high[2] = {high[0][i], high[1][i]};
      FinishToken(args, panel, t + i, token_low, token_high);
    }
  }

  // Sums of steps [from, to) of a panel for tokens [t, t + kTokens).
  template <Dtype kDtype, int kTokens>
  static void Sums(const GemmArgs& args,
                   const uint8_t* data,
                   int panel,
                   int t,
                   int from,
                   int to,
                   V (*out)[kTokens]) {
    const uint8_t* b = data + static_cast<size_t>(from) * 2 * kTileBytes;
    if constexpr (kDtype == Dtype::kInt8) {
      SumsInt8<kTokens>(args, b, panel, t, from, to, out);
    } else if constexpr (kDtype == Dtype::kQ4) {
      const int tile_bytes = args.w.wide_scales ? kQ4WideTileBytes : kQ4TileBytes;
      PanelSumsQ4<V, kTokens>(GroupsOf(args.x, t, from),
                              data + static_cast<size_t>(from) * 2 * tile_bytes, args.w.wide_scales,
                              to - from, out);
    } else {
      constexpr bool kF32 = kDtype == Dtype::kF32;
      constexpr int kStep = kF32 ? 16 : 32;
      const float* a = args.x.rows + static_cast<size_t>(t) * args.x.stride + from * kStep;
      const int end = to * kStep < args.w.cols ? to * kStep : args.w.cols;
      PanelSums<V, kF32, kTokens>(a, args.x.stride, b, kF32 ? end - from * kStep : to - from, out,
                                  Ahead(args, panel, t));
    }
  }

  template <int kTokens>
  [[gnu::always_inline]] static inline void SumsInt8(const GemmArgs& args,
                                                     const uint8_t* b,
                                                     int panel,
                                                     int t,
                                                     int from,
                                                     int to,
                                                     V (*out)[kTokens]) {
    const size_t stride = args.x.code_stride / sizeof(typename V::Code);
    const auto* a = reinterpret_cast<const typename V::Code*>(args.x.codes) +
                    static_cast<size_t>(t) * stride + 64 * from;
    PanelSumsInt8<V, kTokens>(a, stride, b, to - from, out, Ahead(args, panel, t));
    for (int tile = 0; tile < 2; ++tile) {
      const V scales = V::Load(args.w.row_scales + panel * kPanelRows + tile * kTileRows);
      for (int i = 0; i < kTokens; ++i) {
        out[tile][i] = V::Mul(out[tile][i], V::Mul(V::Broadcast(args.x.scales[t + i]), scales));
      }
    }
  }
};

}  // namespace baton::ops::cpu
