#include "engine/ops/cpu/cpu_tensors.h"

#include <cstring>
#include <utility>

#include "engine/base/bf16.h"
#include "engine/base/dequant.h"
#include "engine/base/status_macros.h"
#include "engine/ops/flush_denormals.h"
#include "engine/ops/quantize.h"
#include "engine/ops/validate.h"

namespace baton::ops::cpu {
namespace {

constexpr int RoundUp(int value, int step) { return (value + step - 1) / step * step; }

// k per step.
int StepOf(WeightDtype dtype) {
  return dtype == WeightDtype::kF32 ? 16 : dtype == WeightDtype::kInt8 ? 64 : 32;
}

InputFormat FormatOf(ActivationKind kind, WeightDtype dtype, bool tiles) {
  if (kind != ActivationKind::kLinearInput || dtype == WeightDtype::kF32)
    return InputFormat::kRowsF32;
  if (dtype == WeightDtype::kInt8) return tiles ? InputFormat::kTilesInt8 : InputFormat::kRowsInt8;
  if (dtype == WeightDtype::kQ4) return InputFormat::kRowsGroups;
  return tiles ? InputFormat::kTilesBf16 : InputFormat::kRowsBf16;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CpuMatrix>> CpuMatrix::Pack(const MatrixSource& source,
                                                           WeightDtype dtype,
                                                           bool interleave_half,
                                                           ThreadPool* pool) {
  auto matrix = std::unique_ptr<CpuMatrix>(new CpuMatrix());
  matrix->rows_ = source.rows;
  matrix->interleaved_ = interleave_half;
  matrix->num_panels_ = interleave_half ? RoundUp(source.rows / 2, kTileRows) / kTileRows
                                        : RoundUp(source.rows, kPanelRows) / kPanelRows;
  if (dtype == WeightDtype::kQ4) matrix->tile_bytes_ = kQ4TileBytes;
  Weights& w = matrix->weights_;
  const int step = StepOf(dtype);
  w.dtype = static_cast<Dtype>(dtype);
  w.cols = source.cols;
  w.num_steps = RoundUp(source.cols, step) / step;
  w.cut_step = RoundUp(SplitK(source.cols, dtype), step) / step;
  if (dtype == WeightDtype::kInt8) {
    matrix->row_scales_.resize(static_cast<size_t>(matrix->num_panels_) * kPanelRows);
    w.row_scales = matrix->row_scales_.data();
  }
  BATON_RETURN_IF_ERROR(matrix->PackPanels(source, pool));
  if (matrix->needs_wide_) {
    w.wide_scales = true;
    matrix->tile_bytes_ = kQ4WideTileBytes;
    BATON_RETURN_IF_ERROR(matrix->PackPanels(source, pool));
  }
  return matrix;
}

absl::Status CpuMatrix::PackPanels(const MatrixSource& source, ThreadPool* pool) {
  weights_.panel_bytes = static_cast<size_t>(weights_.num_steps) * 2 * tile_bytes_;
  BATON_ASSIGN_OR_RETURN(data_, base::Buffer::Allocate(weights_.panel_bytes * num_panels_));
  weights_.data = data_.data();
  pool->ParallelFor(num_panels_, 1, [&](int begin, int end, int) {
    for (int panel = begin; panel < end; ++panel) PackPanel(source, panel);
  });
  return absl::OkStatus();
}

CpuMatrix::Place CpuMatrix::PlaceOf(int row) const {
  if (!interleaved_) return {row / kPanelRows, row % kPanelRows / kTileRows, row % kTileRows};
  const int half = rows_ / 2;
  const int index = row < half ? row : row - half;
  return {index / kTileRows, row < half ? 0 : 1, index % kTileRows};
}

int CpuMatrix::RowAt(int panel, int tile, int lane) const {
  if (!interleaved_) {
    const int row = panel * kPanelRows + tile * kTileRows + lane;
    return row < rows_ ? row : -1;
  }
  const int index = panel * kTileRows + lane;
  return index >= rows_ / 2 ? -1 : index + tile * (rows_ / 2);
}

uint8_t* CpuMatrix::TileOf(const Place& place, int step) const {
  const size_t offset = place.panel * weights_.panel_bytes +
                        (static_cast<size_t>(step) * 2 + place.tile) * tile_bytes_;
  return const_cast<uint8_t*>(data_.data()) + offset;
}

void CpuMatrix::PackPanel(const MatrixSource& source, int panel) {
  std::vector<float> values(source.source_cols());
  for (int i = 0; i < kPanelRows; ++i) {
    const Place place = {panel, i / kTileRows, i % kTileRows};
    const int row = RowAt(panel, place.tile, place.lane);
    if (needs_wide_ && !weights_.wide_scales) return;
    if (row >= 0) PackRow(source, row, place, &values);
  }
}

void CpuMatrix::PackRow(const MatrixSource& source,
                        int row,
                        const Place& place,
                        std::vector<float>* values) {
  if (weights_.dtype == Dtype::kQ4) {
    PackRowQ4(source, row, place, values);
    return;
  }
  source.read_row(row, values->data());
  const int cols = source.cols;
  const float* slice = values->data() + source.first_col;
  if (weights_.dtype == Dtype::kF32) {
    for (int k = 0; k < cols; ++k) {
      std::memcpy(TileOf(place, k / 16) + 64 * (k % 16) + 4 * place.lane, slice + k, 4);
    }
  } else if (weights_.dtype == Dtype::kBf16) {
    for (int k = 0; k < cols; ++k) {
      const uint16_t bits = base::Bf16FromFloat(slice[k]);
      std::memcpy(TileOf(place, k / 32) + 64 * (k % 32 / 2) + 4 * place.lane + 2 * (k % 2), &bits,
                  2);
    }
  } else {
    std::vector<int8_t> codes(cols);
    const uint32_t largest = LargestMagnitudeBits(values->data(), source.source_cols());
    row_scales_[place.panel * kPanelRows + place.tile * kTileRows + place.lane] =
        QuantizeRowInt8(slice, cols, largest, codes.data());
    for (int k = 0; k < cols; ++k) {
      TileOf(place, k / 64)[64 * (k % 64 / 4) + 4 * place.lane + k % 4] =
          static_cast<uint8_t>(codes[k]);
    }
  }
}

void CpuMatrix::PackRowQ4(const MatrixSource& source,
                          int row,
                          const Place& place,
                          std::vector<float>* values) {
  const int cols = source.source_cols(), groups = cols / kQ4Group;
  const int first = source.first_col / kQ4Group, end = first + source.cols / kQ4Group;
  std::vector<uint8_t> codes(cols);
  std::vector<float> scales(groups), minimums(groups);
  if (!source.read_row_q4 ||
      !source.read_row_q4(row, codes.data(), scales.data(), minimums.data())) {
    source.read_row(row, values->data());
    QuantizeRowQ4(values->data(), cols, codes.data(), scales.data(), minimums.data());
  }
  for (int group = first; group < end; ++group) {
    uint8_t* tile = TileOf(place, group - first);
    const uint8_t* in_group = codes.data() + static_cast<size_t>(group) * kQ4Group;
    for (int k = 0; k < 16; ++k) {
      tile[64 * (k / 4) + 4 * place.lane + k % 4] =
          static_cast<uint8_t>((in_group[k] & 15) | (in_group[16 + k] & 15) << 4);
    }
    for (const int which : {0, 1})
      StoreQ4Scale(tile, place.lane, which, (which == 0 ? scales : minimums)[group]);
  }
}

void CpuMatrix::StoreQ4Scale(uint8_t* tile, int lane, int which, float value) {
  if (weights_.wide_scales) {
    std::memcpy(tile + kQ4CodeBytes + 64 * which + 4 * lane, &value, 4);
    return;
  }
  const uint16_t half = base::F32ToF16(value);
  if (base::FloatBits(base::F16ToF32(half)) != base::FloatBits(value) && value == value)
    needs_wide_ = true;
  std::memcpy(tile + kQ4CodeBytes + 32 * which + 2 * lane, &half, 2);
}

float CpuMatrix::Q4Scale(const uint8_t* tile, int lane, int which) const {
  float value;
  uint16_t half;
  std::memcpy(&value, tile + kQ4CodeBytes + (weights_.wide_scales ? 64 * which + 4 * lane : 0), 4);
  std::memcpy(&half, tile + kQ4CodeBytes + (weights_.wide_scales ? 0 : 32 * which + 2 * lane), 2);
  return weights_.wide_scales ? value : base::F16ToF32(half);
}

void CpuMatrix::ReadRow(int row, float* out) const {
  const Place place = PlaceOf(row);
  const int lane = place.lane;
  for (int k = 0; k < weights_.cols; ++k) {
    if (weights_.dtype == Dtype::kF32) {
      std::memcpy(out + k, TileOf(place, k / 16) + 64 * (k % 16) + 4 * lane, 4);
    } else if (weights_.dtype == Dtype::kBf16) {
      uint16_t bits;
      std::memcpy(&bits, TileOf(place, k / 32) + 64 * (k % 32 / 2) + 4 * lane + 2 * (k % 2), 2);
      out[k] = base::FloatFromBf16(bits);
    } else if (weights_.dtype == Dtype::kInt8) {
      const uint8_t code = TileOf(place, k / 64)[64 * (k % 64 / 4) + 4 * lane + k % 4];
      out[k] = static_cast<float>(static_cast<int8_t>(code)) *
               row_scales_[place.panel * kPanelRows + place.tile * kTileRows + lane];
    } else {
      const uint8_t* tile = TileOf(place, k / 32);
      const uint8_t two = tile[64 * (k % 16 / 4) + 4 * lane + k % 4];
      out[k] = Q4Value(k % 32 < 16 ? two & 15 : two >> 4, Q4Scale(tile, lane, 0),
                       Q4Scale(tile, lane, 1));
    }
  }
}

absl::StatusOr<std::unique_ptr<CpuActivation>> CpuActivation::Create(
    ActivationKind kind, WeightDtype dtype, const Kernels& kernels, int max_tokens, int width) {
  auto activation = std::make_unique<CpuActivation>();
  activation->max_tokens_ = max_tokens;
  activation->code_bytes_ = kernels.code_bytes;
  Input& input = activation->input_;
  input.format = FormatOf(kind, dtype, kernels.tiles);
  input.width = width;
  const size_t tokens = RoundUp(max_tokens, 32);
  if (input.format != InputFormat::kTilesBf16) {
    input.stride = RoundUp(width, 64);
    BATON_ASSIGN_OR_RETURN(activation->rows_,
                           base::Buffer::Allocate(tokens * input.stride * sizeof(float)));
    input.rows = reinterpret_cast<float*>(activation->rows_.data());
  }
  if (input.format == InputFormat::kTilesBf16 || input.format == InputFormat::kTilesInt8) {
    input.num_steps =
        input.format == InputFormat::kTilesInt8 ? RoundUp(width, 64) / 64 : RoundUp(width, 32) / 32;
    BATON_ASSIGN_OR_RETURN(activation->codes_,
                           base::Buffer::Allocate(tokens / 32 * input.num_steps * 2 * kTileBytes));
  } else if (input.format == InputFormat::kRowsInt8 || input.format == InputFormat::kRowsGroups) {
    const int code_bytes = input.format == InputFormat::kRowsInt8 ? kernels.code_bytes : 1;
    input.code_stride = static_cast<size_t>(RoundUp(width, 64)) * code_bytes;
    BATON_ASSIGN_OR_RETURN(activation->codes_, base::Buffer::Allocate(tokens * input.code_stride));
  }
  input.codes = activation->codes_.data();
  input.scale_stride =
      input.format == InputFormat::kRowsGroups ? RoundUp(width, kQ4Group) / kQ4Group * 2 : 1;
  activation->scales_.resize(tokens * input.scale_stride);
  input.scales = activation->scales_.data();
  return activation;
}

void CpuActivation::ReadRow(int t, const Kernels& kernels, float* out) const {
  const ScopedFlushDenormals flush;
  for (int k = 0; k < input_.width; ++k) {
    if (input_.format == InputFormat::kTilesBf16 || input_.format == InputFormat::kTilesInt8) {
      const int element = input_.format == InputFormat::kTilesBf16 ? 2 : 1;
      const int values = 64 / element;
      const uint8_t* at = input_.codes +
                          (static_cast<size_t>(t / 32) * input_.num_steps + k / values) * 2048 +
                          t % 32 * 64 + k % values * element;
      uint16_t bits = 0;
      std::memcpy(&bits, at, element);
      out[k] = element == 2 ? base::FloatFromBf16(bits)
                            : static_cast<float>(static_cast<int8_t>(bits)) * input_.scales[t];
    } else if (input_.format == InputFormat::kRowsInt8) {
      const uint8_t* at =
          input_.codes + t * input_.code_stride + static_cast<size_t>(k) * code_bytes_;
      out[k] = static_cast<float>(kernels.code_value(at)) * input_.scales[t];
    } else if (input_.format == InputFormat::kRowsGroups) {
      const auto code = static_cast<int8_t>(input_.codes[t * input_.code_stride + k]);
      out[k] = static_cast<float>(code) * input_.scales[t * input_.scale_stride + k / kQ4Group * 2];
    } else {
      out[k] = input_.rows[t * input_.stride + k];
    }
  }
}

}  // namespace baton::ops::cpu
