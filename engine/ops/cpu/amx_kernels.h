#pragma once

// GEMM and attention dots over AMX tiles (or their model in software): 32 tokens x 32 outputs at a
// time in four accumulator tiles. One token, f32 and 4-bit weights and an f32 cache go to the
// vector kernels; all give the same bits. (kQ4 scales the sum of every 32 k in f32, and a tile that
// sums 64 k would have to be stored, scaled and zeroed for half of it at a time.)

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "engine/ops/cpu/attention_kernels.h"
#include "engine/ops/cpu/gemm_kernels.h"
#include "engine/ops/cpu/kernel_args.h"

namespace baton::ops::cpu {

// acc tiles 0..3 (rows of A x outputs of B, row-major) += A * B over `num_steps`; a and b point at
// the first step's two tiles. kRowTiles: 1 when at most 16 rows are wanted.
template <typename Tiles, bool kInt8, int kRowTiles>
[[gnu::always_inline]] inline void TileDots(Tiles& tiles,
                                            const uint8_t* a,
                                            size_t a_step,
                                            size_t a_row_tile,
                                            const uint8_t* b,
                                            int num_steps) {
  tiles.template Zero<0>();
  tiles.template Zero<1>();
  if constexpr (kRowTiles == 2) {
    tiles.template Zero<2>();
    tiles.template Zero<3>();
  }
  const auto dot = [&]<int kC, int kA, int kB>() __attribute__((always_inline)) {
    if constexpr (kInt8) {
      tiles.template DotInt8<kC, kA, kB>();
    } else {
      tiles.template DotBf16<kC, kA, kB>();
    }
  };
  for (int step = 0; step < num_steps; ++step, a += a_step, b += 2 * kTileBytes) {
    // Two steps ahead: worth 1.5x when the machine's tile loads are slow, nothing when they are
    // fast.
    tiles.Prefetch(b + 4 * kTileBytes);
    tiles.Prefetch(b + 5 * kTileBytes);
    tiles.Prefetch(a + 2 * a_step);
    tiles.template Load<4>(a, 64);
    tiles.template Load<6>(b, 64);
    dot.template operator()<0, 4, 6>();
    tiles.template Load<7>(b + kTileBytes, 64);
    dot.template operator()<1, 4, 7>();
    if constexpr (kRowTiles == 2) {
      tiles.Prefetch(a + a_row_tile + 2 * a_step);
      tiles.template Load<5>(a + a_row_tile, 64);
      dot.template operator()<2, 5, 6>();
      dot.template operator()<3, 5, 7>();
    }
  }
}

// Stores the accumulators as [32 rows][32 outputs], 128 bytes a row.
template <typename Tiles, int kRowTiles>
[[gnu::always_inline]] inline void StoreTiles(Tiles& tiles, void* out) {
  auto* p = static_cast<uint8_t*>(out);
  tiles.template Store<0>(p, 128);
  tiles.template Store<1>(p + 64, 128);
  if constexpr (kRowTiles == 2) {
    tiles.template Store<2>(p + 16 * 128, 128);
    tiles.template Store<3>(p + 16 * 128 + 64, 128);
  }
}

template <typename V, typename Tiles>
struct AmxGemm {
  static void Panels(const GemmArgs& args, int begin, int end, const Scratch& scratch) {
    const bool is_int8 = args.x.format == InputFormat::kTilesInt8;
    if (args.x.format != InputFormat::kTilesBf16 && !is_int8) {
      Gemm<V>::Panels(args, begin, end, scratch);
      return;
    }
    if (args.num_tokens == 1) {
      OneToken(args, begin, end, scratch);
      return;
    }
    Tiles tiles;
    tiles.Configure();
    for (int panel = begin; panel < end; ++panel) {
      const uint8_t* data = args.w.data + static_cast<size_t>(panel) * args.w.panel_bytes;
      for (int t = 0; t < args.num_tokens; t += 32) {
        const bool two = args.num_tokens - t > 16;
        if (is_int8) {
          two ? Block<true, 2>(tiles, args, data, panel, t)
              : Block<true, 1>(tiles, args, data, panel, t);
        } else {
          two ? Block<false, 2>(tiles, args, data, panel, t)
              : Block<false, 1>(tiles, args, data, panel, t);
        }
      }
    }
    tiles.Release();
  }

 private:
  template <bool kInt8, int kRowTiles>
  static void Block(Tiles& tiles, const GemmArgs& args, const uint8_t* data, int panel, int t) {
    alignas(64) float low[32 * 32], high[32 * 32] = {};
    const bool halves = args.epilogue == Epilogue::kAdd;
    const int cut = halves ? args.w.cut_step : args.w.num_steps;
    const uint8_t* a =
        args.x.codes + static_cast<size_t>(t / 32) * args.x.num_steps * 2 * kTileBytes;
    TileDots<Tiles, kInt8, kRowTiles>(tiles, a, 2 * kTileBytes, kTileBytes, data, cut);
    StoreTiles<Tiles, kRowTiles>(tiles, low);
    if (halves) {
      const size_t skip = static_cast<size_t>(cut) * 2 * kTileBytes;
      TileDots<Tiles, kInt8, kRowTiles>(tiles, a + skip, 2 * kTileBytes, kTileBytes, data + skip,
                                        args.w.num_steps - cut);
      StoreTiles<Tiles, kRowTiles>(tiles, high);
    }
    const int left = args.num_tokens - t;
    for (int i = 0; i < (left < 32 ? left : 32); ++i) {
      V token_low[2], token_high[2];
      for (int tile = 0; tile < 2; ++tile) {
        token_low[tile] = Sum<kInt8>(args, low + 32 * i + 16 * tile, t + i, panel, tile);
        token_high[tile] = Sum<kInt8>(args, high + 32 * i + 16 * tile, t + i, panel, tile);
      }
      FinishToken(args, panel, t + i, token_low, token_high);
    }
  }

  template <bool kInt8>
  [[gnu::always_inline]] static inline V Sum(
      const GemmArgs& args, const float* sums, int t, int panel, int tile) {
    if constexpr (kInt8) {
      const V scales = V::Load(args.w.row_scales + panel * kPanelRows + tile * kTileRows);
      return V::Mul(V::FromInt32(reinterpret_cast<const int32_t*>(sums)),
                    V::Mul(V::Broadcast(args.x.scales[t]), scales));
    } else {
      return V::Load(sums);
    }
  }

  // The row is expanded to what the vector kernels read.
  static void OneToken(const GemmArgs& args, int begin, int end, const Scratch& scratch) {
    GemmArgs one = args;
    one.x.rows = scratch.rows;
    if (args.x.format == InputFormat::kTilesBf16) {
      one.x.format = InputFormat::kRowsBf16;
      for (int k = 0; k < 32 * args.x.num_steps; k += 16) {
        V::Store(scratch.rows + k,
                 V::LoadBf16(reinterpret_cast<const uint16_t*>(TileAddress(args.x, 0, k, 2))));
      }
    } else {
      one.x.format = InputFormat::kRowsInt8;
      one.x.codes = reinterpret_cast<uint8_t*>(scratch.rows);
      for (int k = 0; k < 64 * args.x.num_steps; ++k) {
        V::SetCode(one.x.codes + k * sizeof(typename V::Code),
                   static_cast<int8_t>(*TileAddress(args.x, 0, k, 1)));
      }
    }
    Gemm<V>::Panels(one, begin, end, scratch);
  }
};

// Attention's dots: rows of q or p are tiles of 16; scratch.
template <typename V, typename Tiles>
struct AmxDots {
  static void Prepare(const AttentionTask& task, AttentionScratch* s, int num_rows) {
    if (task.cache.format == Cache::Format::kF32) return;
    const int num_steps = (task.cache.head_dim + 31) / 32;
    PackRows(s->q, kMaxHeadDim, 0, num_rows, num_steps, s->q_tiles);
  }

  static void Scores(const AttentionTask& task, AttentionScratch* s, int begin, int end) {
    if (task.cache.format == Cache::Format::kF32) {
      VectorDots<V>::Scores(task, s, begin, end);
      return;
    }
    const int num_steps = (task.cache.head_dim + 31) / 32;
    Tiles tiles;
    tiles.Configure();
    for (int panel = 0; panel < kBlockTokens / kPanelRows; ++panel) {
      const uint8_t* keys = s->keys + panel * static_cast<size_t>(num_steps) * 2 * kTileBytes;
      ForRowTiles(begin, end, [&]<int kRowTiles>(int row) {
        const size_t row_tile = static_cast<size_t>(num_steps) * kTileBytes;
        TileDots<Tiles, false, kRowTiles>(tiles, s->q_tiles + row / 16 * row_tile, kTileBytes,
                                          row_tile, keys, num_steps);
        float* out = s->p + row * kBlockTokens + panel * kPanelRows;
        constexpr size_t kStride = kBlockTokens * sizeof(float);
        tiles.template Store<0>(out, kStride);
        tiles.template Store<1>(out + 16, kStride);
        if constexpr (kRowTiles == 2) {
          tiles.template Store<2>(out + 16 * kBlockTokens, kStride);
          tiles.template Store<3>(out + 16 * kBlockTokens + 16, kStride);
        }
      });
    }
    tiles.Release();
  }

  static void Add(const AttentionTask& task, AttentionScratch* s, int begin, int end) {
    if (task.cache.format == Cache::Format::kF32) {
      VectorDots<V>::Add(task, s, begin, end);
      return;
    }
    PackRows(s->p, kBlockTokens, begin, end, 2, s->p_tiles);
    Tiles tiles;
    tiles.Configure();
    for (int panel = 0; panel * kPanelRows < task.cache.head_dim; ++panel) {
      const uint8_t* values = s->values + panel * 4 * size_t{kTileBytes};
      ForRowTiles(begin, end, [&]<int kRowTiles>(int row) {
        TileDots<Tiles, false, kRowTiles>(tiles, s->p_tiles + row / 16 * 2 * size_t{kTileBytes},
                                          kTileBytes, 2 * size_t{kTileBytes}, values, 2);
        StoreTiles<Tiles, kRowTiles>(tiles, s->sums);
        const int first = row < begin ? begin : row;
        const int last = row + 16 * kRowTiles < end ? row + 16 * kRowTiles : end;
        for (int r = first; r < last; ++r) {
          for (int tile = 0; tile < 2; ++tile) {
            float* out = s->out + r * kMaxHeadDim + panel * kPanelRows + 16 * tile;
            V::Store(out, V::Fma(V::Load(out), V::Broadcast(s->decay[r]),
                                 V::Load(s->sums + 32 * (r - row) + 16 * tile)));
          }
        }
      });
    }
    tiles.Release();
  }

 private:
  // f.template operator()<row tiles>(row) for tiles of 16 rows that cover [begin, end).
  template <typename F>
  [[gnu::always_inline]] static inline void ForRowTiles(int begin, int end, F f) {
    int row = begin / 16 * 16;
    for (; end - row > 16; row += 32) f.template operator()<2>(row);
    if (row < end) f.template operator()<1>(row);
  }

  // Rows [begin, end) of f32 that hold bf16 values -> [tile of 16 rows][step][16 rows][64 bytes].
  static void PackRows(
      const float* rows, int stride, int begin, int end, int num_steps, uint8_t* out) {
    for (int r = begin; r < end; ++r) {
      for (int k = 0; k < 32 * num_steps; k += 16) {
        uint8_t* to = out + (static_cast<size_t>(r / 16) * num_steps + k / 32) * kTileBytes +
                      r % 16 * 64 + k % 32 * 2;
        V::StoreBf16(reinterpret_cast<uint16_t*>(to), V::Load(rows + r * stride + k));
      }
    }
  }
};

}  // namespace baton::ops::cpu
