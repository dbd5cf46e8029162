// Bytes between host and device outside of passes: weights, pools, what tests read.

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/base/bf16.h"
#include "engine/base/cuda_memory.h"
#include "engine/base/fp8.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/ops/cuda/cuda_backend_class.h"
#include "engine/ops/cuda/fp8_matrix.h"
#include "engine/ops/validate.h"

namespace baton::ops::cuda {

absl::StatusOr<std::unique_ptr<Matrix>> CudaBackend::Pack(const MatrixSource& source,
                                                          bool interleave_half) {
  BATON_RETURN_IF_ERROR(CheckPack(source, dtype_, interleave_half));
  // (SiluMul reads gate and up as two halves, so nothing is interleaved.)
  if (source.in_fp8 && IsFp8Width(source.cols)) {
    BATON_ASSIGN_OR_RETURN(std::unique_ptr<CudaMatrix> matrix, PackFp8(source, stream_));
    return std::unique_ptr<Matrix>(std::move(matrix));
  }
  const size_t row_bytes = static_cast<size_t>(source.cols) * ElementSize(linear_element_);
  BATON_ASSIGN_OR_RETURN(DeviceBuffer data, DeviceBuffer::Allocate(source.rows * row_bytes));
  if (!source.made.empty() && source.cols % 8 == 0) {
    BATON_RETURN_IF_ERROR(FillMade(source, linear_element_, 1, data.data(), stream_));
    return std::unique_ptr<Matrix>(std::make_unique<CudaMatrix>(
        source.rows, source.cols, linear_element_, std::move(data), DeviceBuffer()));
  }
  constexpr size_t kStagingBytes = size_t{4} << 20;
  const int rows_at_once = static_cast<int>(
      std::clamp<size_t>(kStagingBytes / row_bytes, 1, static_cast<size_t>(source.rows)));
  std::vector<float> whole(source.source_cols());
  const auto row = absl::MakeConstSpan(whole).subspan(source.first_col, source.cols);
  std::vector<uint8_t> staging(rows_at_once * row_bytes);
  for (int first = 0; first < source.rows; first += rows_at_once) {
    const int rows = std::min(rows_at_once, source.rows - first);
    for (int r = 0; r < rows; ++r) {
      source.read_row(first + r, whole.data());
      EncodeRow(row, staging.data() + r * row_bytes);
    }
    BATON_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpyAsync(data.as<uint8_t>() + first * row_bytes, staging.data(),
                                   rows * row_bytes, cudaMemcpyHostToDevice, stream_),
                   "weights"));
  }
  BATON_RETURN_IF_ERROR(Drain());
  return std::unique_ptr<Matrix>(std::make_unique<CudaMatrix>(
      source.rows, source.cols, linear_element_, std::move(data), DeviceBuffer()));
}

void CudaBackend::EncodeRow(absl::Span<const float> row, uint8_t* out) const {
  if (linear_element_ == Element::kF32) {
    std::memcpy(out, row.data(), row.size() * sizeof(float));
    return;
  }
  for (size_t i = 0; i < row.size(); ++i) {
    const uint16_t bits = base::Bf16FromFloat(row[i]);
    std::memcpy(out + 2 * i, &bits, 2);
  }
}

absl::StatusOr<base::Buffer> CudaBackend::NewPool(size_t bytes, bool shared) {
  const OnDevice here(device_);
  if (shared) {
    absl::StatusOr<base::Buffer> memory = base::AllocateExportable(device_, bytes);
    if (memory.ok() || absl::IsResourceExhausted(memory.status())) return memory;
    BATON_LOG(Info, "KV pool by cudaMalloc, shared by legacy handles: ", memory.status().message());
  }
  BATON_ASSIGN_OR_RETURN(DeviceBuffer memory, DeviceBuffer::Allocate(bytes));
  auto* owner = new DeviceBuffer(std::move(memory));
  return base::Buffer::Adopt(owner->as<uint8_t>(), bytes, [owner] { delete owner; });
}

absl::Status CudaBackend::CopyInPool(uint8_t* to, const uint8_t* from, size_t bytes) {
  return CudaStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_),
                    "copy block");
}

absl::Status CudaBackend::CopyFromPool(uint8_t* host, const uint8_t* pool, size_t bytes) {
  BATON_RETURN_IF_ERROR(CudaStatus(
      cudaMemcpyAsync(host, pool, bytes, cudaMemcpyDeviceToHost, stream_), "copy from pool"));
  return Drain();
}

absl::Status CudaBackend::CopyToPool(uint8_t* pool, const uint8_t* host, size_t bytes) {
  BATON_RETURN_IF_ERROR(CudaStatus(
      cudaMemcpyAsync(pool, host, bytes, cudaMemcpyHostToDevice, stream_), "copy to pool"));
  return Drain();
}

absl::StatusOr<std::vector<float>> CudaBackend::Read(const Activation& activation,
                                                     int num_tokens,
                                                     int width) {
  const CudaActivation& in = Const(activation);
  BATON_RETURN_IF_ERROR(CheckAtMost("read", "T", num_tokens, in.max_tokens));
  BATON_RETURN_IF_ERROR(CheckEqual("read", "width", in.width, width));
  BATON_RETURN_IF_ERROR(Sum());
  std::vector<float> values;
  BATON_RETURN_IF_ERROR(ReadRows(in.data, in.element, num_tokens, width, &values));
  if (in.element == Element::kFp8) BATON_RETURN_IF_ERROR(ApplyScales(in, num_tokens, &values));
  if (in.query_width == 0) return values;
  std::vector<float> queries;
  BATON_RETURN_IF_ERROR(ReadRows(in.queries, in.q_element, num_tokens, in.query_width, &queries));
  for (int t = 0; t < num_tokens; ++t) {
    std::copy_n(queries.begin() + static_cast<ptrdiff_t>(t) * in.query_width, in.query_width,
                values.begin() + static_cast<ptrdiff_t>(t) * width);
  }
  return values;
}

absl::Status CudaBackend::ApplyScales(const CudaActivation& in,
                                      int num_tokens,
                                      std::vector<float>* values) {
  std::vector<float> scales(static_cast<size_t>(in.width / kFp8Block) * in.pitch);
  BATON_RETURN_IF_ERROR(
      CudaStatus(cudaMemcpy(scales.data(), in.scales.data(), scales.size() * sizeof(float),
                            cudaMemcpyDeviceToHost),
                 "read scales"));
  for (int t = 0; t < num_tokens; ++t) {
    for (int i = 0; i < in.width; ++i) {
      (*values)[static_cast<size_t>(t) * in.width + i] *=
          scales[static_cast<size_t>(i / kFp8Block) * in.pitch + t];
    }
  }
  return absl::OkStatus();
}

absl::Status CudaBackend::ReadRows(const DeviceBuffer& data,
                                   Element element,
                                   int num_tokens,
                                   int width,
                                   std::vector<float>* values) {
  const size_t count = static_cast<size_t>(num_tokens) * width;
  std::vector<uint8_t> bytes(count * ElementSize(element));
  if (count > 0) {
    BATON_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpyAsync(bytes.data(), data.data(), bytes.size(), cudaMemcpyDeviceToHost, stream_),
        "read"));
  }
  BATON_RETURN_IF_ERROR(Drain());
  values->resize(count);
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, &bytes[i * ElementSize(element)], ElementSize(element));
    (*values)[i] = element == Element::kF32    ? base::FloatFromBits(bits)
                   : element == Element::kFp8  ? base::FloatFromFp8(static_cast<uint8_t>(bits))
                   : element == Element::kBf16 ? base::FloatFromBf16(static_cast<uint16_t>(bits))
                                               : HalfToFloat(bits);
  }
  return absl::OkStatus();
}

// f16 bits, exactly.
float CudaBackend::HalfToFloat(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u)
    return base::FloatFromBits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  const float value = base::FloatFromBits(magnitude << 13) * 0x1p112f;
  return base::FloatFromBits(base::FloatBits(value) | sign);
}

}  // namespace baton::ops::cuda
