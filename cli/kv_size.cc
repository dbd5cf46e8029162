// `baton kv-size`: the arithmetic of the KV cache, before anything is bought or started.

#include <algorithm>
#include <cstdio>
#include <string>

#include "absl/flags/flag.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"

#include "cli/client.h"
#include "cli/commands.h"
#include "cli/common_flags.h"
#include "cli/model_flags.h"
#include "cli/model_plan.h"
#include "engine/base/flags.h"

ABSL_FLAG(int32_t, context, 0, "Tokens of a sequence, prompt and answer; 0: the model's most.");
ABSL_FLAG(int32_t, sequences, 1, "Sequences held at a time.");

namespace baton::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string Bytes(int64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  return unit == 0 ? absl::StrFormat("%d B", bytes)
                   : absl::StrFormat("%.2f %s (%d)", value, units[unit], bytes);
}

void Print(const KvPlan& plan, int64_t context, int64_t sequences, int64_t needed, bool has_pool) {
  std::printf("  KV format          %s, blocks of %d tokens\n",
              std::string(kv::KvFormatName(plan.format)).c_str(), kv::kBlockTokens);
  std::printf("  one token          %s\n", Bytes(plan.bytes_per_token).c_str());
  std::printf("  one block          %s\n", Bytes(plan.block_bytes).c_str());
  std::printf("  one sequence       %s for %d tokens\n",
              Bytes(kv::BlocksFor(static_cast<int>(context)) * plan.block_bytes).c_str(),
              static_cast<int>(context));
  std::printf("  %-5d sequences    %s\n", static_cast<int>(sequences), Bytes(needed).c_str());
  if (plan.tp > 1)
    std::printf("  each of %d ranks    %s of these\n", plan.tp, Bytes(needed / plan.tp).c_str());
  std::printf("  weights, about     %s\n", Bytes(plan.weight_bytes).c_str());
  if (has_pool) {
    std::printf("  the pool           %s: %d blocks, %d tokens, %d such sequences\n",
                Bytes(plan.pool_bytes).c_str(), static_cast<int>(plan.num_blocks),
                static_cast<int>(plan.pool_tokens),
                static_cast<int>(plan.num_blocks / kv::BlocksFor(static_cast<int>(context))));
  }
}

absl::Status Run() {
  const absl::StatusOr<PlannedModel> model = PlannedModel::Open(absl::GetFlag(FLAGS_model));
  if (!model.ok()) return model.status();
  const WorkerSettings settings = SettingsFromFlags();
  const absl::StatusOr<std::string> dtype = model->WeightDtype(settings);
  if (!dtype.ok()) return dtype.status();
  const absl::StatusOr<KvPlan> plan = PlanWorker(model->config(), *dtype, settings);
  if (!plan.ok()) return plan.status();
  const int64_t wanted = absl::GetFlag(FLAGS_context), sequences = absl::GetFlag(FLAGS_sequences);
  if (wanted < 0 || wanted > plan->max_model_len) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--context=%d: want 0 (the most) to %d", static_cast<int>(wanted), plan->max_model_len));
  }
  if (sequences < 1) return absl::InvalidArgumentError("--sequences: want 1 or more");
  const int context = wanted == 0 ? plan->max_model_len : static_cast<int>(wanted);
  const int64_t needed = kv::BlocksFor(context) * plan->block_bytes * sequences;
  const bool has_pool = settings.contains("kv_cache_bytes") || settings.contains("num_blocks");
  if (!JsonFlag()) {
    Print(*plan, context, sequences, needed, has_pool);
    return absl::OkStatus();
  }
  Json json = {{"kv_dtype", std::string(kv::KvFormatName(plan->format))},
               {"block_tokens", kv::kBlockTokens},
               {"bytes_per_token", plan->bytes_per_token},
               {"block_bytes", plan->block_bytes},
               {"context", context},
               {"sequences", sequences},
               {"bytes_needed", needed},
               {"tp", plan->tp},
               {"weight_bytes_about", plan->weight_bytes}};
  if (has_pool) {
    json["pool"] = {{"bytes", plan->pool_bytes},
                    {"blocks", plan->num_blocks},
                    {"tokens", plan->pool_tokens},
                    {"sequences", plan->num_blocks / kv::BlocksFor(context)}};
  }
  std::printf("%s\n", json.dump().c_str());
  return absl::OkStatus();
}

}  // namespace

int RunKvSize(int argc, char** argv) {
  const base::FlagsOutcome flags = base::HandleFlags(
      argc, argv,
      "baton kv-size --model PATH: memory that the KV cache takes, a token, a sequence, a pool.",
      {"cli/kv_size", "cli/model_flags", "cli/json_flag"});
  if (!flags.go_on) return flags.exit_code;
  const absl::Status status = Run();
  return status.ok() ? 0 : PrintFailure("kv-size", status);
}

}  // namespace baton::cli
