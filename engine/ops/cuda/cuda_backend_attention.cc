// Attention of a step as it comes, and of a padded pass.

#include <algorithm>

#include "engine/base/status_macros.h"
#include "engine/ops/cuda/cuda_backend_class.h"
#include "engine/ops/validate.h"

namespace baton::ops::cuda {

absl::Status CudaBackend::PagedAttention(const PagedAttentionArgs& args) {
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
  const float flash_scale = FlashScale(args, qkv, tensor_cores);
  // Our kernels write e4m3 themselves where a head is a group of 128; else what is written is
  // rounded afterwards.
  const bool written = tensor_cores && flash_scale == 0 && args.head_dim == kFp8Block;
  const bool round = out.element == Element::kFp8 && !written;
  if (round) {
    BATON_RETURN_IF_ERROR(
        Grow(static_cast<size_t>(out.max_tokens) * out.width * ElementSize(linear_element_),
             &attention_rows_));
    params.out = {.data = attention_rows_.data(), .element = linear_element_};
  }
  BATON_RETURN_IF_ERROR(pass_ == nullptr ? AttendStep(args, params, tensor_cores, flash_scale)
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

absl::Status CudaBackend::UploadPlan(PagedAttentionParams* params) {
  const auto upload = [&](UploadedArray* array, const std::vector<int32_t>& values) {
    return array->Upload(absl::MakeConstSpan(values), stream_);
  };
  BATON_ASSIGN_OR_RETURN(params->query_starts, upload(&query_starts_, plan_.query_starts));
  BATON_ASSIGN_OR_RETURN(params->context_lens, upload(&context_lens_, plan_.context_lens));
  BATON_ASSIGN_OR_RETURN(params->block_tables, upload(&block_tables_, plan_.block_tables));
  params->max_blocks = plan_.max_blocks;
  return absl::OkStatus();
}

absl::Status CudaBackend::Decode(const PagedAttentionParams& params,
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

absl::Status CudaBackend::AttendStep(const PagedAttentionArgs& args,
                                     PagedAttentionParams params,
                                     bool tensor_cores,
                                     float flash_scale) {
  plan_.Fill(args, num_sms_);
  BATON_RETURN_IF_ERROR(UploadPlan(&params));
  BATON_ASSIGN_OR_RETURN(params.sequences,
                         decode_.Upload(absl::MakeConstSpan(plan_.decode), stream_));
  params.num_sequences = static_cast<int>(plan_.decode.size());
  BATON_RETURN_IF_ERROR(Decode(params, plan_.decode_query_max, plan_.decode_splits, tensor_cores));
  return flash_scale > 0 ? FlashPrefillStep(args, params, flash_scale)
                         : Prefill(params, tensor_cores);
}

absl::Status CudaBackend::AttendPass(PagedAttentionParams params, bool tensor_cores) {
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

absl::Status CudaBackend::Prefill(PagedAttentionParams params, bool tensor_cores) {
  if (!tensor_cores) {
    BATON_ASSIGN_OR_RETURN(params.sequences,
                           others_.Upload(absl::MakeConstSpan(plan_.others), stream_));
    params.num_sequences = static_cast<int>(plan_.others.size());
    return CudaStatus(SimpleAttention(params, plan_.others_query_max, stream_), "attention");
  }
  BATON_ASSIGN_OR_RETURN(const PrefillTile* tiles,
                         tiles_.Upload(absl::MakeConstSpan(plan_.tiles), stream_));
  return CudaStatus(PrefillAttention(params, tiles, static_cast<int>(plan_.tiles.size()), stream_),
                    "prefill attention");
}

}  // namespace baton::ops::cuda
