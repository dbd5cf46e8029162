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
    case WeightDtype::kQ4:
      return Q4Value(static_cast<uint8_t>(codes[index]), scales[index / kQ4Group],
                     minimums[index / kQ4Group]);
    default:
      return base::FloatFromBf16(bf16[index]);
  }
}

float RefActivation::At(int t, int i) const {
  if (dtype == WeightDtype::kInt8) return static_cast<float>(codes_row(t)[i]) * scales[t];
  if (dtype == WeightDtype::kQ4) {
    const size_t group = static_cast<size_t>(t) * num_groups() + i / kQ4Group;
    return static_cast<float>(codes_row(t)[i]) * scales[group];
  }
  return row(t)[i];
}

void RefActivation::FinishLinearInput(int t) {
  float* x = row(t);
  int8_t* x_codes = codes.data() + static_cast<size_t>(t) * width;
  if (dtype == WeightDtype::kInt8) {
    scales[t] = QuantizeRowInt8(x, width, x_codes);
  } else if (dtype == WeightDtype::kQ4) {
    const size_t group = static_cast<size_t>(t) * num_groups();
    QuantizeGroupsInt8(x, width, x_codes, scales.data() + group, sums.data() + group);
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

float DotQ4(const RefActivation& x, int t, const RefMatrix& w, int row, int from, int to) {
  float acc = 0;
  for (int k = from; k < to; k += kQ4Group) {
    const size_t x_group = static_cast<size_t>(t) * x.num_groups() + k / kQ4Group;
    const size_t w_group = (static_cast<size_t>(row) * w.num_cols + k) / kQ4Group;
    const int8_t *a = x.codes_row(t) + k, *b = w.codes.data() + w_group * kQ4Group;
    int32_t sum = 0;
    for (int i = 0; i < kQ4Group; ++i) sum += int32_t{a[i]} * int32_t{b[i]};
    acc = std::fma(static_cast<float>(sum), w.scales[w_group] * x.scales[x_group], acc);
    acc = std::fma(w.minimums[w_group], x.sums[x_group], acc);
  }
  return acc;
}

float Dot(const RefActivation& x, int t, const RefMatrix& w, int row, int from, int to) {
  if (w.dtype == WeightDtype::kQ4) return DotQ4(x, t, w, row, from, to);
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
