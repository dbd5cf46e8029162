#include "engine/ops/ref/ref_tensors.h"

#include <cmath>

#include "engine/ops/quantize.h"

namespace baton::ops {

float RefMatrix::At(int row, int col) const {
  const size_t index = static_cast<size_t>(row) * num_cols + col;
  switch (dtype) {
    case WeightDtype::kF32:
      return f32[index];
    case WeightDtype::kInt8:
      return static_cast<float>(codes[index]) * scales[row];
    default:
      return base::FloatFromBf16(bf16[index]);
  }
}

void RefActivation::FinishLinearInput(int t) {
  float* x = row(t);
  if (dtype == WeightDtype::kInt8) {
    scales[t] = QuantizeRowInt8(x, width, codes.data() + static_cast<size_t>(t) * width);
  } else if (dtype != WeightDtype::kF32) {
    for (int i = 0; i < width; ++i) x[i] = base::RoundToBf16(x[i]);
  }
}

void RefActivation::FinishLinearInput(int t, uint32_t largest) {
  scales[t] =
      QuantizeRowInt8(row(t), width, largest, codes.data() + static_cast<size_t>(t) * width);
}

uint32_t RefActivation::LargestOf(int t) const { return LargestMagnitudeBits(row(t), width); }

float DotF32(const float* a, const float* b, int n) {
  float sum = 0;
  for (int k = 0; k < n; ++k) sum = std::fma(a[k], b[k], sum);
  return sum;
}

float DotBf16(const float* a, const uint16_t* b, int n, int stride) {
  float sum = 0;
  for (int start = 0; start < n; start += 32) {
    float chain[2] = {0, 0};
    for (int k = start; k < start + 32; ++k) {
      const bool inside = k < n;  // padding multiplies zero by zero, which can turn -0 into +0
      const float x = inside ? a[k] : 0.0f;
      const float y = inside ? base::FloatFromBf16(b[static_cast<size_t>(k) * stride]) : 0.0f;
      chain[k & 1] = std::fma(x, y, chain[k & 1]);
    }
    sum = sum + (chain[0] + chain[1]);
  }
  return sum;
}

float Dot(const RefActivation& x, int t, const RefMatrix& w, int row, int from, int to) {
  const size_t offset = static_cast<size_t>(row) * w.num_cols + from;
  if (w.dtype == WeightDtype::kF32)
    return DotF32(x.row(t) + from, w.f32.data() + offset, to - from);
  if (w.dtype != WeightDtype::kInt8)
    return DotBf16(x.row(t) + from, w.bf16.data() + offset, to - from);
  int32_t sum = 0;
  const int8_t* a = x.codes_row(t) + from;
  for (int k = 0; k < to - from; ++k) sum += int32_t{a[k]} * int32_t{w.codes[offset + k]};
  return static_cast<float>(sum) * (x.scales[t] * w.scales[row]);
}

}  // namespace baton::ops
