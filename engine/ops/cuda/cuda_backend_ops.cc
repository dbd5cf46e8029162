// The operations but attention.

#include <algorithm>
#include <utility>

#include "engine/base/status_macros.h"
#include "engine/ops/cuda/cuda_backend_class.h"
#include "engine/ops/validate.h"

namespace baton::ops::cuda {
namespace {

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

}  // namespace

absl::Status CudaBackend::Embed(const Matrix& table,
                                absl::Span<const int32_t> ids,
                                Activation* residual) {
  CudaActivation& out = Mutable(residual);
  BATON_RETURN_IF_ERROR(CheckAtMost("embed", "T", ids.size(), out.max_tokens));
  BATON_RETURN_IF_ERROR(CheckEqual("embed", "E", table.cols(), out.width));
  BATON_RETURN_IF_ERROR(CheckIds(ids, table.rows()));
  const int32_t* device_ids = pass_ == nullptr ? nullptr : pass_->ids();
  if (pass_ == nullptr) {
    BATON_ASSIGN_OR_RETURN(device_ids, ids_.Upload(ids, stream_));
  }
  if (drawn_ != nullptr) {
    BATON_RETURN_IF_ERROR(Grow(ids.size() * sizeof(int32_t), &taken_ids_));
    BATON_RETURN_IF_ERROR(TakeDrawn(*drawn_, device_ids, taken_ids_.as<int32_t>()));
    device_ids = taken_ids_.as<int32_t>();
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

absl::Status CudaBackend::RmsNorm(const Activation& residual,
                                  int num_tokens,
                                  absl::Span<const float> weight,
                                  float eps,
                                  Activation* out) {
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

absl::Status CudaBackend::QkvProject(const Activation& x,
                                     int num_tokens,
                                     const Matrix& weight,
                                     absl::Span<const float> bias,
                                     Activation* qkv) {
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

absl::Status CudaBackend::QkNormRopeAppend(const QkNormRopeAppendArgs& args) {
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
  // (The first row of RoPE's table is cos 0, times the attention factor.)
  qkv.query_scale = flash_ && !args.rope.empty() ? FlashQueryScale(args.q_weight, args.rope[0]) : 0;
  return CudaStatus(cuda::QkNormRopeAppend(params, stream_), "qk norm rope append");
}

absl::Status CudaBackend::ProjectAdd(const Activation& x,
                                     int num_tokens,
                                     const Matrix& weight,
                                     Activation* residual) {
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

absl::Status CudaBackend::GateUpSilu(const Activation& x,
                                     int num_tokens,
                                     const Matrix& weight,
                                     Activation* out) {
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

absl::Status CudaBackend::Logits(const Activation& residual,
                                 absl::Span<const int32_t> rows,
                                 absl::Span<const float> weight,
                                 float eps,
                                 const Matrix& head,
                                 float* logits) {
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
  const bool stay = pass_ != nullptr || logits == nullptr;  // RunPass does the rest
  return stay ? absl::OkStatus() : CopyLogits(count, logits);
}

absl::Status CudaBackend::Multiply(const CudaActivation& x,
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

absl::Status CudaBackend::Sum() {
  if (unsummed_ == nullptr) return absl::OkStatus();
  return Reduce({});
}

absl::Status CudaBackend::SumAndNorm(absl::Span<const float> weight,
                                     float eps,
                                     const LinearRows& out) {
  AllReduceNormParams params;
  BATON_ASSIGN_OR_RETURN(params.weight, constants_.Get(weight, stream_));
  params.out = out;
  params.eps = eps;
  return Reduce(params);
}

absl::Status CudaBackend::Reduce(AllReduceNormParams params) {
  const CudaActivation& residual = *std::exchange(unsummed_, nullptr);
  params.residual = residual.data.as<float>();
  params.num_tokens = unsummed_tokens_;
  params.width = residual.width;
  return group_->Reduce(params, stream_);
}

absl::Status CudaBackend::Norm(const CudaActivation& in,
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

absl::StatusOr<CacheLayer> CudaBackend::Cache(const KvCacheView& view) {
  CacheLayer cache;
  cache.base = view.layer_base;
  cache.block_bytes = static_cast<int64_t>(view.layout->block_bytes());
  cache.format = FormatOf(view.layout->format);
  cache.num_kv_heads = view.layout->num_kv_heads;
  cache.head_dim = view.layout->head_dim;
  BATON_ASSIGN_OR_RETURN(cache.scales, constants_.Get(view.scales, stream_));
  return cache;
}

}  // namespace baton::ops::cuda
