#pragma once

// 16 lanes in plain C++: the vector type that is tested everywhere. simd_avx2.h and simd_avx512.h
// have the same members.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "engine/base/bf16.h"
#include "engine/base/dequant.h"
#include "engine/base/fp8.h"
#include "engine/ops/canonical_math.h"

#define BATON_INLINE [[gnu::always_inline]] static inline

namespace baton::ops::cpu {

struct PortableVec {
  float v[16];

  // Most tokens of one register tile.
  static constexpr int kGemmTokens = 6;
  static constexpr bool kChainsInTurn = true;  // in GEMM, of one parity of k, then of the other
  static constexpr int kInt8Tokens = 2;
  static constexpr int kQ4Tokens = 2;
  // How far ahead weights are fetched that come from memory (one token).
  static constexpr int kPrefetchBytes = 2048;
  static constexpr int kF32Tokens = 6;
  struct Mask {
    bool on[16];
  };

  template <typename F>
  BATON_INLINE PortableVec Make(F f) {
    PortableVec r;
    for (int i = 0; i < 16; ++i) r.v[i] = f(i);
    return r;
  }
  BATON_INLINE PortableVec Zero() { return Broadcast(0.0f); }
  BATON_INLINE PortableVec Broadcast(float x) {
    return Make([&](int) { return x; });
  }
  BATON_INLINE PortableVec Load(const float* p) {
    return Make([&](int i) { return p[i]; });
  }
  BATON_INLINE void Store(float* p, const PortableVec& a) { std::memcpy(p, a.v, sizeof(a.v)); }
  BATON_INLINE PortableVec Add(const PortableVec& a, const PortableVec& b) {
    return Make([&](int i) { return a.v[i] + b.v[i]; });
  }
  BATON_INLINE PortableVec Sub(const PortableVec& a, const PortableVec& b) {
    return Make([&](int i) { return a.v[i] - b.v[i]; });
  }
  BATON_INLINE PortableVec Mul(const PortableVec& a, const PortableVec& b) {
    return Make([&](int i) { return a.v[i] * b.v[i]; });
  }
  BATON_INLINE PortableVec Div(const PortableVec& a, const PortableVec& b) {
    return Make([&](int i) { return a.v[i] / b.v[i]; });
  }
  BATON_INLINE PortableVec Sqrt(const PortableVec& a) {
    return Make([&](int i) { return std::sqrt(a.v[i]); });
  }
  BATON_INLINE PortableVec Fma(const PortableVec& a, const PortableVec& b, const PortableVec& c) {
    return Make([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
  }
  BATON_INLINE PortableVec Negate(const PortableVec& a) {
    return Make([&](int i) { return -a.v[i]; });
  }
  BATON_INLINE Mask Less(const PortableVec& a, const PortableVec& b) {
    Mask m;
    for (int i = 0; i < 16; ++i) m.on[i] = a.v[i] < b.v[i];
    return m;
  }
  // Lanes 0..n-1.
  BATON_INLINE Mask FirstLanes(int n) {
    Mask m;
    for (int i = 0; i < 16; ++i) m.on[i] = i < n;
    return m;
  }
  BATON_INLINE PortableVec Select(const Mask& m, const PortableVec& a, const PortableVec& b) {
    return Make([&](int i) { return m.on[i] ? a.v[i] : b.v[i]; });
  }
  BATON_INLINE void Pow2(const PortableVec& magic, PortableVec* low, PortableVec* high) {
    for (int i = 0; i < 16; ++i) {
      F32x1 l, h;
      F32x1::Pow2({magic.v[i]}, &l, &h);
      low->v[i] = l.v;
      high->v[i] = h.v;
    }
  }

  // A line of 16 pairs of bf16: the even and the odd halves.
  BATON_INLINE PortableVec PairsEven(const uint8_t* line) {
    return Make([&](int i) { return base::FloatFromBits(Dword(line, i) << 16); });
  }
  BATON_INLINE PortableVec PairsOdd(const uint8_t* line) {
    return Make([&](int i) { return base::FloatFromBits(Dword(line, i) & 0xffff0000u); });
  }
  BATON_INLINE PortableVec RoundBf16(const PortableVec& a) {
    return Make([&](int i) { return base::RoundToBf16(a.v[i]); });
  }
  BATON_INLINE void StoreBf16(uint16_t* p, const PortableVec& a) {
    for (int i = 0; i < 16; ++i) p[i] = base::Bf16FromFloat(a.v[i]);
  }
  BATON_INLINE PortableVec LoadBf16(const uint16_t* p) {
    return Make([&](int i) { return base::FloatFromBf16(p[i]); });
  }
  BATON_INLINE PortableVec LoadF16(const uint8_t* p) {
    return Make(
        [&](int i) { return base::F16ToF32(static_cast<uint16_t>(p[2 * i] | p[2 * i + 1] << 8)); });
  }
  BATON_INLINE PortableVec LoadFp8(const uint8_t* p) {
    return Make([&](int i) { return base::FloatFromFp8(p[i]); });
  }
  BATON_INLINE void StoreFp8(uint8_t* p, const PortableVec& a) {
    for (int i = 0; i < 16; ++i) p[i] = base::Fp8FromFloat(a.v[i]);
  }
  // 32 values as 16 dwords of bf16 pairs.
  BATON_INLINE PortableVec LoadFp8Pairs(const uint8_t* p) {
    return Make([&](int i) {
      const uint32_t low = base::Bf16FromFloat(base::FloatFromFp8(p[2 * i]));
      const uint32_t high = base::Bf16FromFloat(base::FloatFromFp8(p[2 * i + 1]));
      return base::FloatFromBits(low | high << 16);
    });
  }
  BATON_INLINE float ReduceMax(const PortableVec& a) {
    float most = a.v[0];
    for (int i = 1; i < 16; ++i) most = most < a.v[i] ? a.v[i] : most;
    return most;
  }
  // Stores lo and hi as 16 pairs of bf16; both hold bf16 values.
  BATON_INLINE void StorePairs(uint8_t* line, const PortableVec& even, const PortableVec& odd) {
    for (int i = 0; i < 16; ++i) {
      const uint32_t pair =
          (base::FloatBits(even.v[i]) >> 16) | (base::FloatBits(odd.v[i]) & 0xffff0000u);
      std::memcpy(line + 4 * i, &pair, 4);
    }
  }
  // 16 values of each of two rows as 16 pairs (even row in the low half).
  BATON_INLINE void ZipBf16(uint8_t* line, const uint16_t* even, const uint16_t* odd) {
    StorePairs(line, LoadBf16(even), LoadBf16(odd));
  }
  BATON_INLINE void ZipFp8(uint8_t* line, const uint8_t* even, const uint8_t* odd) {
    StorePairs(line, LoadFp8(even), LoadFp8(odd));
  }

  // The larger magnitude, compared as integers (NaN is the largest). `acc` holds magnitudes.
  BATON_INLINE PortableVec MaxMagnitude(const PortableVec& acc, const PortableVec& x) {
    return Make([&](int i) {
      const uint32_t a = base::FloatBits(acc.v[i]), b = base::FloatBits(x.v[i]) & 0x7fffffffu;
      return base::FloatFromBits(a > b ? a : b);
    });
  }
  // The largest of magnitudes, as bits.
  BATON_INLINE uint32_t LargestBits(const PortableVec& a) {
    uint32_t most = 0;
    for (int i = 0; i < 16; ++i)
      most = base::FloatBits(a.v[i]) > most ? base::FloatBits(a.v[i]) : most;
    return most;
  }
  BATON_INLINE int32_t SumInt8(const int8_t* codes) {  // 32
    int32_t sum = 0;
    for (int i = 0; i < 32; ++i) sum += codes[i];
    return sum;
  }
  // Transposes 16 rows of 16 dwords, in place.
  BATON_INLINE void Transpose(PortableVec* rows) {
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < i; ++j) {
        const uint32_t a = base::FloatBits(rows[i].v[j]), b = base::FloatBits(rows[j].v[i]);
        std::memcpy(&rows[i].v[j], &b, 4);
        std::memcpy(&rows[j].v[i], &a, 4);
      }
    }
  }

  // int8 dots: codes are kept as Code, sums of a line of 16 outputs x 4 k go to CodeSums.
  using Code = int8_t;
  BATON_INLINE int CodeValue(const uint8_t* code) { return static_cast<int8_t>(*code); }
  BATON_INLINE void SetCode(uint8_t* code, int value) { *code = static_cast<uint8_t>(value); }
  struct CodeSums {
    int32_t v[16];
  };
  BATON_INLINE CodeSums ZeroSums() { return CodeSums{}; }
  // Codes from values * inverse; count of 16.
  BATON_INLINE void StoreCodes(uint8_t* p, const PortableVec& x, float inverse) {
    for (int i = 0; i < 16; ++i) {
      const float magic = std::fma(x.v[i], inverse, kRoundMagic);
      p[i] = static_cast<uint8_t>(base::FloatBits(magic) - base::FloatBits(kRoundMagic));
    }
  }
  BATON_INLINE void StoreInt8(int8_t* p, const PortableVec& x, float inverse) {
    StoreCodes(reinterpret_cast<uint8_t*>(p), x, inverse);
  }
  // What a level needs to sum once for all tokens.
  struct LineSums {};
  BATON_INLINE LineSums ZeroLineSums() { return {}; }
  template <int kTokens>
  BATON_INLINE void DotLine(
      const uint8_t* line, const Code* a, size_t stride, CodeSums* sums, LineSums* line_sums) {
    for (int t = 0; t < kTokens; ++t) {
      for (int i = 0; i < 64; ++i)
        sums[t].v[i / 4] += int32_t{a[t * stride + i % 4]} * int32_t{static_cast<int8_t>(line[i])};
    }
  }
  // As f32.
  BATON_INLINE PortableVec FinishSums(const CodeSums& sums, const LineSums& line_sums) {
    return Make([&](int i) { return static_cast<float>(sums.v[i]); });
  }
  BATON_INLINE PortableVec FromInt32(const int32_t* p) {
    return Make([&](int i) { return static_cast<float>(p[i]); });
  }
  // The codes of a kQ4 tile by the 32 codes (within +-127) of each token, as f32.
  template <int kTokens>
  BATON_INLINE void DotQ4(const uint8_t* tile, const int8_t* x, size_t stride, PortableVec* sums) {
    for (int t = 0; t < kTokens; ++t) {
      int32_t sum[16] = {};
      for (int i = 0; i < 256; ++i) {
        const int8_t* at = x + t * stride + i / 64 * 4 + i % 4;
        sum[i % 64 / 4] += int32_t{at[0]} * (tile[i] & 15) + int32_t{at[16]} * (tile[i] >> 4);
      }
      sums[t] = FromInt32(sum);
    }
  }

 private:
  BATON_INLINE uint32_t Dword(const uint8_t* line, int i) {
    uint32_t value;
    std::memcpy(&value, line + 4 * i, 4);
    return value;
  }
};

}  // namespace baton::ops::cpu
