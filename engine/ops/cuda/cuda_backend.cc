#include "engine/ops/cuda/cuda_backend.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/base/bf16.h"
#include "engine/base/cuda_memory.h"
#include "engine/base/fp8.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/ops/cuda/attention_plan.h"
#include "engine/ops/cuda/cuda_device.h"
#include "engine/ops/cuda/cuda_tensors.h"
#include "engine/ops/cuda/device_group.h"
#include "engine/ops/cuda/fp8_matrix.h"
#include "engine/ops/cuda/graph_cache.h"
#include "engine/ops/cuda/kernels.h"
#include "engine/ops/cuda/linear.h"
#include "engine/ops/cuda/pass_arrays.h"
#include "engine/ops/cuda/step_upload.h"
#include "engine/ops/quantize.h"
#include "engine/ops/validate.h"

namespace baton::ops::cuda {
namespace {

CudaActivation& Mutable(Activation* activation) {
  return static_cast<CudaActivation&>(*activation);
}
const CudaActivation& Const(const Activation& activation) {
  return static_cast<const CudaActivation&>(activation);
}
const CudaMatrix& Weights(const Matrix& matrix) { return static_cast<const CudaMatrix&>(matrix); }

CacheFormat FormatOf(kv::KvFormat format) {
  switch (format) {
    case kv::KvFormat::kFp8:
      return CacheFormat::kFp8;
    case kv::KvFormat::kFp8Dynamic:
      return CacheFormat::kFp8Dynamic;
    case kv::KvFormat::kBf16:
      return CacheFormat::kBf16;
    case kv::KvFormat::kF32:
      break;
  }
  return CacheFormat::kF32;
}

class CudaBackend : public Backend {
 public:
  CudaBackend(WeightDtype dtype, const BackendOptions& options)
      : dtype_(dtype),
        device_(options.device),
        eager_(options.enforce_eager),
        gemm_cache_(options.gemm_cache),
        linear_element_(dtype == WeightDtype::kF32 ? Element::kF32 : Element::kBf16) {}
  ~CudaBackend() override {
    if (stream_ == nullptr) return;
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }

  absl::Status Init() {
    BATON_ASSIGN_OR_RETURN(const CudaDevice device, OpenDevice(device_));
    name_ = device.name;
    pci_id_ = device.pci_id;
    num_sms_ = device.num_sms;
    BATON_RETURN_IF_ERROR(
        CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"));
    BATON_ASSIGN_OR_RETURN(linear_, Linear::Create({.device = name_, .cache = gemm_cache_}));
    const size_t partial_bytes = DecodeAttentionWorkspace(1, 1, 1, kMaxPartials, 128);
    BATON_ASSIGN_OR_RETURN(attention_workspace_, DeviceBuffer::Allocate(partial_bytes));
    BATON_ASSIGN_OR_RETURN(attention_counters_,
                           DeviceBuffer::Allocate(kMaxPartials * sizeof(int32_t)));
    return CudaStatus(
        cudaMemsetAsync(attention_counters_.data(), 0, attention_counters_.size(), stream_),
        "counters");
  }

  absl::string_view name() const override { return "cuda"; }
  std::string description() const override {
    return absl::StrCat("cuda ", name_, " sms=", num_sms_);
  }
  WeightDtype weight_dtype() const override { return dtype_; }
  uint32_t sum_order_version() const override { return kDeviceSumOrderVersion; }

  std::string device_id() const override { return pci_id_; }

  absl::StatusOr<DeviceMemory> device_memory() override {
    const OnDevice here(device_);
    size_t free = 0, total = 0;
    BATON_RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free, &total), "device memory"));
    return DeviceMemory{.total_bytes = total, .free_bytes = free};
  }

  absl::StatusOr<std::unique_ptr<Matrix>> Pack(const MatrixSource& source,
                                               bool interleave_half) override {
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

  absl::StatusOr<std::unique_ptr<Activation>> NewActivation(ActivationKind kind,
                                                            int max_tokens,
                                                            int width) override {
    BATON_RETURN_IF_ERROR(CheckAtMost("activation", "max_tokens", max_tokens, int64_t{1} << 24));
    BATON_RETURN_IF_ERROR(CheckAtMost("activation", "width", width, int64_t{1} << 24));
    if (width % 8 != 0)
      return absl::InvalidArgumentError(
          absl::StrCat("cuda: width=", width, ": a multiple of 8 is needed"));
    auto activation = std::make_unique<CudaActivation>();
    activation->kind = kind;
    activation->element = kind == ActivationKind::kResidual ? Element::kF32 : linear_element_;
    if (kind == ActivationKind::kLinearInput && IsFp8Width(width)) {
      activation->element = Element::kFp8;
      BATON_ASSIGN_OR_RETURN(
          activation->scales,
          DeviceBuffer::Allocate(sizeof(float) * (width / kFp8Block) * PaddedTokens(max_tokens)));
    }
    activation->q_element = dtype_ == WeightDtype::kF32 ? Element::kF32 : Element::kF16;
    activation->max_tokens = max_tokens;
    max_tokens_ = std::min(max_tokens_, max_tokens);
    activation->width = width;
    const size_t count = static_cast<size_t>(PaddedTokens(max_tokens)) * width;
    BATON_ASSIGN_OR_RETURN(activation->data,
                           DeviceBuffer::Allocate(count * ElementSize(activation->element)));
    if (kind == ActivationKind::kResidual && group_ != nullptr)
      BATON_RETURN_IF_ERROR(group_->Reserve(PaddedTokens(max_tokens), width));
    if (kind == ActivationKind::kProjected) {
      BATON_ASSIGN_OR_RETURN(activation->queries,
                             DeviceBuffer::Allocate(count * ElementSize(activation->q_element)));
    }
    return std::unique_ptr<Activation>(std::move(activation));
  }

  absl::Status JoinGroup(parallel::TpGroup* group) override {
    BATON_ASSIGN_OR_RETURN(group_, DeviceGroup::Join(group, device_, stream_));
    return absl::OkStatus();
  }

  bool matrices_are_shared() const override { return false; }

  absl::StatusOr<base::Buffer> NewPool(size_t bytes, bool shared) override {
    const OnDevice here(device_);
    if (shared) {
      absl::StatusOr<base::Buffer> memory = base::AllocateExportable(device_, bytes);
      if (memory.ok() || absl::IsResourceExhausted(memory.status())) return memory;
      BATON_LOG(Info,
                "KV pool by cudaMalloc, shared by legacy handles: ", memory.status().message());
    }
    BATON_ASSIGN_OR_RETURN(DeviceBuffer memory, DeviceBuffer::Allocate(bytes));
    auto* owner = new DeviceBuffer(std::move(memory));
    return base::Buffer::Adopt(owner->as<uint8_t>(), bytes, [owner] { delete owner; });
  }

  absl::Status CopyInPool(uint8_t* to, const uint8_t* from, size_t bytes) override {
    return CudaStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_),
                      "copy block");
  }

  bool pools_on_host() const override { return false; }

  absl::Status CopyFromPool(uint8_t* host, const uint8_t* pool, size_t bytes) override {
    BATON_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpyAsync(host, pool, bytes, cudaMemcpyDeviceToHost, stream_), "copy from pool"));
    return Drain();
  }

  absl::Status CopyToPool(uint8_t* pool, const uint8_t* host, size_t bytes) override {
    BATON_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpyAsync(pool, host, bytes, cudaMemcpyHostToDevice, stream_), "copy to pool"));
    return Drain();
  }

  // A small pass is padded to one of few shapes, whether it becomes a graph or not: so its results
  // are the same either way.
  absl::Status RunPass(const PassInputs& inputs,
                       absl::FunctionRef<absl::Status(bool whole)> issue,
                       float* logits) override {
    if (group_ == nullptr) return RunPassOfRank(inputs, issue, logits);
    unsummed_ = nullptr;
    BATON_RETURN_IF_ERROR(group_->BeginPass(stream_));
    const absl::Status status = RunPassOfRank(inputs, issue, logits);
    if (!status.ok()) group_->CallOff();
    return status;
  }

  absl::Status Embed(const Matrix& table,
                     absl::Span<const int32_t> ids,
                     Activation* residual) override {
    CudaActivation& out = Mutable(residual);
    BATON_RETURN_IF_ERROR(CheckAtMost("embed", "T", ids.size(), out.max_tokens));
    BATON_RETURN_IF_ERROR(CheckEqual("embed", "E", table.cols(), out.width));
    BATON_RETURN_IF_ERROR(CheckIds(ids, table.rows()));
    const int32_t* device_ids = pass_ == nullptr ? nullptr : pass_->ids();
    if (pass_ == nullptr) {
      BATON_ASSIGN_OR_RETURN(device_ids, ids_.Upload(ids, stream_));
    }
    return CudaStatus(cuda::Embed({.table = Weights(table).data(),
                                   .table_element = linear_element_,
                                   .ids = device_ids,
                                   .residual = out.data.as<float>(),
                                   .num_tokens = Padded(static_cast<int>(ids.size())),
                                   .width = out.width},
                                  stream_),
                      "embed");
  }

  absl::Status RmsNorm(const Activation& residual,
                       int num_tokens,
                       absl::Span<const float> weight,
                       float eps,
                       Activation* out) override {
    const CudaActivation& in = Const(residual);
    CudaActivation& normed = Mutable(out);
    BATON_RETURN_IF_ERROR(
        CheckAtMost("rms norm", "T", num_tokens, std::min(in.max_tokens, normed.max_tokens)));
    BATON_RETURN_IF_ERROR(CheckEqual("rms norm", "weight", weight.size(), in.width));
    BATON_RETURN_IF_ERROR(CheckEqual("rms norm", "E", normed.width, in.width));
    num_tokens = Padded(num_tokens);
    const LinearRows rows = RowsOf(&normed, num_tokens);
    return unsummed_ == &in ? SumAndNorm(weight, eps, rows)
                            : Norm(in, nullptr, num_tokens, weight, eps, rows);
  }

  absl::Status QkvProject(const Activation& x,
                          int num_tokens,
                          const Matrix& weight,
                          absl::Span<const float> bias,
                          Activation* qkv) override {
    const CudaActivation& in = Const(x);
    CudaActivation& out = Mutable(qkv);
    BATON_RETURN_IF_ERROR(
        CheckAtMost("qkv", "T", num_tokens, std::min(in.max_tokens, out.max_tokens)));
    BATON_RETURN_IF_ERROR(CheckEqual("qkv", "E", weight.cols(), in.width));
    BATON_RETURN_IF_ERROR(CheckEqual("qkv", "rows", weight.rows(), out.width));
    if (!bias.empty()) BATON_RETURN_IF_ERROR(CheckEqual("qkv", "bias", bias.size(), out.width));
    const void* device_bias = nullptr;
    if (linear_element_ == Element::kBf16) {
      BATON_ASSIGN_OR_RETURN(device_bias, constants_.GetBf16(bias, stream_));
    } else {
      BATON_ASSIGN_OR_RETURN(device_bias, constants_.Get(bias, stream_));
    }
    out.query_width = 0;
    return Multiply(in, Padded(num_tokens), weight, {.out = out.element, .bias = !bias.empty()},
                    device_bias, out.data.data());
  }

  absl::Status QkNormRopeAppend(const QkNormRopeAppendArgs& args) override {
    CudaActivation& qkv = Mutable(args.qkv);
    BATON_RETURN_IF_ERROR(CheckQkNormRopeAppend(args, qkv.max_tokens, qkv.width));
    QkNormRopeAppendParams params;
    params.qkv = qkv.data.data();
    params.qkv_element = qkv.element;
    params.q_out = qkv.queries.data();
    params.q_element = qkv.q_element;
    params.num_tokens = Padded(args.num_tokens);
    params.num_heads = args.num_heads;
    params.eps = args.eps;
    BATON_ASSIGN_OR_RETURN(params.q_weight, constants_.Get(args.q_weight, stream_));
    BATON_ASSIGN_OR_RETURN(params.k_weight, constants_.Get(args.k_weight, stream_));
    BATON_ASSIGN_OR_RETURN(params.rope, constants_.Get(args.rope, stream_));
    if (pass_ != nullptr) {
      params.positions = pass_->positions();
      params.slots = pass_->slots();
    } else {
      BATON_ASSIGN_OR_RETURN(params.positions, positions_.Upload(args.positions, stream_));
      BATON_ASSIGN_OR_RETURN(params.slots, slots_.Upload(args.slots, stream_));
    }
    BATON_ASSIGN_OR_RETURN(params.cache, Cache(args.cache));
    qkv.query_width = args.num_heads * args.head_dim;
    return CudaStatus(cuda::QkNormRopeAppend(params, stream_), "qk norm rope append");
  }

  absl::Status PagedAttention(const PagedAttentionArgs& args) override {
    const CudaActivation& qkv = Const(*args.qkv);
    CudaActivation& out = Mutable(args.out);
    BATON_RETURN_IF_ERROR(
        CheckPagedAttention(args, std::min(qkv.max_tokens, out.max_tokens), qkv.width, out.width));
    if (args.num_tokens == 0) return absl::OkStatus();
    BATON_RETURN_IF_ERROR(
        CheckEqual("paged attention", "queries", qkv.query_width, args.num_heads * args.head_dim));
    PagedAttentionParams params;
    params.q = qkv.queries.data();
    params.q_element = qkv.q_element;
    params.out = RowsOf(&out, Padded(args.num_tokens));
    params.num_heads = args.num_heads;
    params.softmax_scale = args.softmax_scale;
    BATON_ASSIGN_OR_RETURN(params.cache, Cache(args.cache));
    const bool fp8 =
        params.cache.format == CacheFormat::kFp8 || params.cache.format == CacheFormat::kFp8Dynamic;
    const bool tensor_cores =
        fp8 && qkv.q_element == Element::kF16 && (args.head_dim == 64 || args.head_dim == 128);
    // The kernels write e4m3 themselves where a head is a group of 128; else what they write is
    // rounded afterwards.
    const bool round =
        out.element == Element::kFp8 && !(tensor_cores && args.head_dim == kFp8Block);
    if (round) {
      BATON_RETURN_IF_ERROR(
          Grow(static_cast<size_t>(out.max_tokens) * out.width * ElementSize(linear_element_),
               &attention_rows_));
      params.out = {.data = attention_rows_.data(), .element = linear_element_};
    }
    BATON_RETURN_IF_ERROR(pass_ == nullptr ? AttendStep(args, params, tensor_cores)
                                           : AttendPass(params, tensor_cores));
    if (!round) return absl::OkStatus();
    const int num_tokens = Padded(args.num_tokens);
    return CudaStatus(QuantizeRows({.rows = attention_rows_.data(),
                                    .element = linear_element_,
                                    .out = RowsOf(&out, num_tokens),
                                    .num_tokens = num_tokens,
                                    .width = out.width},
                                   stream_),
                      "quantize rows");
  }

  absl::Status ProjectAdd(const Activation& x,
                          int num_tokens,
                          const Matrix& weight,
                          Activation* residual) override {
    const CudaActivation& in = Const(x);
    CudaActivation& out = Mutable(residual);
    BATON_RETURN_IF_ERROR(
        CheckAtMost("project", "T", num_tokens, std::min(in.max_tokens, out.max_tokens)));
    BATON_RETURN_IF_ERROR(CheckEqual("project", "K", weight.cols(), in.width));
    BATON_RETURN_IF_ERROR(CheckEqual("project", "E", weight.rows(), out.width));
    num_tokens = Padded(num_tokens);
    void* to = out.data.data();
    if (group_ != nullptr) {
      // This rank's part; who reads the residual next adds the ranks' parts to it.
      BATON_RETURN_IF_ERROR(Sum());
      to = group_->part();
      unsummed_ = &out;
      unsummed_tokens_ = num_tokens;
    }
    return Multiply(in, num_tokens, weight, {.out = Element::kF32, .accumulate = group_ == nullptr},
                    nullptr, to);
  }

  absl::Status GateUpSilu(const Activation& x,
                          int num_tokens,
                          const Matrix& weight,
                          Activation* out) override {
    const CudaActivation& in = Const(x);
    CudaActivation& inner = Mutable(out);
    BATON_RETURN_IF_ERROR(
        CheckAtMost("gate up", "T", num_tokens, std::min(in.max_tokens, inner.max_tokens)));
    BATON_RETURN_IF_ERROR(CheckEqual("gate up", "E", weight.cols(), in.width));
    BATON_RETURN_IF_ERROR(CheckEqual("gate up", "2F", weight.rows(), 2 * inner.width));
    const size_t bytes = static_cast<size_t>(PaddedTokens(inner.max_tokens)) * weight.rows() *
                         ElementSize(linear_element_);
    BATON_RETURN_IF_ERROR(Grow(bytes, &gate_up_));
    num_tokens = Padded(num_tokens);
    BATON_RETURN_IF_ERROR(
        Multiply(in, num_tokens, weight, {.out = linear_element_}, nullptr, gate_up_.data()));
    return CudaStatus(SiluMul({.gate_up = gate_up_.data(),
                               .element = linear_element_,
                               .out = RowsOf(&inner, num_tokens),
                               .num_tokens = num_tokens,
                               .width = inner.width},
                              stream_),
                      "silu");
  }

  absl::Status Logits(const Activation& residual,
                      absl::Span<const int32_t> rows,
                      absl::Span<const float> weight,
                      float eps,
                      const Matrix& head,
                      float* logits) override {
    const CudaActivation& in = Const(residual);
    BATON_RETURN_IF_ERROR(CheckEqual("logits", "E", head.cols(), in.width));
    BATON_RETURN_IF_ERROR(CheckEqual("logits", "weight", weight.size(), in.width));
    for (const int32_t row : rows)
      BATON_RETURN_IF_ERROR(CheckAtMost("logits", "row", row, in.max_tokens - 1));
    if (rows.empty()) return absl::OkStatus();
    const size_t count = pass_ == nullptr ? rows.size() : pass_->shape().rows;
    BATON_RETURN_IF_ERROR(Grow(count * in.width * ElementSize(linear_element_), &logit_input_));
    vocab_ = head.rows();
    const int rank = group_ == nullptr ? 0 : group_->rank(), ranks = group_ == nullptr ? 1 : 2;
    first_logit_ = vocab_ * rank / ranks;
    num_logits_ = vocab_ * (rank + 1) / ranks - first_logit_;
    BATON_RETURN_IF_ERROR(Grow(count * num_logits_ * sizeof(float), &logits_));
    BATON_RETURN_IF_ERROR(Sum());
    const int32_t* device_rows = pass_ == nullptr ? nullptr : pass_->rows();
    if (pass_ == nullptr) {
      BATON_ASSIGN_OR_RETURN(device_rows, rows_.Upload(rows, stream_));
    }
    const int num_rows = static_cast<int>(count);
    BATON_RETURN_IF_ERROR(Norm(in, device_rows, num_rows, weight, eps,
                               {.data = logit_input_.data(), .element = linear_element_}));
    BATON_RETURN_IF_ERROR(linear_->Run({.tokens = num_rows,
                                        .rows = static_cast<int>(num_logits_),
                                        .cols = head.cols(),
                                        .in = linear_element_,
                                        .out = Element::kF32},
                                       {logit_input_.data()}, Weights(head).operand(first_logit_),
                                       nullptr, logits_.data(), stream_));
    return pass_ == nullptr ? CopyLogits(count, logits) : absl::OkStatus();
  }

  absl::Status Synchronize() override {
    BATON_RETURN_IF_ERROR(Drain());
    return group_ == nullptr ? absl::OkStatus() : group_->Barrier();
  }

  absl::StatusOr<std::vector<float>> Read(const Activation& activation,
                                          int num_tokens,
                                          int width) override {
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

 private:
  // In a padded pass the sizes are those of its shape, not of its inputs.
  int Padded(int num_tokens) const { return pass_ == nullptr ? num_tokens : pass_->shape().tokens; }

  absl::Status RunPassOfRank(const PassInputs& inputs,
                             absl::FunctionRef<absl::Status(bool whole)> issue,
                             float* logits) {
    const PassShape shape = inputs.in_one_go ? ShapeOfPass(inputs, max_tokens_) : PassShape();
    if (shape.tokens == 0) return issue(false);
    BATON_ASSIGN_OR_RETURN(const bool moved, pass_arrays_.Send(inputs, shape, stream_));
    if (moved) graphs_.Clear();
    const auto issue_padded = [&]() -> absl::Status {
      if (group_ != nullptr) group_->RestartPass();  // a capture that failed has come this way
      unsummed_ = nullptr;
      pass_ = &pass_arrays_;
      const absl::Status issued = issue(true);
      pass_ = nullptr;
      return issued;
    };
    BATON_RETURN_IF_ERROR(eager_ ? issue_padded()
                                 : graphs_.Run({inputs.model, shape}, issue_padded, stream_));
    return CopyLogits(inputs.logit_rows.size(), logits);
  }

  absl::Status CopyLogits(size_t num_rows, float* logits) {
    BATON_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpy2DAsync(logits + first_logit_, vocab_ * sizeof(float), logits_.data(),
                                     num_logits_ * sizeof(float), num_logits_ * sizeof(float),
                                     num_rows, cudaMemcpyDeviceToHost, stream_),
                   "logits"));
    return Synchronize();
  }

  // Whether what a linear layer of this many columns reads is e4m3; its weights are then, too.
  bool IsFp8Width(int width) const { return dtype_ == WeightDtype::kFp8 && width % kFp8Block == 0; }
  int PaddedTokens(int max_tokens) const {
    return dtype_ == WeightDtype::kFp8 ? RoundUp(max_tokens, kFp8Multiple) : max_tokens;
  }

  // `shape` says what is written; what is read is x and the weight.
  absl::Status Multiply(const CudaActivation& x,
                        int num_tokens,
                        const Matrix& weight,
                        LinearShape shape,
                        const void* bias,
                        void* out) {
    const CudaMatrix& w = Weights(weight);
    if (w.element() != x.element)
      return absl::InternalError("cuda: activation and weights of different elements");
    shape.tokens = x.element == Element::kFp8 ? RoundUp(num_tokens, kFp8Multiple) : num_tokens;
    shape.rows = w.rows();
    shape.cols = w.cols();
    shape.in = x.element;
    return linear_->Run(shape, {x.data.data(), x.scales.as<float>()}, w.operand(), bias, out,
                        stream_);
  }

  absl::Status ApplyScales(const CudaActivation& in, int num_tokens, std::vector<float>* values) {
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

  // residual += the parts of both ranks, where that is still to be done.
  absl::Status Sum() {
    if (unsummed_ == nullptr) return absl::OkStatus();
    return Reduce({});
  }

  absl::Status SumAndNorm(absl::Span<const float> weight, float eps, const LinearRows& out) {
    AllReduceNormParams params;
    BATON_ASSIGN_OR_RETURN(params.weight, constants_.Get(weight, stream_));
    params.out = out;
    params.eps = eps;
    return Reduce(params);
  }

  absl::Status Reduce(AllReduceNormParams params) {
    const CudaActivation& residual = *std::exchange(unsummed_, nullptr);
    params.residual = residual.data.as<float>();
    params.num_tokens = unsummed_tokens_;
    params.width = residual.width;
    return group_->Reduce(params, stream_);
  }

  absl::Status Drain() { return CudaStatus(cudaStreamSynchronize(stream_), "synchronize"); }

  void EncodeRow(absl::Span<const float> row, uint8_t* out) const {
    if (linear_element_ == Element::kF32) {
      std::memcpy(out, row.data(), row.size() * sizeof(float));
      return;
    }
    for (size_t i = 0; i < row.size(); ++i) {
      const uint16_t bits = base::Bf16FromFloat(row[i]);
      std::memcpy(out + 2 * i, &bits, 2);
    }
  }

  absl::Status Norm(const CudaActivation& in,
                    const int32_t* rows,
                    int num_tokens,
                    absl::Span<const float> weight,
                    float eps,
                    const LinearRows& out) {
    BATON_ASSIGN_OR_RETURN(const float* device_weight, constants_.Get(weight, stream_));
    return CudaStatus(cuda::RmsNorm({.residual = in.data.as<float>(),
                                     .rows = rows,
                                     .weight = device_weight,
                                     .out = out,
                                     .num_tokens = num_tokens,
                                     .width = in.width,
                                     .eps = eps},
                                    stream_),
                      "rms norm");
  }

  absl::StatusOr<CacheLayer> Cache(const KvCacheView& view) {
    CacheLayer cache;
    cache.base = view.layer_base;
    cache.block_bytes = static_cast<int64_t>(view.layout->block_bytes());
    cache.format = FormatOf(view.layout->format);
    cache.num_kv_heads = view.layout->num_kv_heads;
    cache.head_dim = view.layout->head_dim;
    BATON_ASSIGN_OR_RETURN(cache.scales, constants_.Get(view.scales, stream_));
    return cache;
  }

  absl::Status UploadPlan(PagedAttentionParams* params) {
    const auto upload = [&](UploadedArray* array, const std::vector<int32_t>& values) {
      return array->Upload(absl::MakeConstSpan(values), stream_);
    };
    BATON_ASSIGN_OR_RETURN(params->query_starts, upload(&query_starts_, plan_.query_starts));
    BATON_ASSIGN_OR_RETURN(params->context_lens, upload(&context_lens_, plan_.context_lens));
    BATON_ASSIGN_OR_RETURN(params->block_tables, upload(&block_tables_, plan_.block_tables));
    params->max_blocks = plan_.max_blocks;
    return absl::OkStatus();
  }

  // The sequences of `params`, none of which has more than `query_max` queries.
  absl::Status Decode(const PagedAttentionParams& params,
                      int query_max,
                      int num_splits,
                      bool tensor_cores) {
    if (!tensor_cores) return CudaStatus(SimpleAttention(params, query_max, stream_), "attention");
    return CudaStatus(DecodeAttention({.attention = params,
                                       .num_splits = num_splits,
                                       .workspace = attention_workspace_.as<float>(),
                                       .counters = attention_counters_.as<int32_t>()},
                                      query_max, stream_),
                      "decode attention");
  }

  absl::Status AttendStep(const PagedAttentionArgs& args,
                          PagedAttentionParams params,
                          bool tensor_cores) {
    plan_.Fill(args, num_sms_);
    BATON_RETURN_IF_ERROR(UploadPlan(&params));
    BATON_ASSIGN_OR_RETURN(params.sequences,
                           decode_.Upload(absl::MakeConstSpan(plan_.decode), stream_));
    params.num_sequences = static_cast<int>(plan_.decode.size());
    BATON_RETURN_IF_ERROR(
        Decode(params, plan_.decode_query_max, plan_.decode_splits, tensor_cores));
    return Prefill(params, tensor_cores);
  }

  absl::Status AttendPass(PagedAttentionParams params, bool tensor_cores) {
    const PassShape& shape = pass_->shape();
    params.query_starts = pass_->query_starts();
    params.context_lens = pass_->context_lens();
    params.block_tables = pass_->block_tables();
    params.max_blocks = shape.max_blocks;
    params.sequences = pass_->sequences();
    params.num_sequences = shape.sequences;
    const int num_kv_heads = params.cache.num_kv_heads;
    const int chunks = DecodeRowChunks(shape.query_max, params.num_heads / num_kv_heads);
    const int splits =
        DecodeSplits(shape.sequences * num_kv_heads * chunks, shape.max_blocks, num_sms_);
    return Decode(params, shape.query_max, splits, tensor_cores);
  }

  absl::Status Prefill(PagedAttentionParams params, bool tensor_cores) {
    if (!tensor_cores) {
      BATON_ASSIGN_OR_RETURN(params.sequences,
                             others_.Upload(absl::MakeConstSpan(plan_.others), stream_));
      params.num_sequences = static_cast<int>(plan_.others.size());
      return CudaStatus(SimpleAttention(params, plan_.others_query_max, stream_), "attention");
    }
    BATON_ASSIGN_OR_RETURN(const PrefillTile* tiles,
                           tiles_.Upload(absl::MakeConstSpan(plan_.tiles), stream_));
    return CudaStatus(
        PrefillAttention(params, tiles, static_cast<int>(plan_.tiles.size()), stream_),
        "prefill attention");
  }

  // Scratch memory grows to the largest step there is, which is at the start.
  absl::Status Grow(size_t bytes, DeviceBuffer* buffer) {
    if (buffer->size() >= bytes) return absl::OkStatus();
    BATON_RETURN_IF_ERROR(Drain());
    graphs_.Clear();  // they point to what is given back here
    BATON_ASSIGN_OR_RETURN(*buffer, DeviceBuffer::Allocate(bytes));
    return absl::OkStatus();
  }

  absl::Status ReadRows(const DeviceBuffer& data,
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
  static float HalfToFloat(uint32_t bits) {
    const uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u)
      return base::FloatFromBits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    const float value = base::FloatFromBits(magnitude << 13) * 0x1p112f;
    return base::FloatFromBits(base::FloatBits(value) | sign);
  }

  const WeightDtype dtype_;
  const int device_;
  const bool eager_;
  const std::string gemm_cache_;
  const Element linear_element_;
  std::string name_, pci_id_;
  int num_sms_ = 0;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Linear> linear_;
  DeviceConstants constants_;
  AttentionPlan plan_;
  PassArrays pass_arrays_;
  GraphCache graphs_;
  const PassArrays* pass_ = nullptr;  // while the operations of a padded pass are issued
  int max_tokens_ = INT_MAX;          // what every activation holds
  size_t vocab_ = 0, first_logit_ = 0, num_logits_ = 0;  // logits_ has [first, first + num) of V
  std::unique_ptr<DeviceGroup> group_;                   // null: one rank
  const CudaActivation* unsummed_ = nullptr;  // a residual that the ranks' parts are to be added to
  int unsummed_tokens_ = 0;
  UploadedArray ids_, positions_, slots_, rows_;
  UploadedArray query_starts_, context_lens_, block_tables_, decode_, others_, tiles_;
  DeviceBuffer attention_workspace_, attention_counters_, gate_up_, logit_input_, logits_;
  DeviceBuffer attention_rows_;  // [max_tokens][Hq * D], where attention cannot write e4m3
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(WeightDtype dtype,
                                                           const BackendOptions& options) {
  if (dtype != WeightDtype::kF32 && dtype != WeightDtype::kBf16 && dtype != WeightDtype::kFp8) {
    return absl::InvalidArgumentError(absl::StrCat("cuda: weight dtype \"", WeightDtypeName(dtype),
                                                   "\": accepted: f32, bf16, fp8"));
  }
  auto backend = std::make_unique<CudaBackend>(dtype, options);
  BATON_RETURN_IF_ERROR(backend->Init());
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace baton::ops::cuda
