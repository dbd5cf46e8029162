#pragma once

// Packed matrices and activations of the CPU backend. The layouts are described in kernel_args.h.

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/base/buffer.h"
#include "engine/ops/backend.h"
#include "engine/ops/cpu/kernel_args.h"
#include "engine/ops/cpu/thread_pool.h"

namespace baton::ops::cpu {

class CpuMatrix : public Matrix {
 public:
  // `source` has been checked.
  static absl::StatusOr<std::unique_ptr<CpuMatrix>> Pack(const MatrixSource& source,
                                                         WeightDtype dtype,
                                                         bool interleave_half,
                                                         ThreadPool* pool);

  int rows() const override { return rows_; }
  int cols() const override { return weights_.cols; }
  size_t bytes() const override { return data_.size() + row_scales_.size() * sizeof(float); }

  const Weights& weights() const { return weights_; }
  int num_panels() const { return num_panels_; }
  bool interleaved() const { return interleaved_; }
  // Row `row` as f32 [cols], as the dots see it.
  void ReadRow(int row, float* out) const;

 private:
  CpuMatrix() = default;
  struct Place {
    int panel, tile, lane;
  };
  Place PlaceOf(int row) const;
  // The source row of a place, or -1 for padding.
  int RowAt(int panel, int tile, int lane) const;
  uint8_t* TileOf(const Place& place, int step) const;
  absl::Status PackPanels(const MatrixSource& source, ThreadPool* pool);
  void PackPanel(const MatrixSource& source, int panel);
  void PackRow(const MatrixSource& source, int row, const Place& place, std::vector<float>* values);
  // Sets needs_wide_ where a scale or minimum is no f16 value and tiles are not wide.
  void PackRowQ4(const MatrixSource& source,
                 int row,
                 const Place& place,
                 std::vector<float>* values);

  // The scale (0) or minimum (1) of a lane.
  void StoreQ4Scale(uint8_t* tile, int lane, int which, float value);
  float Q4Scale(const uint8_t* tile, int lane, int which) const;

  int rows_ = 0;
  int num_panels_ = 0;
  bool interleaved_ = false;
  size_t tile_bytes_ = kTileBytes;
  Weights weights_{};
  std::atomic<bool> needs_wide_{false};
  base::Buffer data_;
  std::vector<float> row_scales_;
};

class CpuActivation : public Activation {
 public:
  static absl::StatusOr<std::unique_ptr<CpuActivation>> Create(
      ActivationKind kind, WeightDtype dtype, const Kernels& kernels, int max_tokens, int width);

  const Input& input() const { return input_; }
  float* rows() const { return input_.rows; }
  size_t stride() const { return input_.stride; }
  int max_tokens() const { return max_tokens_; }
  int width() const { return input_.width; }
  // Row t as f32 [width], dequantised.
  void ReadRow(int t, const Kernels& kernels, float* out) const;

 private:
  int max_tokens_ = 0;
  int code_bytes_ = 1;
  Input input_{};
  base::Buffer rows_;
  base::Buffer codes_;
  std::vector<float> scales_;
};

}  // namespace baton::ops::cpu
