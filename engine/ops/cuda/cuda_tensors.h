#pragma once

// Matrices and activations in device memory, rows contiguous.

#include "engine/ops/backend.h"
#include "engine/ops/cuda/device_buffer.h"
#include "engine/ops/cuda/kernels.h"
#include "engine/ops/cuda/linear.h"

namespace baton::ops::cuda {

inline size_t ElementSize(Element element) {
  return element == Element::kF32 ? 4 : element == Element::kFp8 ? 1 : 2;
}

// [rows][cols] in the element of the linear layers, gate before up.
class CudaMatrix : public Matrix {
 public:
  CudaMatrix(int rows, int cols, Element element, DeviceBuffer data, DeviceBuffer scales)
      : rows_(rows),
        cols_(cols),
        element_(element),
        data_(std::move(data)),
        scales_(std::move(scales)) {}
  int rows() const override { return rows_; }
  int cols() const override { return cols_; }
  size_t bytes() const override { return data_.size() + scales_.size(); }
  Element element() const { return element_; }
  const void* data() const { return data_.data(); }
  // From row `first` on; not for e4m3.
  LinearOperand operand(size_t first = 0) const {
    return {data_.as<const uint8_t>() + first * cols_ * ElementSize(element_), scales_.as<float>()};
  }

 private:
  int rows_, cols_;
  Element element_;
  DeviceBuffer data_, scales_;
};

struct CudaActivation : public Activation {
  ActivationKind kind = ActivationKind::kResidual;
  Element element = Element::kF32;
  int max_tokens = 0, width = 0;
  DeviceBuffer data;  // [max_tokens][width]
  // e4m3: [width / 128][pitch]; the pitch is that of the step that wrote it.
  DeviceBuffer scales;
  int pitch = 0;
  // kProjected: the query part once it is normed and rotated, [T][query_width], in q_element.
  DeviceBuffer queries;
  Element q_element = Element::kF16;
  int query_width = 0;  // 0 until QkNormRopeAppend
  // With which the queries can be e4m3 (FlashQueryScale); 0: they are not to be.
  float query_scale = 0;
};

// What the operations of this backend are handed.
inline CudaActivation& Mutable(Activation* activation) {
  return static_cast<CudaActivation&>(*activation);
}
inline const CudaActivation& Const(const Activation& activation) {
  return static_cast<const CudaActivation&>(activation);
}
inline const CudaMatrix& Weights(const Matrix& matrix) {
  return static_cast<const CudaMatrix&>(matrix);
}

// What a step of `num_tokens` writes into and a product reads.
inline LinearRows RowsOf(CudaActivation* activation, int num_tokens) {
  activation->pitch = RoundUp(num_tokens, kFp8Multiple);
  return {.data = activation->data.data(),
          .element = activation->element,
          .scales = activation->scales.as<float>(),
          .pitch = activation->pitch};
}

}  // namespace baton::ops::cuda
