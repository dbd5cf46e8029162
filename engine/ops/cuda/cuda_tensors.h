#pragma once

// Matrices and activations in device memory, rows contiguous.

#include "engine/ops/backend.h"
#include "engine/ops/cuda/device_buffer.h"
#include "engine/ops/cuda/kernels.h"

namespace baton::ops::cuda {

// [rows][cols] in the element of the linear layers, gate before up.
class CudaMatrix : public Matrix {
 public:
  CudaMatrix(int rows, int cols, DeviceBuffer data)
      : rows_(rows), cols_(cols), data_(std::move(data)) {}
  int rows() const override { return rows_; }
  int cols() const override { return cols_; }
  size_t bytes() const override { return data_.size(); }
  const void* data() const { return data_.data(); }

 private:
  int rows_, cols_;
  DeviceBuffer data_;
};

struct CudaActivation : public Activation {
  ActivationKind kind = ActivationKind::kResidual;
  Element element = Element::kF32;
  int max_tokens = 0, width = 0;
  DeviceBuffer data;  // [max_tokens][width]
  // kProjected: the query part once it is normed and rotated, [T][query_width], in q_element.
  DeviceBuffer queries;
  Element q_element = Element::kF16;
  int query_width = 0;  // 0 until QkNormRopeAppend
};

inline size_t ElementSize(Element element) {
  return element == Element::kF32 ? 4 : element == Element::kFp8 ? 1 : 2;
}

}  // namespace baton::ops::cuda
