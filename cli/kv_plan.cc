#include "cli/kv_plan.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

#include "engine/base/status_macros.h"
#include "engine/model/kv_scales.h"
#include "engine/model/shard_plan.h"

namespace baton::cli {
namespace {

// Defaults of the workers; tests hold them against `baton-decode --help`.
constexpr int64_t kDefaultCacheBytes = int64_t{1} << 30;  // on the CPU
constexpr int64_t kDefaultChunkTokens = 512;
// Above this share of the memory there is too little left for buffers, and the kernel may kill.
constexpr double kMemoryWarning = 0.95;

std::string Flag(const std::string& key) {
  return absl::StrCat("--", absl::StrReplaceAll(key, {{"_", "-"}}));
}

std::string TextOr(const WorkerSettings& settings, const std::string& key, const char* otherwise) {
  const auto found = settings.find(key);
  return found == settings.end() ? otherwise : found->second;
}

absl::StatusOr<int64_t> NumberOr(const WorkerSettings& settings,
                                 const std::string& key,
                                 int64_t otherwise,
                                 int64_t least) {
  const auto found = settings.find(key);
  if (found == settings.end()) return otherwise;
  int64_t value = 0;
  if (!absl::SimpleAtoi(found->second, &value) || value < least) {
    return absl::InvalidArgumentError(absl::StrCat(Flag(key), "=\"", found->second,
                                                   "\": want a whole number of at least ", least));
  }
  return value;
}

// Of one weight, scales included.
double BytesPerWeight(const std::string& dtype) {
  if (dtype == "f32") return 4;
  if (dtype == "int8") return 1 + 4.0 / 32;
  if (dtype == "fp8") return 1 + 4.0 / (128 * 128);  // on a device; the CPU has it as bf16
  if (dtype == "q4") return 0.5 + 4.0 / 32;
  return 2;
}

double NumWeights(const model::ModelConfig& c) {
  const double embedding = double{1} * c.vocab * c.hidden;
  const double attention =
      double{1} * c.hidden * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads);
  const double ffn = 3.0 * c.hidden * c.ffn;
  return embedding * (c.tied_head ? 1 : 2) + c.num_layers * (attention + ffn);
}

std::string Gib(int64_t bytes) {
  return absl::StrFormat("%.2f GiB", static_cast<double>(bytes) / (int64_t{1} << 30));
}

class Findings {
 public:
  explicit Findings(std::string role) : role_(std::move(role)) {}
  template <typename... Parts>
  void Error(const Parts&... parts) {
    list_.push_back({Finding::Level::kError, absl::StrCat(role_, ": ", parts...)});
  }
  template <typename... Parts>
  void Warning(const Parts&... parts) {
    list_.push_back({Finding::Level::kWarning, absl::StrCat(role_, ": ", parts...)});
  }
  std::vector<Finding> Take() { return std::move(list_); }

 private:
  const std::string role_;
  std::vector<Finding> list_;
};

void CheckChoices(const WorkerSettings& settings, Findings* findings) {
  static const auto* const kChoices = new std::map<std::string, std::set<std::string>>{
      {"kv_transport", {"auto", "cuda_ipc", "nccl", "shm", "tcp"}},
      {"require_transport", {"", "cuda_ipc", "nccl", "shm", "tcp"}},
      {"device", {"auto", "cpu", "ref", "cuda"}},
      {"cpu_isa", {"auto", "avx2", "avx512", "amx"}},
      {"metrics_compat", {"none", "vllm"}}};
  for (const auto& [key, accepted] : *kChoices) {
    const auto found = settings.find(key);
    if (found == settings.end() || accepted.contains(found->second)) continue;
    std::string list;
    for (const std::string& name : accepted) absl::StrAppend(&list, list.empty() ? "" : ", ", name);
    findings->Error(Flag(key), "=\"", found->second, "\": accepted: ", list);
  }
}

void CheckMemory(const KvPlan& plan, int64_t memory_bytes, Findings* findings) {
  if (memory_bytes <= 0) return;
  const int64_t needed = plan.pool_bytes + plan.weight_bytes;
  const double share = static_cast<double>(needed) / static_cast<double>(memory_bytes);
  const std::string sum = absl::StrCat("KV cache ", Gib(plan.pool_bytes), " and weights about ",
                                       Gib(plan.weight_bytes), " of ", Gib(memory_bytes));
  if (share > 1) {
    findings->Error("memory: ", sum, ": that is more than there is");
  } else if (share > kMemoryWarning) {
    findings->Warning("memory: ", sum, ": above ", kMemoryWarning, " nothing is left for buffers");
  }
}

// The only transport that will do, or "auto".
std::string WantedTransport(const WorkerSettings& settings) {
  const std::string required = TextOr(settings, "require_transport", "");
  return required.empty() ? TextOr(settings, "kv_transport", "auto") : required;
}

// What the worker takes as a share, and warns of only where it has a GPU.
void CheckGpuShare(const WorkerSettings& settings, Findings* findings) {
  const auto found = settings.find("gpu_memory_utilization");
  double share = 0;
  if (found == settings.end()) return;
  if (!absl::SimpleAtod(found->second, &share) || !(share > 0 && share <= 1)) {
    findings->Error("--gpu-memory-utilization=\"", found->second,
                    "\": must be above 0 and at most 1");
  } else if (share > kMemoryWarning) {
    findings->Warning("--gpu-memory-utilization=", found->second, ": above ", kMemoryWarning,
                      " little is left for buffers, and for what others use");
  }
}

}  // namespace

absl::StatusOr<KvPlan> PlanWorker(const model::ModelConfig& config,
                                  const std::string& weight_dtype,
                                  const WorkerSettings& settings) {
  KvPlan plan;
  BATON_ASSIGN_OR_RETURN(plan.format,
                         model::ResolveKvFormat(config, TextOr(settings, "kv_dtype", "auto")));
  BATON_ASSIGN_OR_RETURN(const int64_t length, NumberOr(settings, "max_model_len", 0, 0));
  if (length > std::numeric_limits<int>::max())
    return absl::InvalidArgumentError(absl::StrCat("--max-model-len=", length, ": too long"));
  BATON_ASSIGN_OR_RETURN(plan.max_model_len,
                         model::ResolveMaxModelLen(config, static_cast<int>(length)));
  BATON_ASSIGN_OR_RETURN(const int64_t given_bytes, NumberOr(settings, "kv_cache_bytes", 0, 0));
  const int64_t cache_bytes = given_bytes > 0 ? given_bytes : kDefaultCacheBytes;
  BATON_ASSIGN_OR_RETURN(const int64_t num_blocks, NumberOr(settings, "num_blocks", 0, 0));
  BATON_ASSIGN_OR_RETURN(const int64_t tp, NumberOr(settings, "tp", 1, 1));
  plan.tp = static_cast<int>(std::min<int64_t>(tp, std::numeric_limits<int>::max()));
  BATON_RETURN_IF_ERROR(Annotate(model::CheckTp(config, weight_dtype, plan.tp), "--tp"));
  kv::KvLayout layout;
  layout.num_layers = config.num_layers;
  layout.num_kv_heads = config.num_kv_heads;
  layout.head_dim = config.head_dim;
  layout.format = plan.format;
  plan.block_bytes = static_cast<int64_t>(layout.block_bytes()) * config.num_layers;
  plan.bytes_per_token = plan.block_bytes / kv::kBlockTokens;
  plan.num_blocks = num_blocks > 0 ? num_blocks : cache_bytes / plan.block_bytes;
  if (plan.num_blocks > std::numeric_limits<int32_t>::max() / kv::kBlockTokens)
    return absl::InvalidArgumentError(
        absl::StrCat("KV cache: blocks=", plan.num_blocks, ": too many"));
  plan.pool_bytes = plan.num_blocks * plan.block_bytes;
  plan.pool_tokens = plan.num_blocks * kv::kBlockTokens;
  plan.weight_bytes = static_cast<int64_t>(NumWeights(config) * BytesPerWeight(weight_dtype));
  return plan;
}

std::vector<Finding> CheckWorker(const std::string& role,
                                 const model::ModelConfig& config,
                                 const std::string& weight_dtype,
                                 const WorkerSettings& settings,
                                 int64_t memory_bytes) {
  Findings findings(role);
  CheckChoices(settings, &findings);
  const absl::StatusOr<int64_t> chunk =
      NumberOr(settings, "chunk_tokens", kDefaultChunkTokens, kv::kBlockTokens);
  if (!chunk.ok()) findings.Error(chunk.status().message());
  const absl::StatusOr<KvPlan> plan = PlanWorker(config, weight_dtype, settings);
  if (!plan.ok()) {
    findings.Error(plan.status().message());
    return findings.Take();
  }
  if (plan->num_blocks < 1) {
    findings.Error("KV cache: not one block of ", plan->block_bytes, " bytes fits");
  } else if (plan->pool_tokens < plan->max_model_len) {
    findings.Warning("KV cache holds ", plan->pool_tokens, " tokens, less than one context of ",
                     plan->max_model_len, ": longer requests are refused");
  }
  CheckMemory(*plan, memory_bytes, &findings);
  CheckGpuShare(settings, &findings);
  return findings.Take();
}

std::vector<Finding> CheckPair(const PairMember& prefill, const PairMember& decode) {
  Findings findings("pair");
  const auto differs = [&](const char* what, const std::string& p, const std::string& d) {
    if (p != d) findings.Error(what, " differs: prefill ", p, ", decode ", d);
  };
  differs("model", prefill.model.substr(0, 16), decode.model.substr(0, 16));
  differs("weight dtype", prefill.weight_dtype, decode.weight_dtype);
  const auto plan_p = PlanWorker(prefill.config, prefill.weight_dtype, prefill.settings);
  const auto plan_d = PlanWorker(decode.config, decode.weight_dtype, decode.settings);
  if (plan_p.ok() && plan_d.ok()) {
    differs("KV dtype", std::string(kv::KvFormatName(plan_p->format)),
            std::string(kv::KvFormatName(plan_d->format)));
    if (plan_p->max_model_len < plan_d->max_model_len) {
      findings.Warning("prefill takes ", plan_p->max_model_len, " tokens, decode ",
                       plan_d->max_model_len, ": the shorter one holds");
    }
  }
  const std::string p = WantedTransport(prefill.settings);
  const std::string d = WantedTransport(decode.settings);
  if (p != "auto" && d != "auto") differs("transport", p, d);
  return findings.Take();
}

}  // namespace baton::cli
