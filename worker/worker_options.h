#pragma once

// What both workers can be told. Flags fill it; every default is written here and nowhere else.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/process/server_process.h"
#include "engine/process/tls.h"

namespace baton::worker {

struct WorkerOptions {
  std::string model;              // Hugging Face directory or GGUF file
  bool verify_weights = false;    // peers compare all of the weights, not samples of them
  std::string served_model_name;  // empty: the last part of the path
  std::string listen = "127.0.0.1:0";
  process::TlsOptions tls;  // of `listen`, and of the sessions that a prefill worker opens
  int http_port = 0;        // /metrics; 0: any free one, -1: none
  int health_port = -1;     // grpc.health.v1 alone; 0: any free one, -1: none
  std::string metrics_compat = "none";  // none, vllm
  std::string port_file;
  bool reflection = true;
  bool channelz = false;
  absl::Duration drain_timeout = absl::Seconds(60);

  std::string device = "auto";  // auto, cpu, ref, cuda
  std::string weight_dtype = "auto";
  std::string kv_dtype = "auto";
  int num_blocks = 0;          // 0: as many as kv_cache_bytes holds
  int64_t kv_cache_bytes = 0;  // 0: 1 GiB on the CPU, what is free on a device
  double gpu_memory_utilization = 0.9;
  std::string gemm_cache = "auto";    // auto, none or a file
  int max_model_len = 0;              // 0: the model's
  int chunk_tokens = 512;             // most prompt tokens in one step
  int max_calls = 1024;               // above it calls are refused with RESOURCE_EXHAUSTED
  int threads = 0;                    // of all ranks together; 0: one per core
  int tp = 1;                         // ranks that share the model's heads: 1 or 2
  bool enforce_eager = false;         // cuda: no graphs
  std::string cpu_isa = "auto";       // auto, avx2, avx512, amx
  std::string kv_transport = "auto";  // auto, cuda_ipc, shm, tcp
  std::string require_transport;      // one of these; empty: any that kv_transport allows
  std::string log_level = "info";     // debug, info, warning, error
  bool check_flags = false;           // say whether all of these can hold, and end
  // cuda: auto, own, flashinfer
  std::string prefill_attention = "auto";

  // For tests only.
  absl::Duration test_load_delay;
  absl::Duration test_step_delay;
  int test_block_hash_bits = 256;
  bool test_poison_freed = false;
  std::string test_gpu;
};

// Errors: INVALID_ARGUMENT naming the flag and the accepted values.
absl::Status ValidateOptions(const WorkerOptions& options);

// The backend that `device` means: auto is CUDA where a device can be used and computes in what
// weight_dtype says, else the CPU. `why` says what decided; it may be null.
std::string BackendOf(const WorkerOptions& options, std::string* why = nullptr);

// The file that gemm_cache means, its folder made where it is "auto"; empty: none.
std::string GemmCachePath(const WorkerOptions& options);

// served_model_name, or the last part of the model's path.
std::string ServedModelName(const WorkerOptions& options);
process::ServerOptions ServerOptionsOf(const WorkerOptions& options);

// Whether KV blocks may travel by way of host memory.
bool MayUseHostTransports(const WorkerOptions& options);

// From the flags of worker_flags.cc.
WorkerOptions WorkerOptionsFromFlags();

}  // namespace baton::worker
