#pragma once

// Row-major matrices and activations of the ref backend, and its dot products.

#include <cstdint>
#include <vector>

#include "engine/base/bf16.h"
#include "engine/ops/backend.h"

namespace baton::ops {

class RefMatrix : public Matrix {
 public:
  int rows() const override { return num_rows; }
  int cols() const override { return num_cols; }
  size_t bytes() const override {
    return f32.size() * sizeof(float) + bf16.size() * sizeof(uint16_t) + codes.size() +
           (scales.size() + minimums.size()) * sizeof(float);
  }

  // The weight that the dot stands for: of int8 code * scale, of q4 fma(scale, code, minimum).
  float At(int row, int col) const;

  int num_rows = 0;
  int num_cols = 0;
  WeightDtype dtype = WeightDtype::kF32;
  std::vector<float> f32;       // kF32
  std::vector<uint16_t> bf16;   // kBf16
  std::vector<int8_t> codes;    // kInt8, kQ4
  std::vector<float> scales;    // kInt8: [rows]; kQ4: [rows, cols / 32]
  std::vector<float> minimums;  // kQ4: [rows, cols / 32]
};

class RefActivation : public Activation {
 public:
  float* row(int t) { return values.data() + static_cast<size_t>(t) * width; }
  const float* row(int t) const { return values.data() + static_cast<size_t>(t) * width; }
  const int8_t* codes_row(int t) const { return codes.data() + static_cast<size_t>(t) * width; }
  // kQ4.
  int num_groups() const { return (width + 31) / 32; }
  // Value `i` of row `t` as the linear layers see it.
  float At(int t, int i) const;

  // Turns row `t` of `values` into what the linear layers read. int8: with the scale of a row whose
  // largest magnitude (bits) is `largest`, else with its own.
  void FinishLinearInput(int t);
  void FinishLinearInput(int t, uint32_t largest);
  uint32_t LargestOf(int t) const;

  ActivationKind kind = ActivationKind::kResidual;
  WeightDtype dtype = WeightDtype::kF32;
  int max_tokens = 0;
  int width = 0;
  // kLinearInput of kBf16: rounded to bf16; of kInt8 and kQ4: before quantisation.
  std::vector<float> values;
  std::vector<int8_t> codes;  // kLinearInput of kInt8 and kQ4
  std::vector<float> scales;  // kInt8: [max_tokens]; kQ4: [max_tokens, num_groups()]
  std::vector<float> sums;    // kQ4: scale * sum of the group's codes
};

// The canonical f32 dot: one chain.
float DotF32(const float* a, const float* b, int n);
// The canonical bf16 dot. `a` holds bf16 values; `stride`: elements between consecutive k of b.
float DotBf16(const float* a, const uint16_t* b, int n, int stride = 1);
// The canonical q4 dot over whole groups [from, to).
float DotQ4(const RefActivation& x, int t, const RefMatrix& w, int row, int from, int to);
// Elements [from, to) of x[t] . w[row], scaled.
float Dot(const RefActivation& x, int t, const RefMatrix& w, int row, int from, int to);

}  // namespace baton::ops
