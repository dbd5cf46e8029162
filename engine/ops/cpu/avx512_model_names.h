#pragma once

// Puts avx512_model.h in the place of the AVX-512 intrinsics and types for the rest of a source
// file, and renames Avx512Vec, whose templates would else be taken for those of the real one. An
// intrinsic missing here does not compile (it needs flags that the file is not built with).

#include "engine/ops/cpu/avx512_model.h"

#define Avx512Vec Avx512ModelVec
#define __m512 avx512_model::F512
#define __m512i avx512_model::I512
#undef _mm512_add_epi16
#define _mm512_add_epi16 avx512_model::add_epi16
#undef _mm512_add_epi32
#define _mm512_add_epi32 avx512_model::add_epi32
#undef _mm512_add_ps
#define _mm512_add_ps avx512_model::add_ps
#undef _mm512_and_si512
#define _mm512_and_si512 avx512_model::and_si512
#undef _mm512_broadcast_i32x4
#define _mm512_broadcast_i32x4 avx512_model::broadcast_i32x4
#undef _mm512_castps_si512
#define _mm512_castps_si512 avx512_model::castps_si512
#undef _mm512_castsi512_ps
#define _mm512_castsi512_ps avx512_model::castsi512_ps
#undef _mm512_castsi512_si256
#define _mm512_castsi512_si256 avx512_model::castsi512_si256
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask avx512_model::cmp_ps_mask
#undef _mm512_cmpeq_epi16_mask
#define _mm512_cmpeq_epi16_mask avx512_model::cmpeq_epi16_mask
#undef _mm512_cmpeq_epi32_mask
#define _mm512_cmpeq_epi32_mask avx512_model::cmpeq_epi32_mask
#undef _mm512_cmpgt_epi32_mask
#define _mm512_cmpgt_epi32_mask avx512_model::cmpgt_epi32_mask
#undef _mm512_cmplt_epi16_mask
#define _mm512_cmplt_epi16_mask avx512_model::cmplt_epi16_mask
#undef _mm512_cmplt_epi32_mask
#define _mm512_cmplt_epi32_mask avx512_model::cmplt_epi32_mask
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16 avx512_model::cvtepi32_epi16
#undef _mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi8 avx512_model::cvtepi32_epi8
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps avx512_model::cvtepi32_ps
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32 avx512_model::cvtepu16_epi32
#undef _mm512_cvtepu8_epi16
#define _mm512_cvtepu8_epi16 avx512_model::cvtepu8_epi16
#undef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32 avx512_model::cvtepu8_epi32
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps avx512_model::cvtph_ps
#undef _mm512_div_ps
#define _mm512_div_ps avx512_model::div_ps
#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32 avx512_model::dpbusd_epi32
#undef _mm512_extracti64x4_epi64
#define _mm512_extracti64x4_epi64 avx512_model::extracti64x4_epi64
#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps avx512_model::fmadd_ps
#undef _mm512_loadu_ps
#define _mm512_loadu_ps avx512_model::loadu_ps
#undef _mm512_loadu_si512
#define _mm512_loadu_si512 avx512_model::loadu_si512
#undef _mm512_mask_blend_epi16
#define _mm512_mask_blend_epi16 avx512_model::mask_blend_epi16
#undef _mm512_mask_blend_epi32
#define _mm512_mask_blend_epi32 avx512_model::mask_blend_epi32
#undef _mm512_mask_blend_ps
#define _mm512_mask_blend_ps avx512_model::mask_blend_ps
#undef _mm512_max_epi32
#define _mm512_max_epi32 avx512_model::max_epi32
#undef _mm512_mul_ps
#define _mm512_mul_ps avx512_model::mul_ps
#undef _mm512_or_si512
#define _mm512_or_si512 avx512_model::or_si512
#undef _mm512_reduce_max_ps
#define _mm512_reduce_max_ps avx512_model::reduce_max_ps
#undef _mm512_set1_epi16
#define _mm512_set1_epi16 avx512_model::set1_epi16
#undef _mm512_set1_epi32
#define _mm512_set1_epi32 avx512_model::set1_epi32
#undef _mm512_set1_epi8
#define _mm512_set1_epi8 avx512_model::set1_epi8
#undef _mm512_set1_ps
#define _mm512_set1_ps avx512_model::set1_ps
#undef _mm512_setzero_ps
#define _mm512_setzero_ps avx512_model::setzero_ps
#undef _mm512_setzero_si512
#define _mm512_setzero_si512 avx512_model::setzero_si512
#undef _mm512_shuffle_epi8
#define _mm512_shuffle_epi8 avx512_model::shuffle_epi8
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4 avx512_model::shuffle_f32x4
#undef _mm512_shuffle_ps
#define _mm512_shuffle_ps avx512_model::shuffle_ps
#undef _mm512_slli_epi16
#define _mm512_slli_epi16 avx512_model::slli_epi16
#undef _mm512_slli_epi32
#define _mm512_slli_epi32 avx512_model::slli_epi32
#undef _mm512_sqrt_ps
#define _mm512_sqrt_ps avx512_model::sqrt_ps
#undef _mm512_srai_epi32
#define _mm512_srai_epi32 avx512_model::srai_epi32
#undef _mm512_srli_epi32
#define _mm512_srli_epi32 avx512_model::srli_epi32
#undef _mm512_storeu_ps
#define _mm512_storeu_ps avx512_model::storeu_ps
#undef _mm512_storeu_si512
#define _mm512_storeu_si512 avx512_model::storeu_si512
#undef _mm512_sub_epi32
#define _mm512_sub_epi32 avx512_model::sub_epi32
#undef _mm512_sub_ps
#define _mm512_sub_ps avx512_model::sub_ps
#undef _mm512_unpackhi_ps
#define _mm512_unpackhi_ps avx512_model::unpackhi_ps
#undef _mm512_unpacklo_ps
#define _mm512_unpacklo_ps avx512_model::unpacklo_ps
#undef _mm512_xor_ps
#define _mm512_xor_ps avx512_model::xor_ps
#undef _mm512_xor_si512
#define _mm512_xor_si512 avx512_model::xor_si512
