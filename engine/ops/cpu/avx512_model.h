#pragma once

// The AVX-512 instructions that simd_avx512.h uses, in software, as the instruction set reference
// describes them: so the AVX-512 and AMX kernels run, from their own sources, in the tests of
// machines without AVX-512 (avx512_model_names.h puts these in the place of the intrinsics). Where
// the machine has the instructions, tests/parity compares each function with them. Names and
// arguments are those of the intrinsics. Written with the compiler's generic vectors, for AVX2:
// loops over lanes take minutes to compile.

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace baton::ops::cpu::avx512_model {

#define BATON_MODEL [[gnu::always_inline]] static inline

template <typename T>
struct VectorOf {
  using Type [[gnu::vector_size(64)]] = T;
};
using Floats = VectorOf<float>::Type;
using Dwords = VectorOf<uint32_t>::Type;
using SignedDwords = VectorOf<int32_t>::Type;
using Words = VectorOf<uint16_t>::Type;
using SignedWords = VectorOf<int16_t>::Type;
using Bytes = VectorOf<uint8_t>::Type;

struct alignas(64) F512 {
  Floats v;
};
struct alignas(64) I512 {
  Dwords v;
};

// Both 256-bit halves of a register, for what generic vectors do not have.
struct Halves {
  __m256i lo, hi;
};
template <typename To, typename From>
BATON_MODEL To Cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
BATON_MODEL I512 Int(Dwords v) { return {v}; }
BATON_MODEL I512 Int(SignedDwords v) { return {reinterpret_cast<Dwords>(v)}; }
BATON_MODEL I512 Int(Words v) { return {reinterpret_cast<Dwords>(v)}; }
BATON_MODEL SignedDwords Signed(I512 a) { return reinterpret_cast<SignedDwords>(a.v); }
BATON_MODEL Words AsWords(I512 a) { return reinterpret_cast<Words>(a.v); }
BATON_MODEL SignedWords AsSignedWords(I512 a) { return reinterpret_cast<SignedWords>(a.v); }

// Bit i: lane i of a comparison is true (all ones).
BATON_MODEL __mmask16 MaskOf(SignedDwords lanes) {
  const auto h = Cast<Halves>(lanes);
  return static_cast<__mmask16>(_mm256_movemask_ps(_mm256_castsi256_ps(h.lo)) |
                                _mm256_movemask_ps(_mm256_castsi256_ps(h.hi)) << 8);
}
BATON_MODEL __mmask32 MaskOf(SignedWords lanes) {
  const auto h = Cast<Halves>(lanes);  // packs: words 0-7, 16-23, 8-15, 24-31
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(h.lo, h.hi), 0xd8);
  return static_cast<__mmask32>(_mm256_movemask_epi8(bytes));
}
// All ones in lane i where bit i is set.
BATON_MODEL SignedDwords LanesOf(__mmask16 mask) {
  const SignedDwords bits = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                             1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  return (bits & int32_t{mask}) != 0;
}
BATON_MODEL SignedWords LanesOf(__mmask32 mask) {
  SignedWords lanes;
  for (int i = 0; i < 32; ++i) lanes[i] = static_cast<int16_t>(-static_cast<int>(mask >> i & 1u));
  return lanes;
}

// Loads, stores, constants.
BATON_MODEL F512 setzero_ps() { return {Floats{}}; }
BATON_MODEL I512 setzero_si512() { return {Dwords{}}; }
BATON_MODEL F512 set1_ps(float x) {
  return {Floats{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}};
}
BATON_MODEL I512 set1_epi32(int x) { return Int(SignedDwords{} + x); }
BATON_MODEL I512 set1_epi16(int16_t x) { return Int(Words{} + static_cast<uint16_t>(x)); }
BATON_MODEL I512 set1_epi8(char x) { return Cast<I512>(Bytes{} + static_cast<uint8_t>(x)); }
BATON_MODEL F512 loadu_ps(const void* p) {
  F512 r;
  std::memcpy(&r, p, sizeof(r));
  return r;
}
BATON_MODEL I512 loadu_si512(const void* p) {
  I512 r;
  std::memcpy(&r, p, sizeof(r));
  return r;
}
BATON_MODEL void storeu_ps(void* p, F512 a) { std::memcpy(p, &a, sizeof(a)); }
BATON_MODEL void storeu_si512(void* p, I512 a) { std::memcpy(p, &a, sizeof(a)); }
BATON_MODEL I512 broadcast_i32x4(__m128i a) {
  const __m256i two = _mm256_broadcastsi128_si256(a);
  return Cast<I512>(Halves{two, two});
}
BATON_MODEL I512 castps_si512(F512 a) { return Cast<I512>(a); }
BATON_MODEL F512 castsi512_ps(I512 a) { return Cast<F512>(a); }

// f32 arithmetic.
BATON_MODEL F512 add_ps(F512 a, F512 b) { return {a.v + b.v}; }
BATON_MODEL F512 sub_ps(F512 a, F512 b) { return {a.v - b.v}; }
BATON_MODEL F512 mul_ps(F512 a, F512 b) { return {a.v * b.v}; }
BATON_MODEL F512 div_ps(F512 a, F512 b) { return {a.v / b.v}; }
struct FloatHalves {
  __m256 lo, hi;
};
BATON_MODEL F512 sqrt_ps(F512 a) {
  const auto x = Cast<FloatHalves>(a);
  return Cast<F512>(FloatHalves{_mm256_sqrt_ps(x.lo), _mm256_sqrt_ps(x.hi)});
}
BATON_MODEL F512 fmadd_ps(F512 a, F512 b, F512 c) {
  const auto x = Cast<FloatHalves>(a), y = Cast<FloatHalves>(b), z = Cast<FloatHalves>(c);
  return Cast<F512>(
      FloatHalves{_mm256_fmadd_ps(x.lo, y.lo, z.lo), _mm256_fmadd_ps(x.hi, y.hi, z.hi)});
}
BATON_MODEL F512 xor_ps(F512 a, F512 b) { return Cast<F512>(Cast<I512>(a).v ^ Cast<I512>(b).v); }
BATON_MODEL F512 cvtph_ps(__m256i a) {
  return Cast<F512>(FloatHalves{_mm256_cvtph_ps(_mm256_castsi256_si128(a)),
                                _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))});
}
BATON_MODEL F512 cvtepi32_ps(I512 a) { return {__builtin_convertvector(Signed(a), Floats)}; }
// Not for NaN.
BATON_MODEL float reduce_max_ps(F512 a) {
  float most = a.v[0];
  for (int i = 1; i < 16; ++i) most = most < a.v[i] ? a.v[i] : most;
  return most;
}
// Predicates: less than (ordered) and unordered.
BATON_MODEL __mmask16 cmp_ps_mask(F512 a, F512 b, int predicate) {
  if (predicate == _CMP_LT_OQ) return MaskOf(a.v < b.v);
  return MaskOf((a.v != a.v) | (b.v != b.v));
}

// Integer arithmetic, wrapping.
BATON_MODEL I512 add_epi32(I512 a, I512 b) { return {a.v + b.v}; }
BATON_MODEL I512 sub_epi32(I512 a, I512 b) { return {a.v - b.v}; }
BATON_MODEL I512 and_si512(I512 a, I512 b) { return {a.v & b.v}; }
BATON_MODEL I512 or_si512(I512 a, I512 b) { return {a.v | b.v}; }
BATON_MODEL I512 xor_si512(I512 a, I512 b) { return {a.v ^ b.v}; }
// Counts below the width of a lane.
BATON_MODEL I512 slli_epi32(I512 a, int count) { return {a.v << count}; }
BATON_MODEL I512 srli_epi32(I512 a, int count) { return {a.v >> count}; }
BATON_MODEL I512 srai_epi32(I512 a, int count) { return Int(Signed(a) >> count); }
BATON_MODEL I512 max_epi32(I512 a, I512 b) {
  return Int(Signed(a) < Signed(b) ? Signed(b) : Signed(a));
}
BATON_MODEL I512 add_epi16(I512 a, I512 b) { return Int(AsWords(a) + AsWords(b)); }
BATON_MODEL I512 slli_epi16(I512 a, int count) { return Int(AsWords(a) << count); }
BATON_MODEL __mmask16 cmpeq_epi32_mask(I512 a, I512 b) { return MaskOf(Signed(a) == Signed(b)); }
BATON_MODEL __mmask16 cmplt_epi32_mask(I512 a, I512 b) { return MaskOf(Signed(a) < Signed(b)); }
BATON_MODEL __mmask16 cmpgt_epi32_mask(I512 a, I512 b) { return MaskOf(Signed(a) > Signed(b)); }
BATON_MODEL __mmask32 cmpeq_epi16_mask(I512 a, I512 b) {
  return MaskOf(AsSignedWords(a) == AsSignedWords(b));
}
BATON_MODEL __mmask32 cmplt_epi16_mask(I512 a, I512 b) {
  return MaskOf(AsSignedWords(a) < AsSignedWords(b));
}
// Groups of four: unsigned bytes of a times signed bytes of b. Nothing saturates.
BATON_MODEL I512 dpbusd_epi32(I512 sums, I512 a, I512 b) {
  Dwords sum = sums.v;
  for (int k = 0; k < 4; ++k) {
    const SignedDwords x = Signed({a.v >> (8 * k) & 0xffu});
    const SignedDwords y = Signed({b.v << (24 - 8 * k)}) >> 24;
    sum += reinterpret_cast<Dwords>(x * y);
  }
  return {sum};
}

// Blends: b where the mask is set. Shuffles: within and across 128-bit lanes.
BATON_MODEL F512 mask_blend_ps(__mmask16 mask, F512 a, F512 b) {
  return {LanesOf(mask) ? b.v : a.v};
}
BATON_MODEL I512 mask_blend_epi32(__mmask16 mask, I512 a, I512 b) {
  return {LanesOf(mask) ? b.v : a.v};
}
BATON_MODEL I512 mask_blend_epi16(__mmask32 mask, I512 a, I512 b) {
  return Int(LanesOf(mask) ? AsWords(b) : AsWords(a));
}
BATON_MODEL I512 shuffle_epi8(I512 a, I512 index) {
  const auto x = Cast<Halves>(a), at = Cast<Halves>(index);
  return Cast<I512>(Halves{_mm256_shuffle_epi8(x.lo, at.lo), _mm256_shuffle_epi8(x.hi, at.hi)});
}
BATON_MODEL F512 unpacklo_ps(F512 a, F512 b) {
  return {
      __builtin_shufflevector(a.v, b.v, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)};
}
BATON_MODEL F512 unpackhi_ps(F512 a, F512 b) {
  return {__builtin_shufflevector(a.v, b.v, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15,
                                  31)};
}
// Element i is number from[i] of a's sixteen and b's.
BATON_MODEL F512 Choose(F512 a, F512 b, Dwords from) {
#if defined(__clang__)  // has no such function
  F512 chosen;
  for (int i = 0; i < 16; ++i) chosen.v[i] = from[i] < 16 ? a.v[from[i]] : b.v[from[i] - 16];
  return chosen;
#else
  return {__builtin_shuffle(a.v, b.v, from)};
#endif
}
// Two bits of `control` choose each element: two of a, then two of b, in every 128-bit lane.
BATON_MODEL F512 shuffle_ps(F512 a, F512 b, int control) {
  Dwords from;
  for (int i = 0; i < 16; ++i) {
    const int offset = control >> 2 * (i % 4) & 3;
    from[i] = static_cast<uint32_t>((i % 4 < 2 ? 0 : 16) + i / 4 * 4 + offset);
  }
  return Choose(a, b, from);
}
// The same with whole lanes.
BATON_MODEL F512 shuffle_f32x4(F512 a, F512 b, int control) {
  Dwords from;
  for (int i = 0; i < 16; ++i) {
    const int lane = control >> 2 * (i / 4) & 3;
    from[i] = static_cast<uint32_t>((i < 8 ? 0 : 16) + 4 * lane + i % 4);
  }
  return Choose(a, b, from);
}

// Other widths.
BATON_MODEL __m256i castsi512_si256(I512 a) { return Cast<Halves>(a).lo; }
BATON_MODEL __m256i extracti64x4_epi64(I512 a, int half) {
  return half == 0 ? Cast<Halves>(a).lo : Cast<Halves>(a).hi;
}
BATON_MODEL __m256i cvtepi32_epi16(I512 a) {
  using Narrow [[gnu::vector_size(32)]] = uint16_t;
  return reinterpret_cast<__m256i>(__builtin_convertvector(a.v, Narrow));
}
BATON_MODEL __m128i cvtepi32_epi8(I512 a) {
  using Narrow [[gnu::vector_size(16)]] = uint8_t;
  return reinterpret_cast<__m128i>(__builtin_convertvector(a.v, Narrow));
}
BATON_MODEL I512 cvtepu16_epi32(__m256i a) {
  return Cast<I512>(Halves{_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)),
                           _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1))});
}
BATON_MODEL I512 cvtepu8_epi16(__m256i a) {
  return Cast<I512>(Halves{_mm256_cvtepu8_epi16(_mm256_castsi256_si128(a)),
                           _mm256_cvtepu8_epi16(_mm256_extracti128_si256(a, 1))});
}
BATON_MODEL I512 cvtepu8_epi32(__m128i a) {
  return Cast<I512>(Halves{_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))});
}

#undef BATON_MODEL

}  // namespace baton::ops::cpu::avx512_model
