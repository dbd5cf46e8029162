#include "cli/model_flags.h"

#include "absl/flags/flag.h"

ABSL_FLAG(std::string, model, "", "Hugging Face directory or GGUF file.");
#define BATON_WORKER_FLAG(name, help) \
  ABSL_FLAG(absl::optional<std::string>, name, absl::nullopt, help)
BATON_WORKER_FLAG(weight_dtype, "auto, f32, bf16, int8, q4 or fp8: what weights compute in.");
BATON_WORKER_FLAG(kv_dtype, "auto, fp8, fp8_dynamic, bf16 or f32: format of the KV cache.");
BATON_WORKER_FLAG(kv_cache_bytes, "Size of each worker's KV pool.");
BATON_WORKER_FLAG(num_blocks, "Blocks of each worker's KV pool, instead of bytes.");
BATON_WORKER_FLAG(gpu_memory_utilization,
                  "Share of a GPU's memory in use once a worker has started.");
BATON_WORKER_FLAG(max_model_len, "Longest prompt and answer together.");
BATON_WORKER_FLAG(tp, "Ranks that share a worker's heads: 1 or 2.");
BATON_WORKER_FLAG(kv_transport, "auto, cuda_ipc, nccl, shm or tcp: how KV blocks travel.");
BATON_WORKER_FLAG(require_transport,
                  "cuda_ipc, nccl, shm or tcp: KV blocks travel so, or workers do not pair.");
#undef BATON_WORKER_FLAG
