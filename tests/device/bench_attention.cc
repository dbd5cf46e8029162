// Prefill attention by itself, in the shape of Qwen3-8B: our own kernel, and FlashInfer's where the
// program has it.

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "engine/base/status_macros.h"
#include "engine/kv/kv_layout.h"
#include "engine/ops/cuda/attention_plan.h"
#include "engine/ops/cuda/cuda_device.h"
#include "engine/ops/cuda/device_buffer.h"
#include "engine/ops/cuda/flash_plan.h"
#include "engine/ops/cuda/flash_prefill.h"
#include "engine/ops/cuda/kernels.h"
#include "tests/device/device_bench.h"

namespace baton::ops::cuda {
// Defined in programs that link it, null in others.
[[gnu::weak]] cudaError_t FlashPrefill(const FlashPrefillParams& params, cudaStream_t stream);
}  // namespace baton::ops::cuda

namespace baton::device {
namespace {

using ops::cuda::CudaDevice;
using ops::cuda::CudaStatus;
using ops::cuda::DeviceBuffer;
using ops::cuda::Element;

constexpr int kHeads = 32, kKvHeads = 8, kDim = 128, kWidth = kHeads * kDim;
constexpr int kAttentionRuns = 5;
constexpr float kScale = 0x1p-4f;  // of queries, keys and values: codes of 16 or so

// One sequence: its queries are the last `queries` of `context` tokens.
class Chunk {
 public:
  static absl::StatusOr<Chunk> Make(int queries, int context, int num_sms) {
    Chunk chunk;
    chunk.queries_ = queries;
    std::vector<kv::BlockId> table(kv::BlocksFor(context));
    std::iota(table.begin(), table.end(), 0);
    const ops::SequenceView sequence = {0, queries, context, table};
    ops::PagedAttentionArgs args;
    args.num_tokens = queries;
    args.num_heads = kHeads;
    args.num_kv_heads = kKvHeads;
    args.head_dim = kDim;
    args.sequences = {&sequence, 1};
    ops::cuda::AttentionPlan plan;
    plan.Fill(args, num_sms);
    chunk.num_tiles_ = static_cast<int>(plan.tiles.size());
    chunk.plan_.Fill(plan, kHeads, kKvHeads, kDim, num_sms);
    BATON_ASSIGN_OR_RETURN(chunk.tiles_, Upload(absl::MakeConstSpan(plan.tiles)));
    BATON_ASSIGN_OR_RETURN(chunk.work_, Upload(chunk.plan_.words()));
    const std::vector<int32_t> step = {0, queries, context};  // query starts, context lengths
    BATON_ASSIGN_OR_RETURN(chunk.step_, Upload(absl::MakeConstSpan(step)));
    BATON_ASSIGN_OR_RETURN(chunk.table_, Upload(absl::MakeConstSpan(table)));
    BATON_RETURN_IF_ERROR(chunk.FillCache(static_cast<int>(table.size())));
    BATON_RETURN_IF_ERROR(chunk.FillQueries());
    chunk.params_.max_blocks = static_cast<int>(table.size());
    return chunk;
  }

  absl::Status RunOwn() {
    return CudaStatus(
        PrefillAttention(params_, tiles_.as<const ops::cuda::PrefillTile>(), num_tiles_, nullptr),
        "own");
  }
  // With the pass that rounds the queries.
  absl::Status RunFlash() {
    BATON_RETURN_IF_ERROR(CudaStatus(ops::cuda::QuantizeQueries({.q = params_.q,
                                                                 .out = codes_.as<uint8_t>(),
                                                                 .num_tokens = queries_,
                                                                 .width = kWidth,
                                                                 .scale = kScale},
                                                                nullptr),
                                     "quantize queries"));
    return CudaStatus(ops::cuda::FlashPrefill({.q = codes_.as<const uint8_t>(),
                                               .q_scale = kScale,
                                               .out = params_.out.data,
                                               .num_tokens = queries_,
                                               .num_heads = kHeads,
                                               .softmax_scale = params_.softmax_scale,
                                               .cache = params_.cache,
                                               .block_tables = params_.block_tables,
                                               .work = plan_.At(work_.as<const int32_t>())},
                                              nullptr),
                      "flashinfer");
  }
  // The output of the last run. [T][Hq * D] bf16 bits.
  absl::StatusOr<std::vector<uint16_t>> Rows() const {
    std::vector<uint16_t> rows(out_.size() / sizeof(uint16_t));
    BATON_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpy(rows.data(), out_.data(), out_.size(), cudaMemcpyDeviceToHost), "output"));
    return rows;
  }

 private:
  template <typename T>
  static absl::StatusOr<DeviceBuffer> Upload(absl::Span<const T> values) {
    BATON_ASSIGN_OR_RETURN(DeviceBuffer buffer, DeviceBuffer::Allocate(values.size() * sizeof(T)));
    BATON_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpy(buffer.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
        "upload"));
    return buffer;
  }
  // Keys and values of spread 1 in codes of spread 1 / kScale.
  absl::Status FillCache(int num_blocks) {
    const int row = kKvHeads * kDim, rows = 2 * kv::kBlockTokens * num_blocks;
    BATON_ASSIGN_OR_RETURN(cache_, DeviceBuffer::Allocate(static_cast<size_t>(rows) * row));
    BATON_RETURN_IF_ERROR(CudaStatus(ops::cuda::HashFill({.out = cache_.data(),
                                                          .element = Element::kFp8,
                                                          .rows = rows,
                                                          .cols = row,
                                                          .seed = 1,
                                                          .std = 1,
                                                          .inverse_scale = 1 / kScale},
                                                         nullptr),
                                     "cache"));
    const std::vector<float> scales(2 * kKvHeads, kScale);
    BATON_ASSIGN_OR_RETURN(scales_, Upload(absl::MakeConstSpan(scales)));
    params_.cache = {.base = cache_.as<uint8_t>(),
                     .block_bytes = int64_t{2} * kv::kBlockTokens * row,
                     .format = ops::cuda::CacheFormat::kFp8,
                     .num_kv_heads = kKvHeads,
                     .head_dim = kDim,
                     .scales = scales_.as<float>()};
    return absl::OkStatus();
  }
  absl::Status FillQueries() {
    std::vector<__half> row(kWidth);
    BATON_ASSIGN_OR_RETURN(q_, DeviceBuffer::Allocate(sizeof(__half) * queries_ * kWidth));
    for (int t = 0; t < queries_; ++t) {
      // Any numbers of spread 1 or so; a row's own first one is enough to tell rows apart.
      for (int i = 0; i < kWidth; ++i)
        row[i] = __float2half(static_cast<float>((i * 37 + t * 101) % 97 - 48) / 28.0f);
      BATON_RETURN_IF_ERROR(
          CudaStatus(cudaMemcpy(q_.as<__half>() + size_t{1} * t * kWidth, row.data(),
                                kWidth * sizeof(__half), cudaMemcpyHostToDevice),
                     "queries"));
    }
    BATON_ASSIGN_OR_RETURN(codes_, DeviceBuffer::Allocate(size_t{1} * queries_ * kWidth));
    BATON_ASSIGN_OR_RETURN(out_, DeviceBuffer::Allocate(size_t{2} * queries_ * kWidth));
    params_.q = q_.data();
    params_.out = {.data = out_.data(), .element = Element::kBf16};
    params_.num_heads = kHeads;
    params_.softmax_scale = 1 / std::sqrt(static_cast<float>(kDim));
    params_.query_starts = step_.as<const int32_t>();
    params_.context_lens = step_.as<const int32_t>() + 2;
    params_.block_tables = table_.as<const int32_t>();
    return absl::OkStatus();
  }

  int queries_ = 0, num_tiles_ = 0;
  ops::cuda::FlashPlan plan_;
  ops::cuda::PagedAttentionParams params_;
  DeviceBuffer tiles_, work_, step_, table_, cache_, scales_, q_, codes_, out_;
};

absl::StatusOr<double> Seconds(const std::function<absl::Status()>& run) {
  return MedianSeconds(kAttentionRuns, [&]() -> absl::Status {
    BATON_RETURN_IF_ERROR(run());
    return CudaStatus(cudaDeviceSynchronize(), "wait");
  });
}

// Of the bf16 rows of the two kernels.
double Difference(const std::vector<uint16_t>& a, const std::vector<uint16_t>& b) {
  const auto value = [](uint16_t bits) {
    const uint32_t word = uint32_t{bits} << 16;
    float f;
    std::memcpy(&f, &word, sizeof(f));
    return double{f};
  };
  double error = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = value(a[i]) - value(b[i]);
    error += difference * difference;
    size += value(a[i]) * value(a[i]);
  }
  return std::sqrt(error / size);
}

}  // namespace

absl::StatusOr<Json> Attention(const BenchOptions& options) {
  BATON_ASSIGN_OR_RETURN(const CudaDevice device, ops::cuda::OpenDevice(0));
  const bool flash = &ops::cuda::FlashPrefill != nullptr && device.major == 9 && device.minor == 0;
  using Shape = std::pair<int, int>;  // queries, context
  const std::vector<Shape> shapes =
      options.tiny ? std::vector<Shape>{{9, 9}}
                   : std::vector<Shape>{
                         {1024, 1024}, {4096, 4096}, {8192, 8192}, {1024, 8192}, {8192, 32768}};
  Json rows = Json::array();
  for (const auto& [queries, context] : shapes) {
    BATON_ASSIGN_OR_RETURN(Chunk chunk, Chunk::Make(queries, context, device.num_sms));
    // A query sees what was before it and half of the chunk.
    const double pairs = 1.0 * queries * (context - queries) + 0.5 * queries * (queries + 1.0);
    const double flops = 4.0 * kDim * kHeads * pairs;
    BATON_ASSIGN_OR_RETURN(const double own, Seconds([&] { return chunk.RunOwn(); }));
    Json row = {{"queries", queries},
                {"context", context},
                {"own_us", own * 1e6},
                {"own_tflops", flops / own / 1e12}};
    if (flash) {
      BATON_ASSIGN_OR_RETURN(const std::vector<uint16_t> want, chunk.Rows());
      BATON_ASSIGN_OR_RETURN(const double seconds, Seconds([&] { return chunk.RunFlash(); }));
      BATON_ASSIGN_OR_RETURN(const std::vector<uint16_t> got, chunk.Rows());
      row["flashinfer_us"] = seconds * 1e6;
      row["flashinfer_tflops"] = flops / seconds / 1e12;
      row["relative_difference"] = Difference(want, got);
    }
    rows.push_back(std::move(row));
  }
  return Json{{"flashinfer", flash}, {"chunks", rows}};
}

}  // namespace baton::device
