#pragma once

// 16 lanes as two AVX2 registers. The members are described in simd_portable.h.

#include <immintrin.h>

#include <cstdint>

#include "engine/ops/canonical_math.h"
#include "engine/ops/cpu/simd_256.h"

#ifndef BATON_INLINE
#define BATON_INLINE [[gnu::always_inline]] static inline
#endif

namespace baton::ops::cpu {

struct Avx2Vec {
  __m256 lo, hi;

  static constexpr int kGemmTokens = 6;  // 2 registers x 6 tokens = 12 of 16 registers
  static constexpr bool kChainsInTurn = true;
  static constexpr int kInt8Tokens = 2;
  static constexpr int kQ4Tokens = 4;
  static constexpr int kPrefetchBytes = 1024;
  static constexpr int kF32Tokens = 6;  // one chain x 2 registers x 6 tokens
  using Mask = Avx2Vec;

  BATON_INLINE Avx2Vec Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  BATON_INLINE Avx2Vec Broadcast(float x) {
    const __m256 v = _mm256_set1_ps(x);
    return {v, v};
  }
  BATON_INLINE Avx2Vec Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  BATON_INLINE void Store(float* p, Avx2Vec a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
  }
  BATON_INLINE Avx2Vec Add(Avx2Vec a, Avx2Vec b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
  }
  BATON_INLINE Avx2Vec Sub(Avx2Vec a, Avx2Vec b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
  }
  BATON_INLINE Avx2Vec Mul(Avx2Vec a, Avx2Vec b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
  }
  BATON_INLINE Avx2Vec Div(Avx2Vec a, Avx2Vec b) {
    return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
  }
  BATON_INLINE Avx2Vec Sqrt(Avx2Vec a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
  BATON_INLINE Avx2Vec Fma(Avx2Vec a, Avx2Vec b, Avx2Vec c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  }
  BATON_INLINE Avx2Vec Negate(Avx2Vec a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(a.lo, sign), _mm256_xor_ps(a.hi, sign)};
  }
  BATON_INLINE Mask Less(Avx2Vec a, Avx2Vec b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
  }
  BATON_INLINE Mask FirstLanes(int n) {
    const __m256i count = _mm256_set1_epi32(n);
    return {
        _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))),
        _mm256_castsi256_ps(
            _mm256_cmpgt_epi32(count, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)))};
  }
  BATON_INLINE Avx2Vec Select(Mask m, Avx2Vec a, Avx2Vec b) {
    return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
  }
  BATON_INLINE void Pow2(Avx2Vec magic, Avx2Vec* low, Avx2Vec* high) {
    Pow2Half(magic.lo, &low->lo, &high->lo);
    Pow2Half(magic.hi, &low->hi, &high->hi);
  }

  BATON_INLINE Avx2Vec PairsEven(const uint8_t* line) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(LoadInt(line), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(LoadInt(line + 32), 16))};
  }
  BATON_INLINE Avx2Vec PairsOdd(const uint8_t* line) {
    // Hides that PairsEven has read the line: reading it again is free, keeping it costs two
    // registers and spills.
    __asm__("" : "+r"(line));
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(LoadInt(line), mask)),
            _mm256_castsi256_ps(_mm256_and_si256(LoadInt(line + 32), mask))};
  }
  BATON_INLINE Avx2Vec RoundBf16(Avx2Vec a) { return {RoundBf16Half(a.lo), RoundBf16Half(a.hi)}; }
  BATON_INLINE void StoreBf16(uint16_t* p, Avx2Vec a) {
    const __m256i lo = _mm256_srli_epi32(_mm256_castps_si256(RoundBf16Half(a.lo)), 16);
    const __m256i hi = _mm256_srli_epi32(_mm256_castps_si256(RoundBf16Half(a.hi)), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8));
  }
  BATON_INLINE Avx2Vec LoadBf16(const uint16_t* p) {
    const __m128i lo = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i hi = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(lo), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(hi), 16))};
  }
  BATON_INLINE Avx2Vec LoadF16(const uint8_t* p) {
    const auto* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
  }
  BATON_INLINE Avx2Vec LoadFp8(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {FromFp8(_mm256_cvtepu8_epi32(bytes)),
            FromFp8(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
  }
  BATON_INLINE void StoreFp8(uint8_t* p, Avx2Vec a) {
    const __m256i words =
        _mm256_packus_epi32(ToFp8(a.lo), ToFp8(a.hi));  // lanes 0-3, 8-11 | 4-7, 12-15
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(p),
        _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
  }
  BATON_INLINE Avx2Vec LoadFp8Pairs(const uint8_t* p) {
    __m256i low, high;
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    Bf16FromFp8(_mm256_permute4x64_epi64(codes, 0xd8), &low, &high);
    return {_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)};
  }
  BATON_INLINE float ReduceMax(Avx2Vec a) {
    const __m256 eight = _mm256_max_ps(a.lo, a.hi);
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
  }
  BATON_INLINE void ZipBf16(uint8_t* line, const uint16_t* even, const uint16_t* odd) {
    Zip(line, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)),
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)));
  }
  BATON_INLINE void ZipFp8(uint8_t* line, const uint8_t* even, const uint8_t* odd) {
    const __m128i e = _mm_loadu_si128(reinterpret_cast<const __m128i*>(even));
    const __m128i o = _mm_loadu_si128(reinterpret_cast<const __m128i*>(odd));
    const __m256i codes = _mm256_set_m128i(_mm_unpackhi_epi8(e, o), _mm_unpacklo_epi8(e, o));
    __m256i low, high;
    Bf16FromFp8(_mm256_permute4x64_epi64(codes, 0xd8), &low, &high);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(line), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(line + 32), high);
  }
  BATON_INLINE Avx2Vec MaxMagnitude(Avx2Vec acc, Avx2Vec x) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return {MaxInt(acc.lo, _mm256_and_si256(_mm256_castps_si256(x.lo), mask)),
            MaxInt(acc.hi, _mm256_and_si256(_mm256_castps_si256(x.hi), mask))};
  }
  BATON_INLINE uint32_t LargestBits(Avx2Vec a) {
    return LargestOf8(_mm256_max_epi32(_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)));
  }
  BATON_INLINE int32_t SumInt8(const int8_t* codes) { return SumOf32(codes); }
  BATON_INLINE void Transpose(Avx2Vec* rows) {
    __m256 top[8], bottom[8];
    for (int i = 0; i < 8; ++i) top[i] = rows[i].lo;
    Transpose8(top);
    for (int i = 0; i < 8; ++i) bottom[i] = rows[i + 8].hi;
    Transpose8(bottom);
    __m256 right[8], left[8];
    for (int i = 0; i < 8; ++i) right[i] = rows[i].hi;
    for (int i = 0; i < 8; ++i) left[i] = rows[i + 8].lo;
    Transpose8(right);
    Transpose8(left);
    for (int i = 0; i < 8; ++i) rows[i] = {top[i], left[i]};
    for (int i = 0; i < 8; ++i) rows[i + 8] = {right[i], bottom[i]};
  }

  // Codes widened to 16 bits, so that vpmaddwd sums pairs exactly.
  using Code = int16_t;
  BATON_INLINE int CodeValue(const uint8_t* code) {
    return static_cast<int16_t>(code[0] | code[1] << 8);
  }
  BATON_INLINE void SetCode(uint8_t* code, int value) {
    code[0] = static_cast<uint8_t>(value);
    code[1] = value < 0 ? 0xff : 0;
  }
  struct CodeSums {
    __m256i v[4];  // each: 4 outputs x 2 partial sums
  };
  struct LineSums {};
  BATON_INLINE LineSums ZeroLineSums() { return {}; }
  BATON_INLINE CodeSums ZeroSums() {
    const __m256i zero = _mm256_setzero_si256();
    return {{zero, zero, zero, zero}};
  }
  BATON_INLINE void StoreCodes(uint8_t* p, Avx2Vec x, float inverse) {
    const __m256i words = _mm256_packs_epi32(ToCode(x.lo, inverse), ToCode(x.hi, inverse));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(words, 0xd8));
  }
  BATON_INLINE void StoreInt8(int8_t* p, Avx2Vec x, float inverse) {
    const __m256i words = _mm256_permute4x64_epi64(
        _mm256_packs_epi32(ToCode(x.lo, inverse), ToCode(x.hi, inverse)), 0xd8);
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(p),
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }
  template <int kTokens>
  BATON_INLINE void DotLine(
      const uint8_t* line, const Code* a, size_t stride, CodeSums* sums, LineSums* line_sums) {
    __m256i codes[kTokens];
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
      codes[t] = _mm256_set1_epi64x(
          *reinterpret_cast<const int64_t __attribute__((may_alias, aligned(2)))*>(a + t * stride));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256i w =
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(line + 16 * i)));
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        sums[t].v[i] = _mm256_add_epi32(sums[t].v[i], _mm256_madd_epi16(w, codes[t]));
      }
    }
  }
  BATON_INLINE Avx2Vec FinishSums(const CodeSums& sums, const LineSums& line_sums) {
    const __m256i lo = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums.v[0], sums.v[1]), 0xd8);
    const __m256i hi = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums.v[2], sums.v[3]), 0xd8);
    return {_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)};
  }
  BATON_INLINE Avx2Vec FromInt32(const int32_t* p) {
    const auto* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_cvtepi32_ps(_mm256_loadu_si256(q)),
            _mm256_cvtepi32_ps(_mm256_loadu_si256(q + 1))};
  }
  // Sums of 16 bits hold a group: 16 products of at most 15 * 127 each.
  template <int kTokens>
  BATON_INLINE void DotQ4(const uint8_t* tile, const int8_t* x, size_t stride, Avx2Vec* sums) {
    const __m256i four = _mm256_set1_epi8(15);
    __m256i lo[kTokens], hi[kTokens];
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) lo[t] = hi[t] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int line = 0; line < 4; ++line, tile += 64, x += 4) {
      __asm__("" : "+r"(tile), "+r"(x));  // a loop, whose sums stay in registers
      const __m256i a = LoadInt(tile), b = LoadInt(tile + 32);
      const __m256i a_low = _mm256_and_si256(a, four), b_low = _mm256_and_si256(b, four);
      const __m256i a_high = _mm256_and_si256(_mm256_srli_epi16(a, 4), four);
      const __m256i b_high = _mm256_and_si256(_mm256_srli_epi16(b, 4), four);
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) {
        // Sums in the order written: in any other they do not fit the registers.
        __m256i codes = FourCodes(x + t * stride);
        lo[t] = _mm256_add_epi16(lo[t], _mm256_maddubs_epi16(a_low, codes));
        hi[t] = _mm256_add_epi16(hi[t], _mm256_maddubs_epi16(b_low, codes));
        __asm__("" : "+x"(lo[t]), "+x"(hi[t]));
        codes = FourCodes(x + t * stride + 16);
        lo[t] = _mm256_add_epi16(lo[t], _mm256_maddubs_epi16(a_high, codes));
        hi[t] = _mm256_add_epi16(hi[t], _mm256_maddubs_epi16(b_high, codes));
        __asm__("" : "+x"(lo[t]), "+x"(hi[t]));
      }
    }
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      sums[t] = {_mm256_cvtepi32_ps(_mm256_madd_epi16(lo[t], ones)),
                 _mm256_cvtepi32_ps(_mm256_madd_epi16(hi[t], ones))};
    }
  }

 private:
  BATON_INLINE __m256i FourCodes(const int8_t* p) {
    return _mm256_set1_epi32(
        *reinterpret_cast<const int32_t __attribute__((may_alias, aligned(1)))*>(p));
  }
  BATON_INLINE __m256i LoadInt(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  BATON_INLINE __m256 MaxInt(__m256 a, __m256i b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), b));
  }
  BATON_INLINE void Pow2Half(__m256 magic, __m256* low, __m256* high) {
    const __m256i n = _mm256_sub_epi32(_mm256_castps_si256(magic),
                                       _mm256_castps_si256(_mm256_set1_ps(kRoundMagic)));
    const __m256i half = _mm256_srai_epi32(n, 1);
    const __m256i bias = _mm256_set1_epi32(127);
    *low = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    *high = _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(n, half), bias), 23));
  }
  BATON_INLINE __m256 RoundBf16Half(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    const __m256i picked = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan));
    return _mm256_castsi256_ps(
        _mm256_and_si256(picked, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  // 32 codes -> bf16 of codes 0-7 and 16-23 (low), 8-15 and 24-31 (high). Works on bytes: the high
  // byte of a bf16 comes from the code's high four bits, the low byte is the low four; codes whose
  // exponent's upper three bits are 0 (all subnormal ones among them) come from tables.
  BATON_INLINE void Bf16FromFp8(__m256i codes, __m256i* low, __m256i* high) {
    const auto table = [](__m128i bytes) { return _mm256_broadcastsi128_si256(bytes); };
    const __m256i highs = table(_mm_setr_epi8(0, 0x3d, 0x3e, 0x3f, 0x40, 0x41, 0x42, 0x43, -128,
                                              -67, -66, -65, -64, -63, -62, -61));
    const __m256i small_highs =
        table(_mm_setr_epi8(0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c,
                            0x3c, 0x3c, 0x3c, 0x3c));
    // What differs from the low four bits.
    const __m256i small_lows =
        table(_mm_setr_epi8(0, 0x10, -96, -16, 0x40, 0x70, 0x20, 0x10, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m256i four = _mm256_set1_epi8(15);
    const __m256i digit = _mm256_and_si256(codes, four);
    const __m256i large =
        _mm256_cmpgt_epi8(_mm256_and_si256(codes, _mm256_set1_epi8(0x70)), _mm256_setzero_si256());
    const __m256i index = _mm256_or_si256(digit, large);  // bit 7: the table gives 0
    __m256i upper = _mm256_shuffle_epi8(highs, _mm256_and_si256(_mm256_srli_epi16(codes, 4), four));
    upper = _mm256_or_si256(upper, _mm256_shuffle_epi8(small_highs, index));
    __m256i lower = _mm256_slli_epi16(digit, 4);
    lower = _mm256_xor_si256(lower, _mm256_shuffle_epi8(small_lows, index));
    const __m256i all = _mm256_set1_epi8(0x7f);
    const __m256i nan = _mm256_cmpeq_epi8(_mm256_and_si256(codes, all), all);
    upper = _mm256_or_si256(upper, _mm256_and_si256(nan, all));
    lower = _mm256_xor_si256(lower, _mm256_and_si256(nan, _mm256_set1_epi8(0x30)));
    *low = _mm256_unpacklo_epi8(lower, upper);
    *high = _mm256_unpackhi_epi8(lower, upper);
  }
  BATON_INLINE __m256 FromFp8(__m256i code) {
    const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi32(0x7f));
    const __m256i sign = _mm256_slli_epi32(_mm256_xor_si256(code, magnitude), 24);
    const __m256i shifted = _mm256_slli_epi32(magnitude, 20);
    const __m256i normal = _mm256_add_epi32(shifted, _mm256_set1_epi32(120 << 23));
    // 2^-6 * (1 + m / 8) - 2^-6: exact, and no f32 denormal appears on the way.
    const __m256 small =
        _mm256_sub_ps(_mm256_castsi256_ps(_mm256_add_epi32(shifted, _mm256_set1_epi32(121 << 23))),
                      _mm256_set1_ps(0.015625f));
    const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
    const __m256i is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
    __m256i bits = _mm256_blendv_epi8(normal, _mm256_castps_si256(small), is_small);
    bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc00000), is_nan);
    return _mm256_castsi256_ps(_mm256_or_si256(bits, sign));
  }
  BATON_INLINE __m256i ToFp8(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i sign = _mm256_srli_epi32(_mm256_xor_si256(bits, magnitude), 24);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 20), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(magnitude, _mm256_set1_epi32(0x7ffff)), odd);
    __m256i code = _mm256_sub_epi32(_mm256_srli_epi32(rounded, 20), _mm256_set1_epi32(120 << 3));
    const __m256 small = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(16384.0f));
    const __m256i small_code = _mm256_and_si256(_mm256_castps_si256(small), _mm256_set1_epi32(15));
    code = _mm256_blendv_epi8(code, small_code,
                              _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c800000), magnitude));
    code = _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7e),
                              _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x43dfffff)));
    code = _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7f),
                              _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000)));
    return _mm256_or_si256(code, sign);
  }
  // Interleaves 16 words with 16 words.
  BATON_INLINE void Zip(uint8_t* line, __m256i even, __m256i odd) {
    const __m256i low = _mm256_unpacklo_epi16(even, odd);   // pairs 0-3, 8-11
    const __m256i high = _mm256_unpackhi_epi16(even, odd);  // pairs 4-7, 12-15
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(line),
                        _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(line + 32),
                        _mm256_permute2x128_si256(low, high, 0x31));
  }
  BATON_INLINE __m256i ToCode(__m256 x, float inverse) {
    const __m256 magic = _mm256_fmadd_ps(x, _mm256_set1_ps(inverse), _mm256_set1_ps(kRoundMagic));
    return _mm256_sub_epi32(_mm256_castps_si256(magic),
                            _mm256_castps_si256(_mm256_set1_ps(kRoundMagic)));
  }
  BATON_INLINE void Transpose8(__m256* r) {
    __m256 t[8], s[8];
    for (int i = 0; i < 4; ++i) {
      t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
      s[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
      s[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
      s[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
      s[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      r[i] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x20);
      r[i + 4] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x31);
    }
  }
};

}  // namespace baton::ops::cpu
