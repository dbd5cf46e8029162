#pragma once

// The scalar functions and the orders of sums that every backend reproduces bit for bit (part of
// kSumOrderVersion).
//
// The functions are templates over a vector type V of one or more f32 lanes: F32x1 below is the
// definition, the vector types of engine/ops/cpu give the same bits because they run the same
// source, every product and sum in it is either written as one fused multiply-add or rounded on its
// own, and the build never contracts by itself. Engine threads flush denormals (flush_denormals.h).
// A type V has: Broadcast, Add, Sub, Mul, Div, Sqrt, Fma (a * b + c), Less (a mask), Select (mask ?
// a : b), and Pow2 (n, an integer held as the low bits of 1.5 * 2^23 + n).
//
// Orders of sums that are not dots:
//   lanes16   element i goes to lane i % 16; each lane is one chain, i ascending, from zero;
//   elements past the end count
//             as zero. Then ((l[i] + l[i+8]) -> 8 values, (i, i+4) -> 4, (i, i+2) -> 2, (0, 1) ->
//             the sum.
//   RMS norm  lanes16 of fma(x, x, lane); scale = 1 / sqrt(sum / n + eps); result (x * scale) *
//   weight. softmax   the sum of the 64 probabilities of a block: lanes16 with plain additions.
//   rotation  lo' = fma(lo, cos, -(hi * sin)); hi' = fma(hi, cos, lo * sin).

#include <cmath>
#include <cstdint>

#include "engine/base/bf16.h"

namespace baton::ops {

// 1.5 * 2^23: adding it to |x| < 2^22 rounds x to the nearest even integer, which is left in the
// low bits.
inline constexpr float kRoundMagic = 12582912.0f;

// One lane. The definition.
struct F32x1 {
  float v;
  using Mask = bool;

  [[gnu::always_inline]] static F32x1 Broadcast(float x) { return {x}; }
  [[gnu::always_inline]] static F32x1 Add(F32x1 a, F32x1 b) { return {a.v + b.v}; }
  [[gnu::always_inline]] static F32x1 Sub(F32x1 a, F32x1 b) { return {a.v - b.v}; }
  [[gnu::always_inline]] static F32x1 Mul(F32x1 a, F32x1 b) { return {a.v * b.v}; }
  [[gnu::always_inline]] static F32x1 Div(F32x1 a, F32x1 b) { return {a.v / b.v}; }
  [[gnu::always_inline]] static F32x1 Sqrt(F32x1 a) { return {std::sqrt(a.v)}; }
  [[gnu::always_inline]] static F32x1 Fma(F32x1 a, F32x1 b, F32x1 c) {
    return {std::fma(a.v, b.v, c.v)};
  }
  [[gnu::always_inline]] static bool Less(F32x1 a, F32x1 b) { return a.v < b.v; }
  [[gnu::always_inline]] static F32x1 Select(bool mask, F32x1 a, F32x1 b) { return mask ? a : b; }
  // 2^floor(n / 2) and 2^(n - floor(n / 2)) for magic = kRoundMagic + n: two factors, because 2^128
  // is not an f32.
  [[gnu::always_inline]] static void Pow2(F32x1 magic, F32x1* low, F32x1* high) {
    const int32_t n = static_cast<int32_t>(base::FloatBits(magic.v) - base::FloatBits(kRoundMagic));
    const int32_t half = n >> 1;
    *low = {base::FloatFromBits(static_cast<uint32_t>(half + 127) << 23)};
    *high = {base::FloatFromBits(static_cast<uint32_t>(n - half + 127) << 23)};
  }
};

// e^x, at most 2 ulp off. Below ln 2^-126: 0. Above the range: infinity. NaN stays NaN.
// Range reduction and polynomial as in Cephes expf.
template <typename V>
[[gnu::always_inline]] inline V Exp(V x) {
  const V magic = V::Fma(x, V::Broadcast(1.44269504088896341f), V::Broadcast(kRoundMagic));
  const V n = V::Sub(magic, V::Broadcast(kRoundMagic));
  V r = V::Fma(n, V::Broadcast(-0.693359375f), x);
  r = V::Fma(n, V::Broadcast(2.12194440e-4f), r);
  V p = V::Broadcast(1.9875691500e-4f);
  p = V::Fma(p, r, V::Broadcast(1.3981999507e-3f));
  p = V::Fma(p, r, V::Broadcast(8.3334519073e-3f));
  p = V::Fma(p, r, V::Broadcast(4.1665795894e-2f));
  p = V::Fma(p, r, V::Broadcast(1.6666665459e-1f));
  p = V::Fma(p, r, V::Broadcast(5.0000001201e-1f));
  p = V::Add(V::Fma(p, V::Mul(r, r), r), V::Broadcast(1.0f));
  V low, high;
  V::Pow2(magic, &low, &high);
  p = V::Mul(V::Mul(p, low), high);
  p = V::Select(V::Less(x, V::Broadcast(-87.3365448f)), V::Broadcast(0.0f), p);
  return V::Select(V::Less(V::Broadcast(88.7228391f), x), V::Broadcast(INFINITY), p);
}

// x / (1 + e^-x).
template <typename V>
[[gnu::always_inline]] inline V Silu(V x) {
  const V e = Exp(V::Sub(V::Broadcast(0.0f), x));
  return V::Div(x, V::Add(V::Broadcast(1.0f), e));
}

// 1 / sqrt(x), both steps correctly rounded.
template <typename V>
[[gnu::always_inline]] inline V Rsqrt(V x) {
  return V::Div(V::Broadcast(1.0f), V::Sqrt(x));
}

inline float CanonicalExp(float x) { return Exp(F32x1{x}).v; }
inline float CanonicalSilu(float x) { return Silu(F32x1{x}).v; }
inline float CanonicalRsqrt(float x) { return Rsqrt(F32x1{x}).v; }

// The factor of an RMS norm from lanes16 of the squares.
[[gnu::always_inline]] inline float RmsScale(float sum_of_squares, int n, float eps) {
  return Rsqrt(F32x1{sum_of_squares / static_cast<float>(n) + eps}).v;
}

// The last step of lanes16.
[[gnu::always_inline]] inline float ReduceLanes16(const float* lanes) {
  float sums[8];
  for (int i = 0; i < 8; ++i) sums[i] = lanes[i] + lanes[i + 8];
  for (int i = 0; i < 4; ++i) sums[i] = sums[i] + sums[i + 4];
  for (int i = 0; i < 2; ++i) sums[i] = sums[i] + sums[i + 2];
  return sums[0] + sums[1];
}

// Sine and cosine for RoPE tables, the same bits on every machine (libm's differ between versions).
// |x| < 2^30; error below 1e-15 + 1e-16 * |x| / 2^20. Reduction by pi/2 in two parts, polynomials
// of fdlibm's k_sin and k_cos.
inline void CanonicalSinCos(double x, double* sine, double* cosine) {
  const double n = std::nearbyint(x * 0.63661977236758134);
  double r = std::fma(-n, 1.5707963267948966, x);
  r = std::fma(-n, 6.123233995736766e-17, r);
  const double z = r * r;
  double s = 1.58969099521155010221e-10;
  s = std::fma(s, z, -2.50507602534068634195e-08);
  s = std::fma(s, z, 2.75573137070700676789e-06);
  s = std::fma(s, z, -1.98412698298579493134e-04);
  s = std::fma(s, z, 8.33333333332248946124e-03);
  s = std::fma(s, z, -1.66666666666666324348e-01);
  s = std::fma(s, z * r, r);
  double c = -1.13596475577881948265e-11;
  c = std::fma(c, z, 2.08757232129817482790e-09);
  c = std::fma(c, z, -2.75573143513906633035e-07);
  c = std::fma(c, z, 2.48015872894767294178e-05);
  c = std::fma(c, z, -1.38888888888741095749e-03);
  c = std::fma(c, z, 4.16666666666666019037e-02);
  c = std::fma(c, z * z, std::fma(-0.5, z, 1.0));
  const int quadrant = static_cast<int>(static_cast<int64_t>(n) & 3);
  const double swapped_s = (quadrant & 1) ? c : s;
  const double swapped_c = (quadrant & 1) ? s : c;
  *sine = (quadrant & 2) ? -swapped_s : swapped_s;
  *cosine = (quadrant == 1 || quadrant == 2) ? -swapped_c : swapped_c;
}

}  // namespace baton::ops
