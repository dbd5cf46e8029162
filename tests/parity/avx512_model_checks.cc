// Each instruction of avx512_model.h against the machine's own, on random bits. Called on machines
// with AVX-512 only.

#include "engine/ops/cpu/avx512_model.h"

#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "engine/ops/flush_denormals.h"
#include "tests/parity/simd_checks.h"

namespace baton::tests {
namespace {

namespace model = ops::cpu::avx512_model;

class ModelChecks {
 public:
  ModelChecks(char* report, int size) : report_(report), size_(size) {}

  int Run() {
    const ops::ScopedFlushDenormals flush;
    for (int i = 0; i < 2000; ++i) {
      Fill();
      Floats();
      Integers();
      Moves();
      Widths();
    }
    return differences_;
  }

 private:
  struct Operand {
    model::F512 f;
    model::I512 i;
    __m512 real_f;
    __m512i real_i;
  };

  uint32_t Next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(state_ >> 32);
  }
  void Fill() {
    for (Operand* x : {&a_, &b_, &c_}) {
      uint32_t bits[16];
      // Bytes are sometimes all small, so that comparisons and byte selections meet equal values.
      const uint32_t mask = Next() % 3 == 0 ? 0x070f8301u : 0xffffffffu;
      for (uint32_t& value : bits) value = Next() & mask;
      x->i = model::loadu_si512(bits);
      x->f = model::loadu_ps(bits);
      x->real_i = _mm512_loadu_si512(bits);
      x->real_f = _mm512_loadu_ps(bits);
    }
  }
  template <typename Model, typename Real>
  void Same(const char* what, const Model& got, const Real& want) {
    static_assert(sizeof(Model) == sizeof(Real));
    if (std::memcmp(&got, &want, sizeof(got)) != 0) Differ(what);
  }
  // NaN has many patterns, and which one an operation gives is not part of the model.
  void SameFloats(const char* what, const model::F512& got, __m512 want) {
    float x[16], y[16];
    std::memcpy(x, &got, sizeof(x));
    _mm512_storeu_ps(y, want);
    for (int i = 0; i < 16; ++i) {
      if (std::memcmp(&x[i], &y[i], 4) != 0 && !(x[i] != x[i] && y[i] != y[i])) return Differ(what);
    }
  }
  void Differ(const char* what) {
    if (++differences_ > 8) return;
    const int used = std::snprintf(report_, size_, "%s ", what);
    report_ += used < size_ ? used : 0;
    size_ -= used < size_ ? used : 0;
  }

  void Floats() {
    SameFloats("add_ps", model::add_ps(a_.f, b_.f), _mm512_add_ps(a_.real_f, b_.real_f));
    SameFloats("sub_ps", model::sub_ps(a_.f, b_.f), _mm512_sub_ps(a_.real_f, b_.real_f));
    SameFloats("mul_ps", model::mul_ps(a_.f, b_.f), _mm512_mul_ps(a_.real_f, b_.real_f));
    SameFloats("div_ps", model::div_ps(a_.f, b_.f), _mm512_div_ps(a_.real_f, b_.real_f));
    SameFloats("sqrt_ps", model::sqrt_ps(a_.f), _mm512_sqrt_ps(a_.real_f));
    SameFloats("fmadd_ps", model::fmadd_ps(a_.f, b_.f, c_.f),
               _mm512_fmadd_ps(a_.real_f, b_.real_f, c_.real_f));
    Same("xor_ps", model::xor_ps(a_.f, b_.f), _mm512_xor_ps(a_.real_f, b_.real_f));
    SameFloats("cvtph_ps", model::cvtph_ps(model::castsi512_si256(a_.i)),
               _mm512_cvtph_ps(_mm512_castsi512_si256(a_.real_i)));
    Same("cvtepi32_ps", model::cvtepi32_ps(a_.i), _mm512_cvtepi32_ps(a_.real_i));
    Same("cmp lt", model::cmp_ps_mask(a_.f, b_.f, _CMP_LT_OQ),
         _mm512_cmp_ps_mask(a_.real_f, b_.real_f, _CMP_LT_OQ));
    Same("cmp unord", model::cmp_ps_mask(a_.f, b_.f, _CMP_UNORD_Q),
         _mm512_cmp_ps_mask(a_.real_f, b_.real_f, _CMP_UNORD_Q));
    Same("reduce_max_ps", model::reduce_max_ps(model::cvtepi32_ps(a_.i)),
         _mm512_reduce_max_ps(_mm512_cvtepi32_ps(a_.real_i)));
    Same("set1_ps", model::set1_ps(a_.f.v[3]), _mm512_set1_ps(a_.f.v[3]));
  }

  void Integers() {
    Same("add_epi32", model::add_epi32(a_.i, b_.i), _mm512_add_epi32(a_.real_i, b_.real_i));
    Same("sub_epi32", model::sub_epi32(a_.i, b_.i), _mm512_sub_epi32(a_.real_i, b_.real_i));
    Same("and", model::and_si512(a_.i, b_.i), _mm512_and_si512(a_.real_i, b_.real_i));
    Same("or", model::or_si512(a_.i, b_.i), _mm512_or_si512(a_.real_i, b_.real_i));
    Same("xor", model::xor_si512(a_.i, b_.i), _mm512_xor_si512(a_.real_i, b_.real_i));
    Same("slli_epi32", model::slli_epi32(a_.i, 23), _mm512_slli_epi32(a_.real_i, 23));
    Same("srli_epi32", model::srli_epi32(a_.i, 20), _mm512_srli_epi32(a_.real_i, 20));
    Same("srai_epi32", model::srai_epi32(a_.i, 1), _mm512_srai_epi32(a_.real_i, 1));
    Same("max_epi32", model::max_epi32(a_.i, b_.i), _mm512_max_epi32(a_.real_i, b_.real_i));
    Same("add_epi16", model::add_epi16(a_.i, b_.i), _mm512_add_epi16(a_.real_i, b_.real_i));
    Same("slli_epi16", model::slli_epi16(a_.i, 8), _mm512_slli_epi16(a_.real_i, 8));
    Same("cmpeq32", model::cmpeq_epi32_mask(a_.i, b_.i),
         _mm512_cmpeq_epi32_mask(a_.real_i, b_.real_i));
    Same("cmplt32", model::cmplt_epi32_mask(a_.i, b_.i),
         _mm512_cmplt_epi32_mask(a_.real_i, b_.real_i));
    Same("cmpgt32", model::cmpgt_epi32_mask(a_.i, b_.i),
         _mm512_cmpgt_epi32_mask(a_.real_i, b_.real_i));
    Same("cmpeq16", model::cmpeq_epi16_mask(a_.i, b_.i),
         _mm512_cmpeq_epi16_mask(a_.real_i, b_.real_i));
    Same("cmplt16", model::cmplt_epi16_mask(a_.i, b_.i),
         _mm512_cmplt_epi16_mask(a_.real_i, b_.real_i));
    Same("dpbusd", model::dpbusd_epi32(a_.i, b_.i, c_.i),
         _mm512_dpbusd_epi32(a_.real_i, b_.real_i, c_.real_i));
    const uint32_t one = a_.i.v[5];
    Same("set1_epi32", model::set1_epi32(static_cast<int>(one)),
         _mm512_set1_epi32(static_cast<int>(one)));
    Same("set1_epi16", model::set1_epi16(static_cast<int16_t>(one)),
         _mm512_set1_epi16(static_cast<int16_t>(one)));
    Same("set1_epi8", model::set1_epi8(static_cast<char>(one)),
         _mm512_set1_epi8(static_cast<char>(one)));
  }

  void Moves() {
    const auto mask16 = static_cast<__mmask16>(Next());
    const auto mask32 = static_cast<__mmask32>(Next());
    Same("mask_blend_ps", model::mask_blend_ps(mask16, a_.f, b_.f),
         _mm512_mask_blend_ps(mask16, a_.real_f, b_.real_f));
    Same("mask_blend_epi32", model::mask_blend_epi32(mask16, a_.i, b_.i),
         _mm512_mask_blend_epi32(mask16, a_.real_i, b_.real_i));
    Same("mask_blend_epi16", model::mask_blend_epi16(mask32, a_.i, b_.i),
         _mm512_mask_blend_epi16(mask32, a_.real_i, b_.real_i));
    Same("shuffle_epi8", model::shuffle_epi8(a_.i, b_.i),
         _mm512_shuffle_epi8(a_.real_i, b_.real_i));
    Same("unpacklo_ps", model::unpacklo_ps(a_.f, b_.f), _mm512_unpacklo_ps(a_.real_f, b_.real_f));
    Same("unpackhi_ps", model::unpackhi_ps(a_.f, b_.f), _mm512_unpackhi_ps(a_.real_f, b_.real_f));
    Same("shuffle_ps 44", model::shuffle_ps(a_.f, b_.f, 0x44),
         _mm512_shuffle_ps(a_.real_f, b_.real_f, 0x44));
    Same("shuffle_ps ee", model::shuffle_ps(a_.f, b_.f, 0xee),
         _mm512_shuffle_ps(a_.real_f, b_.real_f, 0xee));
    Same("shuffle_f32x4 88", model::shuffle_f32x4(a_.f, b_.f, 0x88),
         _mm512_shuffle_f32x4(a_.real_f, b_.real_f, 0x88));
    Same("shuffle_f32x4 dd", model::shuffle_f32x4(a_.f, b_.f, 0xdd),
         _mm512_shuffle_f32x4(a_.real_f, b_.real_f, 0xdd));
    const __m128i quarter = _mm512_castsi512_si128(a_.real_i);
    Same("broadcast_i32x4", model::broadcast_i32x4(quarter), _mm512_broadcast_i32x4(quarter));
  }

  void Widths() {
    const __m256i half = _mm512_castsi512_si256(a_.real_i);
    const __m128i quarter = _mm512_castsi512_si128(a_.real_i);
    Same("castsi512_si256", model::castsi512_si256(a_.i), half);
    Same("extracti64x4", model::extracti64x4_epi64(a_.i, 1),
         _mm512_extracti64x4_epi64(a_.real_i, 1));
    Same("cvtepi32_epi16", model::cvtepi32_epi16(a_.i), _mm512_cvtepi32_epi16(a_.real_i));
    Same("cvtepi32_epi8", model::cvtepi32_epi8(a_.i), _mm512_cvtepi32_epi8(a_.real_i));
    Same("cvtepu16_epi32", model::cvtepu16_epi32(half), _mm512_cvtepu16_epi32(half));
    Same("cvtepu8_epi16", model::cvtepu8_epi16(half), _mm512_cvtepu8_epi16(half));
    Same("cvtepu8_epi32", model::cvtepu8_epi32(quarter), _mm512_cvtepu8_epi32(quarter));
  }

  char* report_;
  int size_;
  int differences_ = 0;
  uint64_t state_ = 0x853c49e6748fea9bull;
  Operand a_, b_, c_;
};

}  // namespace

int Avx512ModelDifferences(char* report, int size) { return ModelChecks(report, size).Run(); }

}  // namespace baton::tests
