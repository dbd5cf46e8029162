#pragma once

// 16 lanes as one AVX-512 register. The members are described in simd_portable.h. Needs F, BW, DQ,
// VL and VNNI.

#include <immintrin.h>

#include <cstdint>

#include "engine/ops/canonical_math.h"
#include "engine/ops/cpu/simd_256.h"

#ifndef BATON_INLINE
#define BATON_INLINE [[gnu::always_inline]] static inline
#endif

namespace baton::ops::cpu {

struct Avx512Vec {
  __m512 v;

  static constexpr int kGemmTokens = 12;  // 2 chains x 12 tokens = 24 of 32 registers
  static constexpr bool kChainsInTurn = false;
  static constexpr int kInt8Tokens = 12;
  static constexpr int kQ4Tokens = 12;
  static constexpr int kPrefetchBytes = 2048;
  static constexpr int kF32Tokens = 12;
  struct Mask {
    __mmask16 m;
  };

  BATON_INLINE Avx512Vec Zero() { return {_mm512_setzero_ps()}; }
  BATON_INLINE Avx512Vec Broadcast(float x) { return {_mm512_set1_ps(x)}; }
  BATON_INLINE Avx512Vec Load(const float* p) { return {_mm512_loadu_ps(p)}; }
  BATON_INLINE void Store(float* p, Avx512Vec a) { _mm512_storeu_ps(p, a.v); }
  BATON_INLINE Avx512Vec Add(Avx512Vec a, Avx512Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
  BATON_INLINE Avx512Vec Sub(Avx512Vec a, Avx512Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
  BATON_INLINE Avx512Vec Mul(Avx512Vec a, Avx512Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
  BATON_INLINE Avx512Vec Div(Avx512Vec a, Avx512Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
  BATON_INLINE Avx512Vec Sqrt(Avx512Vec a) { return {_mm512_sqrt_ps(a.v)}; }
  BATON_INLINE Avx512Vec Fma(Avx512Vec a, Avx512Vec b, Avx512Vec c) {
    return {_mm512_fmadd_ps(a.v, b.v, c.v)};
  }
  BATON_INLINE Avx512Vec Negate(Avx512Vec a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
  BATON_INLINE Mask Less(Avx512Vec a, Avx512Vec b) {
    return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)};
  }
  BATON_INLINE Mask FirstLanes(int n) {
    const uint32_t lanes = n <= 0 ? 0u : n >= 16 ? 0xffffu : (1u << n) - 1;
    return {static_cast<__mmask16>(lanes)};
  }
  BATON_INLINE Avx512Vec Select(Mask m, Avx512Vec a, Avx512Vec b) {
    return {_mm512_mask_blend_ps(m.m, b.v, a.v)};
  }
  BATON_INLINE void Pow2(Avx512Vec magic, Avx512Vec* low, Avx512Vec* high) {
    const __m512i n =
        _mm512_sub_epi32(Bits(magic), _mm512_castps_si512(_mm512_set1_ps(kRoundMagic)));
    const __m512i half = _mm512_srai_epi32(n, 1);
    const __m512i bias = _mm512_set1_epi32(127);
    *low = FromBits(_mm512_slli_epi32(_mm512_add_epi32(half, bias), 23));
    *high = FromBits(_mm512_slli_epi32(_mm512_add_epi32(_mm512_sub_epi32(n, half), bias), 23));
  }

  BATON_INLINE Avx512Vec PairsEven(const uint8_t* line) {
    return FromBits(_mm512_slli_epi32(_mm512_loadu_si512(line), 16));
  }
  BATON_INLINE Avx512Vec PairsOdd(const uint8_t* line) {
    return FromBits(_mm512_and_si512(_mm512_loadu_si512(line),
                                     _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  BATON_INLINE Avx512Vec RoundBf16(Avx512Vec a) {
    const __m512i bits = Bits(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i picked =
        _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), rounded, quiet);
    return FromBits(_mm512_and_si512(picked, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  BATON_INLINE void StoreBf16(uint16_t* p, Avx512Vec a) {
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(Bits(RoundBf16(a)), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
  }
  BATON_INLINE Avx512Vec LoadBf16(const uint16_t* p) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return FromBits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  }
  BATON_INLINE Avx512Vec LoadF16(const uint8_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  BATON_INLINE Avx512Vec LoadFp8(const uint8_t* p) {
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi32(0x7f));
    const __m512i sign = _mm512_slli_epi32(_mm512_xor_si512(code, magnitude), 24);
    const __m512i shifted = _mm512_slli_epi32(magnitude, 20);
    const __m512i normal = _mm512_add_epi32(shifted, _mm512_set1_epi32(120 << 23));
    // 2^-6 * (1 + m / 8) - 2^-6: exact, and no f32 denormal appears on the way.
    const __m512 small =
        _mm512_sub_ps(_mm512_castsi512_ps(_mm512_add_epi32(shifted, _mm512_set1_epi32(121 << 23))),
                      _mm512_set1_ps(0.015625f));
    __m512i bits = _mm512_mask_blend_epi32(_mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8)),
                                           normal, _mm512_castps_si512(small));
    bits = _mm512_mask_blend_epi32(_mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f)),
                                   bits, _mm512_set1_epi32(0x7fc00000));
    return FromBits(_mm512_or_si512(bits, sign));
  }
  BATON_INLINE void StoreFp8(uint8_t* p, Avx512Vec a) {
    const __m512i bits = Bits(a);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __m512i sign = _mm512_srli_epi32(_mm512_xor_si512(bits, magnitude), 24);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(magnitude, 20), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(_mm512_add_epi32(magnitude, _mm512_set1_epi32(0x7ffff)), odd);
    __m512i code = _mm512_sub_epi32(_mm512_srli_epi32(rounded, 20), _mm512_set1_epi32(120 << 3));
    const __m512 small = _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_set1_ps(16384.0f));
    const __m512i small_code = _mm512_and_si512(_mm512_castps_si512(small), _mm512_set1_epi32(15));
    code = _mm512_mask_blend_epi32(
        _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x3c800000)), code, small_code);
    code =
        _mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x43dfffff)),
                                code, _mm512_set1_epi32(0x7e));
    code =
        _mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000)),
                                code, _mm512_set1_epi32(0x7f));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign)));
  }
  BATON_INLINE Avx512Vec LoadFp8Pairs(const uint8_t* p) {
    return Fp8ToBf16(_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
  }
  BATON_INLINE float ReduceMax(Avx512Vec a) { return _mm512_reduce_max_ps(a.v); }
  BATON_INLINE void ZipBf16(uint8_t* line, const uint16_t* even, const uint16_t* odd) {
    Zip(line, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)),
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)));
  }
  BATON_INLINE void ZipFp8(uint8_t* line, const uint8_t* even, const uint8_t* odd) {
    // Both rows behind one another in bytes, converted at once.
    const __m128i e = _mm_loadu_si128(reinterpret_cast<const __m128i*>(even));
    const __m128i o = _mm_loadu_si128(reinterpret_cast<const __m128i*>(odd));
    const __m512i words =
        _mm512_castps_si512(Fp8ToBf16(_mm512_cvtepu8_epi16(_mm256_set_m128i(o, e))).v);
    Zip(line, _mm512_castsi512_si256(words), _mm512_extracti64x4_epi64(words, 1));
  }
  BATON_INLINE Avx512Vec MaxMagnitude(Avx512Vec acc, Avx512Vec x) {
    return FromBits(
        _mm512_max_epi32(Bits(acc), _mm512_and_si512(Bits(x), _mm512_set1_epi32(0x7fffffff))));
  }
  BATON_INLINE uint32_t LargestBits(Avx512Vec a) {
    const __m512i bits = Bits(a);
    return LargestOf8(
        _mm256_max_epi32(_mm512_castsi512_si256(bits), _mm512_extracti64x4_epi64(bits, 1)));
  }
  BATON_INLINE int32_t SumInt8(const int8_t* codes) { return SumOf32(codes); }
  BATON_INLINE void Transpose(Avx512Vec* rows) {
    __m512 t[16], s[16];
    for (int i = 0; i < 8; ++i) {
      t[2 * i] = _mm512_unpacklo_ps(rows[2 * i].v, rows[2 * i + 1].v);
      t[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i].v, rows[2 * i + 1].v);
    }
    for (int i = 0; i < 4;
         ++i) {  // s[4 i + j], 128-bit lane l: column 4 l + j of rows 4 i .. 4 i + 3
      s[4 * i] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
      s[4 * i + 1] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
      s[4 * i + 2] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
      s[4 * i + 3] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    for (int j = 0; j < 4; ++j) {
      const __m512 low_even = _mm512_shuffle_f32x4(s[j], s[4 + j], 0x88);  // lanes 0, 2 of each
      const __m512 low_odd = _mm512_shuffle_f32x4(s[j], s[4 + j], 0xdd);   // lanes 1, 3
      const __m512 high_even = _mm512_shuffle_f32x4(s[8 + j], s[12 + j], 0x88);
      const __m512 high_odd = _mm512_shuffle_f32x4(s[8 + j], s[12 + j], 0xdd);
      rows[j].v = _mm512_shuffle_f32x4(low_even, high_even, 0x88);
      rows[4 + j].v = _mm512_shuffle_f32x4(low_odd, high_odd, 0x88);
      rows[8 + j].v = _mm512_shuffle_f32x4(low_even, high_even, 0xdd);
      rows[12 + j].v = _mm512_shuffle_f32x4(low_odd, high_odd, 0xdd);
    }
  }

  // Codes shifted by 128 into unsigned bytes, as vpdpbusd wants them; 128 times the weights' sum is
  // taken off at the end. Exact: nothing saturates, and wrapping sums come back.
  using Code = uint8_t;
  BATON_INLINE int CodeValue(const uint8_t* code) { return int{*code} - 128; }
  BATON_INLINE void SetCode(uint8_t* code, int value) { *code = static_cast<uint8_t>(value + 128); }
  struct CodeSums {
    __m512i v;
  };
  using LineSums = CodeSums;
  BATON_INLINE CodeSums ZeroSums() { return {_mm512_setzero_si512()}; }
  BATON_INLINE LineSums ZeroLineSums() { return {_mm512_setzero_si512()}; }
  BATON_INLINE void StoreCodes(uint8_t* p, Avx512Vec x, float inverse) {
    const __m512i codes = _mm512_add_epi32(ToCode(x, inverse), _mm512_set1_epi32(128));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(codes));
  }
  BATON_INLINE void StoreInt8(int8_t* p, Avx512Vec x, float inverse) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(ToCode(x, inverse)));
  }
  template <int kTokens>
  BATON_INLINE void DotLine(
      const uint8_t* line, const Code* a, size_t stride, CodeSums* sums, LineSums* line_sums) {
    const __m512i w = _mm512_loadu_si512(line);
    line_sums->v = _mm512_dpbusd_epi32(line_sums->v, _mm512_set1_epi8(-128), w);
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      const int32_t codes =
          *reinterpret_cast<const int32_t __attribute__((may_alias, aligned(1)))*>(a + t * stride);
      sums[t].v = _mm512_dpbusd_epi32(sums[t].v, _mm512_set1_epi32(codes), w);
    }
  }
  BATON_INLINE Avx512Vec FinishSums(const CodeSums& sums, const LineSums& line_sums) {
    return {_mm512_cvtepi32_ps(_mm512_sub_epi32(sums.v, line_sums.v))};
  }
  BATON_INLINE Avx512Vec FromInt32(const int32_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))};
  }
  template <int kTokens>
  BATON_INLINE void DotQ4(const uint8_t* tile, const int8_t* x, size_t stride, Avx512Vec* sums) {
    const __m512i four = _mm512_set1_epi8(15);
    __m512i acc[kTokens];
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) acc[t] = _mm512_setzero_si512();
#pragma GCC unroll 1
    for (int line = 0; line < 4; ++line, tile += 64, x += 4) {
      __asm__("" : "+r"(tile), "+r"(x));  // a loop, whose sums stay in registers
      const __m512i codes = _mm512_loadu_si512(tile);
      const __m512i low = _mm512_and_si512(codes, four);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi32(codes, 4), four);
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) {
        acc[t] = _mm512_dpbusd_epi32(acc[t], low, FourCodes(x + t * stride));
        acc[t] = _mm512_dpbusd_epi32(acc[t], high, FourCodes(x + t * stride + 16));
      }
    }
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) sums[t] = {_mm512_cvtepi32_ps(acc[t])};
  }

 private:
  BATON_INLINE __m512i FourCodes(const int8_t* p) {
    return _mm512_set1_epi32(
        *reinterpret_cast<const int32_t __attribute__((may_alias, aligned(1)))*>(p));
  }
  BATON_INLINE __m512i Bits(Avx512Vec a) { return _mm512_castps_si512(a.v); }
  BATON_INLINE Avx512Vec FromBits(__m512i bits) { return {_mm512_castsi512_ps(bits)}; }
  // Interleaves 16 words with 16 words.
  BATON_INLINE void Zip(uint8_t* line, __m256i even, __m256i odd) {
    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16);
    _mm512_storeu_si512(line, _mm512_or_si512(_mm512_cvtepu16_epi32(even), high));
  }
  // 16-bit lanes. The eight subnormal codes come from a table of bytes: low halves at 0..7, high
  // halves at 8..15.
  BATON_INLINE Avx512Vec Fp8ToBf16(__m512i code) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(
        0, 0, -128, -64, 0, 0x20, 0x40, 0x60, 0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c));
    const __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
    const __m512i sign = _mm512_slli_epi16(_mm512_xor_si512(code, magnitude), 8);
    const __m512i normal =
        _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    const __m512i index = _mm512_or_si512(
        magnitude, _mm512_slli_epi16(_mm512_add_epi16(magnitude, _mm512_set1_epi16(8)), 8));
    const __m512i small = _mm512_shuffle_epi8(table, index);
    __m512i bits = _mm512_mask_blend_epi16(_mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8)),
                                           normal, small);
    bits = _mm512_mask_blend_epi16(_mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f)),
                                   bits, _mm512_set1_epi16(0x7fc0));
    return FromBits(_mm512_or_si512(bits, sign));
  }
  BATON_INLINE __m512i ToCode(Avx512Vec x, float inverse) {
    const Avx512Vec magic = {
        _mm512_fmadd_ps(x.v, _mm512_set1_ps(inverse), _mm512_set1_ps(kRoundMagic))};
    return _mm512_sub_epi32(Bits(magic), _mm512_castps_si512(_mm512_set1_ps(kRoundMagic)));
  }
};

}  // namespace baton::ops::cpu
