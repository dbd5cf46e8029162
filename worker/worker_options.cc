#include "worker/worker_options.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "engine/base/status_macros.h"
#include "engine/kv/kv_layout.h"
#include "engine/ops/backend.h"

namespace baton::worker {
namespace {

absl::Status OneOf(absl::string_view flag,
                   const std::string& value,
                   const std::vector<std::string>& accepted) {
  if (std::find(accepted.begin(), accepted.end(), value) != accepted.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, "=\"", value, "\": accepted: ", absl::StrJoin(accepted, ", ")));
}

absl::Status AtLeast(absl::string_view flag, int64_t value, int64_t smallest) {
  if (value >= smallest) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, "=", value, ": must be at least ", smallest));
}

absl::Status CheckRequiredTransport(const WorkerOptions& options) {
  const std::string& required = options.require_transport;
  BATON_RETURN_IF_ERROR(
      OneOf("require-transport", required, {"", "cuda_ipc", "nccl", "shm", "tcp"}));
  if (required.empty() || options.kv_transport == "auto" || options.kv_transport == required)
    return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--require-transport=", required,
                                                 ": --kv-transport=", options.kv_transport,
                                                 " leaves it out"));
}

}  // namespace

absl::Status ValidateOptions(const WorkerOptions& options) {
  if (options.model.empty()) {
    return absl::InvalidArgumentError("--model: a Hugging Face directory or a GGUF file is needed");
  }
  BATON_RETURN_IF_ERROR(OneOf("device", options.device, {"auto", "cpu", "ref", "cuda"}));
  BATON_RETURN_IF_ERROR(
      OneOf("weight-dtype", options.weight_dtype, {"auto", "f32", "bf16", "int8", "q4", "fp8"}));
  BATON_RETURN_IF_ERROR(
      OneOf("kv-dtype", options.kv_dtype, {"auto", "fp8", "fp8_dynamic", "bf16", "f32"}));
  BATON_RETURN_IF_ERROR(
      OneOf("prefill-attention", options.prefill_attention, {"auto", "own", "flashinfer"}));
  BATON_RETURN_IF_ERROR(OneOf("cpu-isa", options.cpu_isa, {"auto", "avx2", "avx512", "amx"}));
  BATON_RETURN_IF_ERROR(
      OneOf("kv-transport", options.kv_transport, {"auto", "cuda_ipc", "nccl", "shm", "tcp"}));
  BATON_RETURN_IF_ERROR(CheckRequiredTransport(options));
  BATON_RETURN_IF_ERROR(
      OneOf("log-level", options.log_level, {"debug", "info", "warning", "error"}));
  BATON_RETURN_IF_ERROR(OneOf("metrics-compat", options.metrics_compat, {"none", "vllm"}));
  BATON_RETURN_IF_ERROR(AtLeast("num-blocks", options.num_blocks, 0));
  BATON_RETURN_IF_ERROR(AtLeast("kv-cache-bytes", options.kv_cache_bytes, 0));
  if (!(options.gpu_memory_utilization > 0 && options.gpu_memory_utilization <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--gpu-memory-utilization=", options.gpu_memory_utilization,
                     ": must be above 0 and at most 1"));
  }
  BATON_RETURN_IF_ERROR(AtLeast("max-model-len", options.max_model_len, 0));
  BATON_RETURN_IF_ERROR(AtLeast("chunk-tokens", options.chunk_tokens, kv::kBlockTokens));
  BATON_RETURN_IF_ERROR(AtLeast("max-calls", options.max_calls, 1));
  BATON_RETURN_IF_ERROR(AtLeast("threads", options.threads, 0));
  if (options.tp != 1 && options.tp != 2)
    return absl::InvalidArgumentError(absl::StrCat("--tp=", options.tp, ": accepted: 1, 2"));
  BATON_RETURN_IF_ERROR(CheckTls(options.tls.server, options.listen));
  BATON_RETURN_IF_ERROR(CheckTls(options.tls.client));
  if (options.test_block_hash_bits < 1 || options.test_block_hash_bits > 256) {
    return absl::InvalidArgumentError("--test-block-hash-bits: must be in [1, 256]");
  }
  return absl::OkStatus();
}

bool MayUseHostTransports(const WorkerOptions& options) {
  const auto is_between_devices = [](const std::string& name) {
    return name == "cuda_ipc" || name == "nccl";
  };
  return !is_between_devices(options.kv_transport) &&
         !is_between_devices(options.require_transport);
}

std::string BackendOf(const WorkerOptions& options, std::string* why) {
  std::string ignored;
  if (why == nullptr) why = &ignored;
  *why = "asked for";
  if (options.device != "auto") return options.device;
  const ops::BackendChoice& choice = ops::AutoBackend(options.tp);
  *why = choice.reason;
  if (choice.name == "cuda" && (options.weight_dtype == "int8" || options.weight_dtype == "q4")) {
    *why = absl::StrCat("--weight-dtype=", options.weight_dtype, " is computed on the CPU only; ",
                        choice.reason, " is left alone");
    return "cpu";
  }
  return choice.name;
}

std::string GemmCachePath(const WorkerOptions& options) {
  if (options.gemm_cache != "auto") return options.gemm_cache == "none" ? "" : options.gemm_cache;
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  std::filesystem::path folder;
  if (cache != nullptr && cache[0] == '/') {
    folder = cache;
  } else if (home != nullptr && home[0] == '/') {
    folder = std::filesystem::path(home) / ".cache";
  } else {
    return "";
  }
  folder /= "baton";
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  return error ? "" : (folder / "gemm").string();
}

std::string ServedModelName(const WorkerOptions& options) {
  if (!options.served_model_name.empty()) return options.served_model_name;
  absl::string_view path = absl::StripSuffix(options.model, "/");
  const size_t slash = path.rfind('/');
  if (slash != absl::string_view::npos) path.remove_prefix(slash + 1);
  return std::string(absl::StripSuffix(path, ".gguf"));
}

process::ServerOptions ServerOptionsOf(const WorkerOptions& options) {
  process::ServerOptions server;
  server.listen = options.listen;
  server.tls = options.tls.server;
  server.http_port = options.http_port;
  server.health_port = options.health_port;
  server.metrics_compat = options.metrics_compat;
  server.port_file = options.port_file;
  server.reflection = options.reflection;
  server.channelz = options.channelz;
  server.drain_timeout = options.drain_timeout;
  // Who calls a worker holds its blocks: one that is cut off is let go of as soon as it would let
  // go of us (channel.cc).
  server.keepalive_time = absl::Seconds(10);
  server.keepalive_timeout = absl::Seconds(5);
  return server;
}

}  // namespace baton::worker
