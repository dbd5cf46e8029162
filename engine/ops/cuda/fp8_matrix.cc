#include "engine/ops/cuda/fp8_matrix.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/base/hash_weights.h"
#include "engine/base/status_macros.h"
#include "engine/ops/cuda/linear.h"
#include "engine/ops/quantize.h"

namespace baton::ops::cuda {
namespace {

// One row of blocks at a time.
class BlockRow {
 public:
  explicit BlockRow(const MatrixSource& source)
      : source_(source),
        whole_cols_(source.source_cols()),
        as_stored_(source.read_row_fp8 && source.first_col % kFp8Block == 0),
        codes_(static_cast<size_t>(kFp8Block) * source.cols),
        scales_(Fp8ScalePitch(source.cols)) {}

  // Of rows [first, first + count).
  void Read(int first, int count) { as_stored_ ? ReadCodes(first, count) : Round(first, count); }

  const std::vector<uint8_t>& codes() const { return codes_; }
  const std::vector<float>& scales() const { return scales_; }

 private:
  void ReadCodes(int first, int count) {
    std::vector<uint8_t> codes(whole_cols_);
    std::vector<float> scales((whole_cols_ + kFp8Block - 1) / kFp8Block);
    for (int r = 0; r < count; ++r) {
      source_.read_row_fp8(first + r, codes.data(), scales.data());
      std::copy_n(codes.begin() + source_.first_col, source_.cols, CodesOf(r));
    }
    std::copy_n(scales.begin() + source_.first_col / kFp8Block, source_.cols / kFp8Block,
                scales_.begin());
  }

  void Round(int first, int count) {
    const int blocks = source_.cols / kFp8Block;
    std::vector<float> whole(whole_cols_), values(static_cast<size_t>(count) * source_.cols);
    std::vector<uint32_t> largest(blocks);
    for (int r = 0; r < count; ++r) {
      source_.read_row(first + r, whole.data());
      float* row = &values[static_cast<size_t>(r) * source_.cols];
      std::copy_n(whole.begin() + source_.first_col, source_.cols, row);
      for (int b = 0; b < blocks; ++b)
        largest[b] = std::max(largest[b], LargestMagnitudeBits(row + b * kFp8Block, kFp8Block));
    }
    for (int b = 0; b < blocks; ++b) scales_[b] = Fp8BlockScale(largest[b]);
    for (int r = 0; r < count; ++r) {
      for (int b = 0; b < blocks; ++b) {
        QuantizeFp8(&values[static_cast<size_t>(r) * source_.cols + b * kFp8Block], kFp8Block,
                    scales_[b], CodesOf(r) + b * kFp8Block);
      }
    }
  }

  uint8_t* CodesOf(int r) { return &codes_[static_cast<size_t>(r) * source_.cols]; }

  const MatrixSource& source_;
  const int whole_cols_;
  const bool as_stored_;
  std::vector<uint8_t> codes_;  // [kFp8Block][cols]
  std::vector<float> scales_;   // [cols / kFp8Block], and what rounds the pitch up
};

}  // namespace

absl::Status FillMade(const MatrixSource& source,
                      Element element,
                      float inverse_scale,
                      void* out,
                      cudaStream_t stream) {
  uint8_t* to = static_cast<uint8_t*>(out);
  for (const MatrixSource::MadeRows& made : source.made) {
    BATON_RETURN_IF_ERROR(CudaStatus(HashFill({.out = to,
                                               .element = element,
                                               .rows = made.rows,
                                               .cols = source.cols,
                                               .seed = made.seed,
                                               .first_row = made.first_row,
                                               .first_col = source.first_col,
                                               .std = made.std,
                                               .inverse_scale = inverse_scale},
                                              stream),
                                     "made-up weights"));
    to += static_cast<size_t>(made.rows) * source.cols * ElementSize(element);
  }
  return CudaStatus(cudaStreamSynchronize(stream), "made-up weights");
}

absl::StatusOr<std::unique_ptr<CudaMatrix>> PackFp8(const MatrixSource& source,
                                                    cudaStream_t stream) {
  if (source.rows % kFp8Multiple != 0 || source.cols % kFp8Block != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cuda: rows=", source.rows, " cols=", source.cols, ": fp8 wants multiples of ",
                     kFp8Multiple, " and ", kFp8Block));
  }
  const int blocks = (source.rows + kFp8Block - 1) / kFp8Block;
  const size_t pitch_bytes = Fp8ScalePitch(source.cols) * sizeof(float);
  BATON_ASSIGN_OR_RETURN(DeviceBuffer data,
                         DeviceBuffer::Allocate(static_cast<size_t>(source.rows) * source.cols));
  BATON_ASSIGN_OR_RETURN(DeviceBuffer scales, DeviceBuffer::Allocate(blocks * pitch_bytes));
  if (!source.made.empty()) {
    float largest = 0;
    for (const MatrixSource::MadeRows& made : source.made)
      largest = std::max(largest, base::kHashWeightMax * made.std);
    const float scale = Fp8BlockScale(MagnitudeBits(largest));
    const std::vector<float> all(scales.size() / sizeof(float), scale);
    BATON_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpyAsync(scales.data(), all.data(), scales.size(), cudaMemcpyHostToDevice, stream),
        "weight scales"));
    BATON_RETURN_IF_ERROR(FillMade(source, Element::kFp8, 1 / scale, data.data(), stream));
    return std::make_unique<CudaMatrix>(source.rows, source.cols, Element::kFp8, std::move(data),
                                        std::move(scales));
  }
  BlockRow row(source);
  for (int b = 0; b < blocks; ++b) {
    const int first = b * kFp8Block, count = std::min(kFp8Block, source.rows - first);
    row.Read(first, count);
    BATON_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpyAsync(data.as<uint8_t>() + static_cast<size_t>(first) * source.cols,
                                   row.codes().data(), static_cast<size_t>(count) * source.cols,
                                   cudaMemcpyHostToDevice, stream),
                   "weights"));
    BATON_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpyAsync(scales.as<uint8_t>() + b * pitch_bytes, row.scales().data(),
                                   pitch_bytes, cudaMemcpyHostToDevice, stream),
                   "weight scales"));
  }
  BATON_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream), "weights"));
  return std::make_unique<CudaMatrix>(source.rows, source.cols, Element::kFp8, std::move(data),
                                      std::move(scales));
}

}  // namespace baton::ops::cuda
