#pragma once

// What both x86 vector types do in 256-bit registers.

#include <immintrin.h>

#include <cstdint>

namespace baton::ops::cpu {

// The largest of 8 signed numbers.
[[gnu::always_inline]] static inline int32_t LargestOf8(__m256i x) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}

// The sum of 32 codes. Read as they have been written, 16 at a time.
[[gnu::always_inline]] static inline int32_t SumOf32(const int8_t* codes) {
  const auto* p = reinterpret_cast<const __m128i*>(codes);
  const __m128i ones = _mm_set1_epi8(1);
  const __m128i words = _mm_add_epi16(_mm_maddubs_epi16(ones, _mm_loadu_si128(p)),
                                      _mm_maddubs_epi16(ones, _mm_loadu_si128(p + 1)));
  __m128i sum = _mm_madd_epi16(words, _mm_set1_epi16(1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

}  // namespace baton::ops::cpu
