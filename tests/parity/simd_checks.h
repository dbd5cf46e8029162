#pragma once

// Every member of a vector type against the portable one, on inputs that reach its corners. One
// instantiation per level, in a file with that level's flags.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "engine/ops/cpu/gemm_kernels.h"
#include "engine/ops/cpu/simd_portable.h"
#include "engine/ops/flush_denormals.h"

namespace baton::tests {

// Writes the first differences into `report`; returns their number.
int SimdDifferencesAvx2(char* report, int size);
int SimdDifferencesAvx512(char* report, int size);
// The source of the AVX-512 type over instructions in software: runs wherever AVX2 does.
int SimdDifferencesAvx512Model(char* report, int size);
// Those instructions in software against the machine's own; needs AVX-512.
int Avx512ModelDifferences(char* report, int size);

// The header is compiled with several instruction sets: everything below belongs to one V.
template <typename V>
class SimdChecks {
 public:
  SimdChecks(char* report, int size) : report_(report), size_(size) {}

  int Run() {
    const ops::ScopedFlushDenormals flush;
    for (int i = 0; i < 20000; ++i) Arithmetic();
    for (int start = 0; start < 256; start += 16) Fp8Codes(start);
    for (uint32_t bits = 0; bits < 65536; bits += 16) Fp8FromBf16(bits);
    for (uint32_t bits = 0; bits < 65536; bits += 16) F16(bits);
    for (int n = -3; n < 20; ++n) Lanes(n);
    for (int i = 0; i < 300; ++i) Int8Dot(i);
    for (int i = 0; i < 300; ++i) Q4Dot(i);
    Transposed();
    return differences_;
  }

 private:
  using P = ops::cpu::PortableVec;

  uint32_t Next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(state_ >> 32);
  }
  // All bit patterns, ordinary values, powers of two and their neighbours.
  void Fill(float* x) {
    for (int i = 0; i < 16; ++i) {
      const uint32_t kind = Next() % 4, bits = Next();
      x[i] = kind == 0   ? base::FloatFromBits(bits)
             : kind == 1 ? static_cast<float>(static_cast<int32_t>(bits) >> 8) / 65536.0f
             : kind == 2 ? base::FloatFromBits(bits & 0xff800000u)
                         : base::FloatFromBits((bits & 0xff800000u) + (Next() % 5) * 0x8000u - 1);
    }
  }
  void Compare(
      const char* what, const void* got, const void* want, int bytes, bool nan_equal = true) {
    const auto *g = static_cast<const uint8_t*>(got), *w = static_cast<const uint8_t*>(want);
    if (std::memcmp(g, w, bytes) == 0) return;
    for (int i = 0; nan_equal && i < bytes / 4; ++i) {
      float a, b;
      std::memcpy(&a, g + 4 * i, 4);
      std::memcpy(&b, w + 4 * i, 4);
      if (std::memcmp(&a, &b, 4) != 0 && !(a != a && b != b)) {
        nan_equal = false;
      }
    }
    if (nan_equal) return;
    if (++differences_ <= 8) {
      const int used = std::snprintf(report_, size_, "%s ", what);
      report_ += used < size_ ? used : 0;
      size_ -= used < size_ ? used : 0;
    }
  }
  void Same(const char* what, V got, P want) {
    float a[16], b[16];
    V::Store(a, got);
    P::Store(b, want);
    Compare(what, a, b, 64);
  }

  void Arithmetic() {
    float x[16], y[16], z[16];
    Fill(x);
    Fill(y);
    Fill(z);
    const V a = V::Load(x), b = V::Load(y), c = V::Load(z);
    const P p = P::Load(x), q = P::Load(y), r = P::Load(z);
    Same("Add", V::Add(a, b), P::Add(p, q));
    Same("Sub", V::Sub(a, b), P::Sub(p, q));
    Same("Mul", V::Mul(a, b), P::Mul(p, q));
    Same("Div", V::Div(a, b), P::Div(p, q));
    Same("Sqrt", V::Sqrt(a), P::Sqrt(p));
    Same("Fma", V::Fma(a, b, c), P::Fma(p, q, r));
    Same("Negate", V::Negate(a), P::Negate(p));
    Same("Less", V::Select(V::Less(a, b), a, c), P::Select(P::Less(p, q), p, r));
    Same("Exp", ops::Exp(a), ops::Exp(p));
    Same("Silu", ops::Silu(a), ops::Silu(p));
    Same("Rsqrt", ops::Rsqrt(a), ops::Rsqrt(p));
    Same("RoundBf16", V::RoundBf16(a), P::RoundBf16(p));
    Same("PairsEven", V::PairsEven(reinterpret_cast<uint8_t*>(x)),
         P::PairsEven(reinterpret_cast<uint8_t*>(x)));
    Same("PairsOdd", V::PairsOdd(reinterpret_cast<uint8_t*>(x)),
         P::PairsOdd(reinterpret_cast<uint8_t*>(x)));
    Same("LoadBf16", V::LoadBf16(reinterpret_cast<uint16_t*>(x)),
         P::LoadBf16(reinterpret_cast<uint16_t*>(x)));
    const uint32_t largest = V::LargestBits(V::MaxMagnitude(V::Zero(), a)),
                   want_largest = P::LargestBits(P::MaxMagnitude(P::Zero(), p));
    Compare("LargestBits", &largest, &want_largest, 4, false);
    Same("MaxMagnitude", V::MaxMagnitude(V::MaxMagnitude(V::Zero(), a), b),
         P::MaxMagnitude(P::MaxMagnitude(P::Zero(), p), q));
    uint16_t words[16], want_words[16];
    V::StoreBf16(words, a);
    P::StoreBf16(want_words, p);
    Compare("StoreBf16", words, want_words, 32, false);
    uint8_t bytes[64], want_bytes[64];
    V::StoreFp8(bytes, a);
    P::StoreFp8(want_bytes, p);
    Compare("StoreFp8", bytes, want_bytes, 16, false);
    V::ZipBf16(bytes, reinterpret_cast<uint16_t*>(x), reinterpret_cast<uint16_t*>(y));
    P::ZipBf16(want_bytes, reinterpret_cast<uint16_t*>(x), reinterpret_cast<uint16_t*>(y));
    Compare("ZipBf16", bytes, want_bytes, 64);
    int32_t ints[16];
    for (int& value : ints) value = static_cast<int32_t>(Next()) >> (Next() % 20);
    Same("FromInt32", V::FromInt32(ints), P::FromInt32(ints));
    for (float& value : x) value = static_cast<float>(static_cast<int32_t>(Next()) >> 8) / 65536.0f;
    const float got_max = V::ReduceMax(V::Load(x)), want_max = P::ReduceMax(P::Load(x));
    Compare("ReduceMax", &got_max, &want_max, 4);
  }

  void Fp8Codes(int start) {
    uint8_t codes[32];
    for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(start + i);
    Same("LoadFp8", V::LoadFp8(codes), P::LoadFp8(codes));
    float got[16], want[16];
    V::Store(got, V::LoadFp8Pairs(codes));
    P::Store(want, P::LoadFp8Pairs(codes));
    Compare("LoadFp8Pairs", got, want, 64, false);
    uint8_t line[64], want_line[64];
    V::ZipFp8(line, codes, codes + 16);
    P::ZipFp8(want_line, codes, codes + 16);
    Compare("ZipFp8", line, want_line, 64, false);
  }

  // Case 13.1 for the vector conversion.
  void Fp8FromBf16(uint32_t first) {
    float x[16];
    for (int i = 0; i < 16; ++i) x[i] = base::FloatFromBf16(static_cast<uint16_t>(first + i));
    uint8_t got[16], want[16];
    V::StoreFp8(got, V::Load(x));
    P::StoreFp8(want, P::Load(x));
    Compare("StoreFp8(bf16)", got, want, 16, false);
  }

  void F16(uint32_t first) {
    uint8_t bytes[32];
    for (uint32_t i = 0; i < 16; ++i) {
      bytes[2 * i] = static_cast<uint8_t>(first + i);
      bytes[2 * i + 1] = static_cast<uint8_t>((first + i) >> 8);
    }
    Same("LoadF16", V::LoadF16(bytes), P::LoadF16(bytes));
  }

  void Lanes(int n) {
    Same("FirstLanes", V::Select(V::FirstLanes(n), V::Broadcast(1), V::Zero()),
         P::Select(P::FirstLanes(n), P::Broadcast(1), P::Zero()));
  }

  void Transposed() {
    float grid[256];
    for (int i = 0; i < 256; ++i) grid[i] = static_cast<float>(i);
    V rows[16];
    P want[16];
    for (int i = 0; i < 16; ++i) rows[i] = V::Load(grid + 16 * i);
    for (int i = 0; i < 16; ++i) want[i] = P::Load(grid + 16 * i);
    V::Transpose(rows);
    P::Transpose(want);
    for (int i = 0; i < 16; ++i) Same("Transpose", rows[i], want[i]);
  }

  // Codes at their extremes: nothing may saturate.
  void Int8Dot(int round) {
    float x[16];
    uint8_t line[64], codes[16 * sizeof(typename V::Code)], want_codes[16];
    for (int i = 0; i < 16; ++i)
      x[i] = round % 3 == 0 ? (Next() % 2 == 0 ? 127.0f : -127.0f)
                            : static_cast<float>(static_cast<int>(Next() % 255) - 127);
    for (int i = 0; i < 64; ++i)
      line[i] = static_cast<uint8_t>(round % 2 == 0 ? (Next() % 2 == 0 ? 127 : -127)
                                                    : static_cast<int>(Next() % 255) - 127);
    V::StoreCodes(codes, V::Load(x), 1.0f);
    P::StoreCodes(want_codes, P::Load(x), 1.0f);
    for (int i = 0; i < 16; ++i) {
      const int got = V::CodeValue(codes + i * sizeof(typename V::Code)),
                want = P::CodeValue(want_codes + i);
      Compare("StoreCodes", &got, &want, 4);
    }
    int8_t bytes[16];
    V::StoreInt8(bytes, V::Load(x), 1.0f);
    Compare("StoreInt8", bytes, want_codes, 16, false);
    typename V::CodeSums sums[2] = {V::ZeroSums(), V::ZeroSums()};
    typename V::LineSums line_sums = V::ZeroLineSums();
    P::CodeSums want_sums[2] = {};
    P::LineSums want_line_sums;
    for (int repeat = 0; repeat < 3; ++repeat) {
      V::template DotLine<2>(line, reinterpret_cast<typename V::Code*>(codes), 4, sums, &line_sums);
      P::DotLine<2>(line, reinterpret_cast<int8_t*>(want_codes), 4, want_sums, &want_line_sums);
    }
    for (int t = 0; t < 2; ++t)
      Same("DotLine", V::FinishSums(sums[t], line_sums),
           P::FinishSums(want_sums[t], want_line_sums));
  }

  // The same of 4-bit codes.
  void Q4Dot(int round) {
    constexpr int kTokens = 3, kStride = 48;
    uint8_t tile[256];
    int8_t codes[kTokens * kStride];
    for (uint8_t& value : tile) value = round % 2 == 0 ? 255 : static_cast<uint8_t>(Next());
    for (int8_t& value : codes)
      value = static_cast<int8_t>(round % 3 == 0   ? 127
                                  : round % 3 == 1 ? -127
                                                   : static_cast<int>(Next() % 255) - 127);
    const int32_t sum = V::SumInt8(codes + round % 16), want_sum = P::SumInt8(codes + round % 16);
    Compare("SumInt8", &sum, &want_sum, 4, false);
    V sums[kTokens];
    P want[kTokens];
    V::template DotQ4<kTokens>(tile, codes, kStride, sums);
    P::DotQ4<kTokens>(tile, codes, kStride, want);
    for (int t = 0; t < kTokens; ++t) Same("DotQ4", sums[t], want[t]);
  }

  char* report_;
  int size_;
  int differences_ = 0;
  uint64_t state_ = 88172645463325252ull;
};

}  // namespace baton::tests
