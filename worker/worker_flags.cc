// The flags that prefill and decode workers share.

#include "absl/flags/flag.h"
#include "absl/time/time.h"
#include "engine/process/tls_flags.h"
#include "worker/worker_options.h"

using baton::worker::WorkerOptions;

ABSL_FLAG(std::string,
          model,
          WorkerOptions{}.model,
          "Model to serve: a Hugging Face directory or a GGUF file.");
ABSL_FLAG(
    bool,
    verify_weights,
    WorkerOptions{}.verify_weights,
    "Hash every byte of the weights, so that workers pair only when all of them are equal, not "
    "only samples of them. The same on every worker; reads the whole model at start.");
ABSL_FLAG(std::string,
          served_model_name,
          WorkerOptions{}.served_model_name,
          "Name of the model in metrics and status; empty: the last part of its path.");
ABSL_FLAG(std::string,
          listen,
          WorkerOptions{}.listen,
          "host:port of the gRPC server; port 0: any free one.");
ABSL_FLAG(int32_t,
          http_port,
          WorkerOptions{}.http_port,
          "Port of /metrics and /health; 0: any free one, -1: none.");
ABSL_FLAG(int32_t,
          health_port,
          WorkerOptions{}.health_port,
          "Port for grpc.health.v1 alone, as probes want it; 0: any free one, -1: none.");
ABSL_FLAG(std::string,
          metrics_compat,
          WorkerOptions{}.metrics_compat,
          "none, or vllm: /metrics carries the names of vLLM's metrics beside ours.");
ABSL_FLAG(std::string,
          port_file,
          WorkerOptions{}.port_file,
          "File that gets {\"grpc\":PORT,\"http\":PORT,\"health\":PORT} when all are open; empty: "
          "none.");
ABSL_FLAG(bool, reflection, WorkerOptions{}.reflection, "Serve gRPC reflection.");
ABSL_FLAG(bool, channelz, WorkerOptions{}.channelz, "Serve gRPC channelz.");
ABSL_FLAG(absl::Duration,
          drain_timeout,
          WorkerOptions{}.drain_timeout,
          "After SIGTERM, how long running requests may go on.");
ABSL_FLAG(
    std::string,
    device,
    WorkerOptions{}.device,
    "Backend: auto, cpu, ref or cuda. auto: cuda where a device can be used, else cpu; the log "
    "says which and why.");
ABSL_FLAG(std::string,
          weight_dtype,
          WorkerOptions{}.weight_dtype,
          "What weights compute in: auto, f32, bf16, int8, q4 or fp8.");
ABSL_FLAG(std::string,
          kv_dtype,
          WorkerOptions{}.kv_dtype,
          "Format of the KV cache: auto, fp8, fp8_dynamic, bf16 or f32.");
ABSL_FLAG(int32_t,
          num_blocks,
          WorkerOptions{}.num_blocks,
          "Blocks of 64 tokens in the KV cache; 0: what --kv-cache-bytes holds.");
ABSL_FLAG(int64_t,
          kv_cache_bytes,
          WorkerOptions{}.kv_cache_bytes,
          "Memory of the KV cache; 0: 1 GiB on the CPU, on a GPU what --gpu-memory-utilization "
          "leaves.");
ABSL_FLAG(
    double,
    gpu_memory_utilization,
    WorkerOptions{}.gpu_memory_utilization,
    "Share of the GPU's memory that may be in use once this worker has started, by others too: "
    "with two workers on one GPU, the second one's is the larger.");
ABSL_FLAG(
    std::string,
    gemm_cache,
    WorkerOptions{}.gemm_cache,
    "File in which the fastest algorithms of a GPU's matrix products are kept over starts; auto: "
    "baton/gemm in the user's cache folder; none: they are looked for at every start.");
ABSL_FLAG(int32_t,
          max_model_len,
          WorkerOptions{}.max_model_len,
          "Most tokens of prompt and answer together; 0: the model's.");
ABSL_FLAG(int32_t, chunk_tokens, WorkerOptions{}.chunk_tokens, "Most prompt tokens in one step.");
ABSL_FLAG(int32_t,
          max_calls,
          WorkerOptions{}.max_calls,
          "Most calls at a time; above it they are refused.");
ABSL_FLAG(int32_t,
          threads,
          WorkerOptions{}.threads,
          "Compute threads, of all ranks together; 0: one per core.");
ABSL_FLAG(int32_t,
          tp,
          WorkerOptions{}.tp,
          "Tensor parallelism: ranks that share the model's heads, 1 or 2. Need not be the same on "
          "every worker.");
ABSL_FLAG(bool,
          enforce_eager,
          WorkerOptions{}.enforce_eager,
          "On a GPU, issue every operation of a decode step by itself, never as one CUDA graph: "
          "slower, for finding faults. The tokens are the same.");
ABSL_FLAG(std::string,
          prefill_attention,
          WorkerOptions{}.prefill_attention,
          "On a GPU, whose attention prefill uses: own, flashinfer (FP8 products, on sm_90 only, "
          "where the program was built with it), or auto: flashinfer where it is there. What it "
          "does not fit is computed by own. Workers that differ in it do not pair.");
ABSL_FLAG(std::string,
          cpu_isa,
          WorkerOptions{}.cpu_isa,
          "Highest instruction set used: auto, avx2, avx512 or amx.");
ABSL_FLAG(std::string,
          kv_transport,
          WorkerOptions{}.kv_transport,
          "How KV blocks travel: auto, cuda_ipc, nccl, shm or tcp. Anything but auto is used or "
          "the pairing "
          "fails.");
ABSL_FLAG(
    std::string,
    require_transport,
    WorkerOptions{}.require_transport,
    "cuda_ipc, nccl, shm or tcp: pair only with workers to which KV blocks travel so, whatever "
    "else would "
    "work; a pairing that cannot is refused with the reason. Empty: any of --kv-transport.");
ABSL_FLAG(std::string, log_level, WorkerOptions{}.log_level, "debug, info, warning or error.");
ABSL_FLAG(bool,
          check_flags,
          WorkerOptions{}.check_flags,
          "Say what is wrong with the other flags and end, 0 where nothing is: what `baton "
          "check-config` asks.");
ABSL_FLAG(absl::Duration,
          test_load_delay,
          WorkerOptions{}.test_load_delay,
          "For tests only: loading takes this much longer.");
ABSL_FLAG(absl::Duration,
          test_step_delay,
          WorkerOptions{}.test_step_delay,
          "For tests only: each step takes this much longer.");
ABSL_FLAG(int32_t,
          test_block_hash_bits,
          WorkerOptions{}.test_block_hash_bits,
          "For tests only: block hashes are cut to this many bits, so that they collide.");

ABSL_FLAG(bool,
          test_poison_freed,
          WorkerOptions{}.test_poison_freed,
          "For tests only: KV blocks that become free are filled with NaN.");

ABSL_FLAG(
    std::string,
    test_gpu,
    WorkerOptions{}.test_gpu,
    "For tests only: metrics of the GPU with this bus address are exported, whatever computes.");

namespace baton::worker {

WorkerOptions WorkerOptionsFromFlags() {
  WorkerOptions options;
  options.model = absl::GetFlag(FLAGS_model);
  options.verify_weights = absl::GetFlag(FLAGS_verify_weights);
  options.served_model_name = absl::GetFlag(FLAGS_served_model_name);
  options.listen = absl::GetFlag(FLAGS_listen);
  options.tls = process::TlsOptionsFromFlags();
  options.http_port = absl::GetFlag(FLAGS_http_port);
  options.health_port = absl::GetFlag(FLAGS_health_port);
  options.metrics_compat = absl::GetFlag(FLAGS_metrics_compat);
  options.port_file = absl::GetFlag(FLAGS_port_file);
  options.reflection = absl::GetFlag(FLAGS_reflection);
  options.channelz = absl::GetFlag(FLAGS_channelz);
  options.drain_timeout = absl::GetFlag(FLAGS_drain_timeout);
  options.device = absl::GetFlag(FLAGS_device);
  options.weight_dtype = absl::GetFlag(FLAGS_weight_dtype);
  options.kv_dtype = absl::GetFlag(FLAGS_kv_dtype);
  options.num_blocks = absl::GetFlag(FLAGS_num_blocks);
  options.kv_cache_bytes = absl::GetFlag(FLAGS_kv_cache_bytes);
  options.gpu_memory_utilization = absl::GetFlag(FLAGS_gpu_memory_utilization);
  options.gemm_cache = absl::GetFlag(FLAGS_gemm_cache);
  options.max_model_len = absl::GetFlag(FLAGS_max_model_len);
  options.chunk_tokens = absl::GetFlag(FLAGS_chunk_tokens);
  options.max_calls = absl::GetFlag(FLAGS_max_calls);
  options.threads = absl::GetFlag(FLAGS_threads);
  options.tp = absl::GetFlag(FLAGS_tp);
  options.enforce_eager = absl::GetFlag(FLAGS_enforce_eager);
  options.prefill_attention = absl::GetFlag(FLAGS_prefill_attention);
  options.cpu_isa = absl::GetFlag(FLAGS_cpu_isa);
  options.kv_transport = absl::GetFlag(FLAGS_kv_transport);
  options.require_transport = absl::GetFlag(FLAGS_require_transport);
  options.log_level = absl::GetFlag(FLAGS_log_level);
  options.check_flags = absl::GetFlag(FLAGS_check_flags);
  options.test_load_delay = absl::GetFlag(FLAGS_test_load_delay);
  options.test_step_delay = absl::GetFlag(FLAGS_test_step_delay);
  options.test_block_hash_bits = absl::GetFlag(FLAGS_test_block_hash_bits);
  options.test_poison_freed = absl::GetFlag(FLAGS_test_poison_freed);
  options.test_gpu = absl::GetFlag(FLAGS_test_gpu);
  return options;
}

}  // namespace baton::worker
