// Prefill by FlashInfer's kernel (flash_prefill.h), in programs that have it.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/ops/cuda/cuda_backend_class.h"

namespace baton::ops::cuda {

// Defined in programs that link it, null in others.
[[gnu::weak]] cudaError_t FlashPrefill(const FlashPrefillParams& params, cudaStream_t stream);

absl::Status CudaBackend::ChoosePrefill(int major, int minor) {
  if (prefill_attention_ == "own") return absl::OkStatus();
  std::string missing;
  if (&FlashPrefill == nullptr) {
    missing = "this program was built without it (BATON_FLASHINFER)";
  } else if (major != 9 || minor != 0) {
    missing =
        absl::StrCat("it is for compute capability 9.0, and ", name_, " has ", major, ".", minor);
  }
  flash_ = missing.empty();
  if (!flash_ && prefill_attention_ == "flashinfer")
    return absl::UnavailableError(absl::StrCat("cuda: prefill attention flashinfer: ", missing));
  if (&FlashPrefill != nullptr) {
    BATON_LOG(Info, "prefill attention", LogField("asked_for", prefill_attention_),
              LogField("kernel", flash_ ? "flashinfer" : "own"),
              LogField("reason", flash_ ? "it is built in, and the device is one of its kind; "
                                          "where it does not fit, own takes its place"
                                        : missing));
  }
  return absl::OkStatus();
}

float CudaBackend::FlashScale(const PagedAttentionArgs& args,
                              const CudaActivation& qkv,
                              bool tensor_cores) {
  const bool prefill = std::any_of(
      args.sequences.begin(), args.sequences.end(),
      [](const SequenceView& sequence) { return sequence.query_len > kDecodeQueryMax; });
  if (!flash_ || pass_ != nullptr || !prefill) return 0;
  const char* misfit = nullptr;
  if (args.cache.layout->format != kv::KvFormat::kFp8) {
    misfit = "the KV cache is not fp8 with fixed scales";
  } else if (!tensor_cores) {
    misfit = "weights are f32, or heads are neither 64 nor 128 wide";
  } else if (qkv.query_scale == 0) {
    misfit = "the model has no QK-norm to bound its queries";
  }
  if (misfit == nullptr) return qkv.query_scale;
  if (!flash_missed_)
    BATON_LOG(Info, "prefill attention", LogField("kernel", "own"), LogField("reason", misfit));
  flash_missed_ = true;
  return 0;
}

// Queries of all sequences are rounded, also those that decode attends: one plain pass over them.
absl::Status CudaBackend::FlashPrefillStep(const PagedAttentionArgs& args,
                                           const PagedAttentionParams& params,
                                           float scale) {
  const int width = args.num_heads * args.head_dim;
  const size_t tokens_max = Const(*args.qkv).max_tokens;
  BATON_RETURN_IF_ERROR(Grow(tokens_max * width, &flash_queries_));
  BATON_RETURN_IF_ERROR(CudaStatus(QuantizeQueries({.q = params.q,
                                                    .out = flash_queries_.as<uint8_t>(),
                                                    .num_tokens = args.num_tokens,
                                                    .width = width,
                                                    .scale = scale},
                                                   stream_),
                                   "quantize queries"));
  flash_plan_.Fill(plan_, args.num_heads, args.num_kv_heads, args.head_dim, num_sms_);
  BATON_ASSIGN_OR_RETURN(const int32_t* work, flash_work_.Upload(flash_plan_.words(), stream_));
  return CudaStatus(FlashPrefill({.q = flash_queries_.as<const uint8_t>(),
                                  .q_scale = scale,
                                  .out = params.out.data,
                                  .num_tokens = args.num_tokens,
                                  .num_heads = args.num_heads,
                                  .softmax_scale = args.softmax_scale,
                                  .cache = params.cache,
                                  .block_tables = params.block_tables,
                                  .work = flash_plan_.At(work)},
                                 stream_),
                    "flashinfer prefill");
}

}  // namespace baton::ops::cuda
