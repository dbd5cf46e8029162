#pragma once

// Eight tiles of 16 rows x 64 bytes, twice: the registers of AMX, and a model of them in software
// that gives the same bits, so that the AMX kernels run and are tested on machines without AMX.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "engine/base/bf16.h"
#include "engine/ops/canonical_math.h"

namespace baton::ops::cpu {

// AMX itself, in inline assembly: GCC 12's intrinsics declare too few memory operands (the stores
// that fill the configuration, and those before a tile load, may be dropped at -O3). Configure
// before use in each thread, Release after.
struct HardwareTiles {
  [[gnu::always_inline]] inline void Configure() {
    struct alignas(64) Config {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    };
    static constexpr Config kConfig = {.palette = 1,
                                       .start_row = 0,
                                       .reserved = {},
                                       .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                       .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    __asm__ volatile("ldtilecfg %0" : : "m"(kConfig) : "memory");
  }
  [[gnu::always_inline]] inline void Release() { __asm__ volatile("tilerelease" : : : "memory"); }
  template <int kTile>
  [[gnu::always_inline]] inline void Zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "n"(kTile));
  }
  template <int kTile>
  [[gnu::always_inline]] inline void Load(const void* p, size_t stride) {
    __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0"
                     :
                     : "n"(kTile), "r"(p), "r"(stride)
                     : "memory");
  }
  template <int kTile>
  [[gnu::always_inline]] inline void Store(void* p, size_t stride) {
    __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)"
                     :
                     : "n"(kTile), "r"(p), "r"(stride)
                     : "memory");
  }
  // tile c += a (16 rows x 32 bf16) * b (16 lines of 16 pairs).
  template <int kC, int kA, int kB>
  [[gnu::always_inline]] inline void DotBf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(kC), "n"(kA), "n"(kB));
  }
  // tile c += a (16 rows x 64 int8) * b (16 lines of 16 quadruples), int32.
  template <int kC, int kA, int kB>
  [[gnu::always_inline]] inline void DotInt8() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(kC), "n"(kA), "n"(kB));
  }
  // A tile that is loaded soon.
  [[gnu::always_inline]] inline void Prefetch(const uint8_t* tile) {
#pragma GCC unroll 16
    for (int line = 0; line < 16; ++line) __builtin_prefetch(tile + 64 * line);
  }
};

struct SoftwareTiles {
  alignas(64) uint8_t tiles[8][1024];

  void Configure() { std::memset(tiles, 0, sizeof(tiles)); }
  void Release() {}
  template <int kTile>
  void Zero() {
    std::memset(tiles[kTile], 0, 1024);
  }
  template <int kTile>
  void Load(const void* p, size_t stride) {
    for (int row = 0; row < 16; ++row)
      std::memcpy(tiles[kTile] + 64 * row, static_cast<const uint8_t*>(p) + row * stride, 64);
  }
  template <int kTile>
  void Store(void* p, size_t stride) {
    for (int row = 0; row < 16; ++row)
      std::memcpy(static_cast<uint8_t*>(p) + row * stride, tiles[kTile] + 64 * row, 64);
  }
  template <int kC, int kA, int kB>
  void DotBf16() {
    for (int row = 0; row < 16; ++row) {
      for (int col = 0; col < 16; ++col) {
        float chain[2] = {0, 0}, sum;
        for (int k = 0; k < 32; ++k) {
          const float a = Bf16At(tiles[kA] + 64 * row + 2 * k);
          const float b = Bf16At(tiles[kB] + 64 * (k / 2) + 4 * col + 2 * (k % 2));
          chain[k % 2] = F32x1::Fma({a}, {b}, {chain[k % 2]}).v;
        }
        uint8_t* at = tiles[kC] + 64 * row + 4 * col;
        std::memcpy(&sum, at, 4);
        sum = sum + (chain[0] + chain[1]);
        std::memcpy(at, &sum, 4);
      }
    }
  }
  template <int kC, int kA, int kB>
  void DotInt8() {
    for (int row = 0; row < 16; ++row) {
      for (int col = 0; col < 16; ++col) {
        uint8_t* at = tiles[kC] + 64 * row + 4 * col;
        int32_t sum;
        std::memcpy(&sum, at, 4);
        for (int k = 0; k < 64; ++k) {
          const int a = static_cast<int8_t>(tiles[kA][64 * row + k]);
          sum += a * static_cast<int8_t>(tiles[kB][64 * (k / 4) + 4 * col + k % 4]);
        }
        std::memcpy(at, &sum, 4);
      }
    }
  }
  void Prefetch(const uint8_t* tile) {}

 private:
  static float Bf16At(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return base::FloatFromBf16(bits);
  }
};

}  // namespace baton::ops::cpu
