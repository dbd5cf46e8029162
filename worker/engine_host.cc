#include "worker/engine_host.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include <openssl/rand.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::worker {
namespace {

constexpr int kIncarnationBytes = 16;

std::string ActivationName(const runtime::ModelRunner& runner) {
  switch (runner.weight_dtype()) {
    case ops::WeightDtype::kF32:
      return "f32";
    case ops::WeightDtype::kInt8:
      return "int8";
    case ops::WeightDtype::kQ4:
      return "int8_groups";
    case ops::WeightDtype::kBf16:
      return "bf16";
    case ops::WeightDtype::kFp8:
      return runner.sum_order_version() == ops::kSumOrderVersion ? "bf16" : "fp8";
  }
  return "";
}

std::string RopeName(const model::ModelConfig& config) {
  const model::RopeScaling& rope = config.rope;
  return absl::StrCat("theta=", config.rope_theta, " kind=", static_cast<int>(rope.kind),
                      " factor=", rope.factor, " original=", rope.original_max_position,
                      " attention=", rope.attention_factor, " beta=", rope.beta_fast, "/",
                      rope.beta_slow, " truncate=", rope.truncate);
}

// Blocks 0.. are written and then forgotten: no sequence has them yet.
absl::Status WarmUp(runtime::ModelRunner* runner, int chunk_tokens) {
  const int tokens = std::min(
      {chunk_tokens, runner->max_model_len(), runner->layout().num_blocks * kv::kBlockTokens});
  const std::vector<uint32_t> ids(tokens, 0);
  std::vector<kv::BlockId> blocks(kv::BlocksFor(tokens));
  std::iota(blocks.begin(), blocks.end(), 0);
  const int last_row = tokens - 1;
  const runtime::StepSequence part{ids, 0, blocks, absl::MakeConstSpan(&last_row, 1)};
  absl::Span<float> logits;
  runtime::StepTimings timings;
  return runner->Step(absl::MakeConstSpan(&part, 1), nullptr, &logits, &timings);
}

}  // namespace

v1::LayoutFingerprint FingerprintOf(const runtime::ModelRunner& runner,
                                    const text::Tokenizer& tokenizer) {
  const kv::KvLayout& layout = runner.layout();
  v1::LayoutFingerprint fingerprint;
  fingerprint.set_model(runner.checkpoint().fingerprint());
  fingerprint.set_tokenizer(tokenizer.fingerprint());
  fingerprint.set_weight_dtype(std::string(ops::WeightDtypeName(runner.weight_dtype())));
  fingerprint.set_activation_dtype(ActivationName(runner));
  fingerprint.set_sum_order_version(runner.sum_order_version());
  fingerprint.set_kv_dtype(std::string(kv::KvFormatName(layout.format)));
  fingerprint.set_kv_scales(runner.kv_scales_fingerprint());
  fingerprint.set_block_tokens(kv::kBlockTokens);
  fingerprint.set_rope(RopeName(runner.config()));
  fingerprint.set_num_layers(static_cast<uint32_t>(layout.num_layers));
  fingerprint.set_num_kv_heads(static_cast<uint32_t>(layout.num_kv_heads));
  fingerprint.set_head_dim(static_cast<uint32_t>(layout.head_dim));
  fingerprint.set_tp(static_cast<uint32_t>(layout.tp));
  return fingerprint;
}

absl::StatusOr<std::unique_ptr<text::Tokenizer>> LoadTokenizer(const runtime::ModelRunner& runner) {
  const model::Checkpoint& checkpoint = runner.checkpoint();
  if (checkpoint.gguf() != nullptr) return text::Tokenizer::LoadGguf(*checkpoint.gguf());
  return text::Tokenizer::LoadHuggingFace(checkpoint.path());
}

absl::StatusOr<EngineHost> LoadEngine(const WorkerOptions& options,
                                      int step_tokens,
                                      int max_logit_rows) {
  const absl::Time start = absl::Now();
  if (options.test_load_delay > absl::ZeroDuration()) absl::SleepFor(options.test_load_delay);
  runtime::ModelRunnerOptions runner_options;
  runner_options.model_path = options.model;
  runner_options.verify_weights = options.verify_weights;
  runner_options.backend = BackendOf(options);
  runner_options.weight_dtype = options.weight_dtype;
  runner_options.kv_dtype = options.kv_dtype;
  runner_options.tp = options.tp;
  runner_options.max_model_len = options.max_model_len;
  runner_options.max_step_tokens = step_tokens;
  runner_options.max_logit_rows = max_logit_rows;
  runner_options.num_blocks = options.num_blocks;
  runner_options.kv_cache_bytes = options.kv_cache_bytes;
  runner_options.memory_utilization = options.gpu_memory_utilization;
  runner_options.shared_kv = true;
  runner_options.kv_mirror = MayUseHostTransports(options);
  runner_options.backend_options.num_threads = options.threads;
  runner_options.backend_options.isa = options.cpu_isa;
  runner_options.backend_options.enforce_eager = options.enforce_eager;
  runner_options.backend_options.prefill_attention = options.prefill_attention;
  if (runner_options.backend == "cuda")
    runner_options.backend_options.gemm_cache = GemmCachePath(options);
  EngineHost host;
  BATON_ASSIGN_OR_RETURN(host.runner, runtime::ModelRunner::Create(runner_options));
  if (!MayUseHostTransports(options) && host.runner->device_pool() == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        options.require_transport.empty() ? options.kv_transport : options.require_transport,
        " is wanted (--kv-transport, --require-transport), but the KV cache ",
        host.runner->device_ids().size() > 1 ? "lies on several devices"
                                             : "does not lie on a device",
        ": device=", host.runner->device()));
  }
  BATON_ASSIGN_OR_RETURN(host.tokenizer, LoadTokenizer(*host.runner));
  host.fingerprint = FingerprintOf(*host.runner, *host.tokenizer);
  host.incarnation.resize(kIncarnationBytes);
  if (RAND_bytes(reinterpret_cast<unsigned char*>(host.incarnation.data()), kIncarnationBytes) !=
      1) {
    return absl::InternalError("no random bytes for the incarnation");
  }
  BATON_RETURN_IF_ERROR(Annotate(WarmUp(host.runner.get(), options.chunk_tokens), "warm-up"));
  BATON_LOG(Info, "engine ready", LogField("incarnation", IncarnationName(host.incarnation)),
            " seconds=", absl::ToDoubleSeconds(absl::Now() - start));
  return host;
}

absl::StatusOr<std::unique_ptr<runtime::ModelRunner>> LoadDraftRunner(
    const DraftRunnerOptions& draft,
    const std::string& path,
    const WorkerOptions& options,
    const EngineHost& target) {
  runtime::ModelRunnerOptions runner_options;
  runner_options.model_path = path;
  runner_options.backend = BackendOf(options);
  runner_options.kv_dtype = options.kv_dtype;
  runner_options.max_step_tokens = draft.step_tokens;
  runner_options.max_logit_rows = draft.max_logit_rows;
  runner_options.num_blocks = draft.num_blocks;
  runner_options.shared_kv = true;
  runner_options.kv_mirror = MayUseHostTransports(options);
  runner_options.backend_options.num_threads = options.threads;
  runner_options.backend_options.isa = options.cpu_isa;
  runner_options.backend_options.enforce_eager = options.enforce_eager;
  runner_options.backend_options.prefill_attention = options.prefill_attention;
  if (runner_options.backend == "cuda")
    runner_options.backend_options.gemm_cache = GemmCachePath(options);
  BATON_ASSIGN_OR_RETURN(std::unique_ptr<runtime::ModelRunner> runner,
                         runtime::ModelRunner::Create(runner_options));
  if (runner->config().vocab != target.runner->config().vocab) {
    return absl::InvalidArgumentError(
        absl::StrCat("--draft-model: vocab=", runner->config().vocab,
                     " target_vocab=", target.runner->config().vocab));
  }
  BATON_ASSIGN_OR_RETURN(const std::unique_ptr<text::Tokenizer> tokenizer, LoadTokenizer(*runner));
  if (tokenizer->fingerprint() != target.tokenizer->fingerprint())
    return absl::InvalidArgumentError("--draft-model: its tokenizer is not the model's");
  return runner;
}

std::string IncarnationName(const std::string& incarnation) {
  return absl::BytesToHexString(incarnation);
}

}  // namespace baton::worker
