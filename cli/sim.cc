// `baton sim`: what a deployment would do with a trace, in virtual time, with the router's own
// policy.

#include <cstdio>
#include <fstream>
#include <string>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "cli/client.h"
#include "cli/commands.h"
#include "cli/common_flags.h"
#include "cli/simulator.h"
#include "engine/base/flags.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::cli {
namespace {

constexpr char kUsage[] =
    "baton sim --trace FILE (--prefill-workers N --decode-workers N | --workers N): runs the "
    "router's policy against simulated workers in virtual time. The trace is JSON Lines: arrival "
    "(s), prompt_tokens, output_tokens, and optionally prefix_group, prefix_tokens, tenant, "
    "priority. With --workers it looks for the best split.";

}  // namespace
}  // namespace baton::cli

using baton::cli::SimOptions;
using baton::cli::WorkerSpeed;

ABSL_FLAG(int32_t,
          prefill_workers,
          SimOptions{}.prefill,
          "Prefill workers; 0: decode workers compute the prompts.");
ABSL_FLAG(int32_t, decode_workers, SimOptions{}.decode, "Decode workers.");
ABSL_FLAG(int32_t, workers, 0, "Workers of both roles together: finds the best split.");
ABSL_FLAG(std::string,
          policy,
          SimOptions{}.policy,
          "prefix, least_load, power_of_two or round_robin.");
ABSL_FLAG(int32_t,
          local_prefill_tokens,
          SimOptions{}.policy_options.local_prefill_tokens,
          "As of the router.");
ABSL_FLAG(int32_t, prefill_queue_tokens, SimOptions{}.prefill_queue_tokens, "As of the router.");
ABSL_FLAG(int32_t,
          long_prompt_tokens,
          SimOptions{}.admission.long_prompt_tokens,
          "As of the router.");
ABSL_FLAG(int32_t, max_concurrent, SimOptions{}.admission.max_running, "As of the router.");
ABSL_FLAG(int32_t, max_queue, SimOptions{}.admission.max_queue, "As of the router.");
ABSL_FLAG(bool, refuse_late, SimOptions{}.admission.refuse_late, "As of the router.");
ABSL_FLAG(double, deadline_s, SimOptions{}.deadline_s, "Of each request, after its arrival.");
ABSL_FLAG(double,
          slo_ttft_s,
          SimOptions{}.slo_ttft_s,
          "A good request's first token comes by then.");
ABSL_FLAG(double,
          slo_tpot_s,
          SimOptions{}.slo_tpot_s,
          "Mean time between the tokens of a good request, at most.");
ABSL_FLAG(double, report_s, SimOptions{}.report_s, "Between two load reports of a worker.");
ABSL_FLAG(double, prefill_step_s, WorkerSpeed{}.prefill_step_s, "A step of a prefill worker.");
ABSL_FLAG(double, prefill_token_s, WorkerSpeed{}.prefill_token_s, "More for each prompt token.");
ABSL_FLAG(double,
          prefill_pair_s,
          WorkerSpeed{}.prefill_pair_s,
          "More for each pair of a token and one it attends to (n^2 for a prompt of n).");
ABSL_FLAG(int32_t,
          prefill_chunk_tokens,
          WorkerSpeed{}.chunk_tokens,
          "Most prompt tokens in a step.");
ABSL_FLAG(double, decode_step_s, WorkerSpeed{}.decode_step_s, "A step of a decode worker.");
ABSL_FLAG(double,
          decode_sequence_s,
          WorkerSpeed{}.decode_sequence_s,
          "More for each sequence of the batch.");
ABSL_FLAG(double,
          decode_kv_token_s,
          WorkerSpeed{}.decode_kv_token_s,
          "More for each token of KV in the batch.");
ABSL_FLAG(double, accept_length, WorkerSpeed{}.accept_length, "Tokens a step, with speculation.");
ABSL_FLAG(int32_t, sim_max_batch, WorkerSpeed{}.max_batch, "Most sequences in a step.");
ABSL_FLAG(double,
          transfer_s,
          WorkerSpeed{}.transfer_s,
          "From a computed prompt to the decode worker's first step with it.");
ABSL_FLAG(double,
          transfer_token_s,
          WorkerSpeed{}.transfer_token_s,
          "More for each token of the prompt that compute does not hide.");
ABSL_FLAG(double, rpc_s, WorkerSpeed{}.rpc_s, "One way between router and worker.");
ABSL_FLAG(int32_t, prefill_blocks, WorkerSpeed{}.prefill_blocks, "KV blocks of a prefill worker.");
ABSL_FLAG(int32_t, decode_blocks, WorkerSpeed{}.decode_blocks, "KV blocks of a decode worker.");
ABSL_FLAG(int32_t, sim_max_model_len, WorkerSpeed{}.max_model_len, "Prompt and answer together.");

namespace baton::cli {
namespace {

absl::StatusOr<uint32_t> AtLeastOne(const char* flag, int32_t value) {
  if (value < 1) return absl::InvalidArgumentError(absl::StrCat("--", flag, ": want 1 or more"));
  return static_cast<uint32_t>(value);
}

absl::StatusOr<WorkerSpeed> SpeedFromFlags() {
  WorkerSpeed out;
  const std::pair<const char*, std::pair<double, double*>> times[] = {
      {"prefill-step-s", {absl::GetFlag(FLAGS_prefill_step_s), &out.prefill_step_s}},
      {"prefill-token-s", {absl::GetFlag(FLAGS_prefill_token_s), &out.prefill_token_s}},
      {"prefill-pair-s", {absl::GetFlag(FLAGS_prefill_pair_s), &out.prefill_pair_s}},
      {"decode-step-s", {absl::GetFlag(FLAGS_decode_step_s), &out.decode_step_s}},
      {"decode-sequence-s", {absl::GetFlag(FLAGS_decode_sequence_s), &out.decode_sequence_s}},
      {"decode-kv-token-s", {absl::GetFlag(FLAGS_decode_kv_token_s), &out.decode_kv_token_s}},
      {"transfer-s", {absl::GetFlag(FLAGS_transfer_s), &out.transfer_s}},
      {"transfer-token-s", {absl::GetFlag(FLAGS_transfer_token_s), &out.transfer_token_s}},
      {"rpc-s", {absl::GetFlag(FLAGS_rpc_s), &out.rpc_s}}};
  for (const auto& [flag, value] : times) {
    if (!(value.first >= 0 && value.first < 3600))
      return absl::InvalidArgumentError(absl::StrCat("--", flag, ": want seconds, 0 or more"));
    *value.second = value.first;
  }
  if (out.prefill_step_s + out.prefill_token_s <= 0 || out.decode_step_s <= 0)
    return absl::InvalidArgumentError("--prefill-step-s, --decode-step-s: want more than 0");
  out.accept_length = absl::GetFlag(FLAGS_accept_length);
  if (!(out.accept_length >= 1 && out.accept_length <= 64))
    return absl::InvalidArgumentError("--accept-length: want 1 to 64");
  BATON_ASSIGN_OR_RETURN(out.chunk_tokens, AtLeastOne("prefill-chunk-tokens",
                                                      absl::GetFlag(FLAGS_prefill_chunk_tokens)));
  if (out.chunk_tokens < kSimBlockTokens)
    return absl::InvalidArgumentError(
        absl::StrCat("--prefill-chunk-tokens: want ", kSimBlockTokens, " or more"));
  BATON_ASSIGN_OR_RETURN(out.max_batch,
                         AtLeastOne("sim-max-batch", absl::GetFlag(FLAGS_sim_max_batch)));
  BATON_ASSIGN_OR_RETURN(out.prefill_blocks,
                         AtLeastOne("prefill-blocks", absl::GetFlag(FLAGS_prefill_blocks)));
  BATON_ASSIGN_OR_RETURN(out.decode_blocks,
                         AtLeastOne("decode-blocks", absl::GetFlag(FLAGS_decode_blocks)));
  BATON_ASSIGN_OR_RETURN(out.max_model_len,
                         AtLeastOne("sim-max-model-len", absl::GetFlag(FLAGS_sim_max_model_len)));
  return out;
}

absl::StatusOr<SimOptions> OptionsFromFlags() {
  SimOptions out;
  out.prefill = absl::GetFlag(FLAGS_prefill_workers);
  out.decode = absl::GetFlag(FLAGS_decode_workers);
  out.policy = absl::GetFlag(FLAGS_policy);
  if (absl::GetFlag(FLAGS_local_prefill_tokens) < 0 ||
      absl::GetFlag(FLAGS_prefill_queue_tokens) < 0)
    return absl::InvalidArgumentError(
        "--local-prefill-tokens, --prefill-queue-tokens: want 0 or more");
  out.policy_options.local_prefill_tokens =
      static_cast<uint32_t>(absl::GetFlag(FLAGS_local_prefill_tokens));
  out.prefill_queue_tokens = static_cast<uint64_t>(absl::GetFlag(FLAGS_prefill_queue_tokens));
  BATON_ASSIGN_OR_RETURN(out.admission.long_prompt_tokens,
                         AtLeastOne("long-prompt-tokens", absl::GetFlag(FLAGS_long_prompt_tokens)));
  BATON_ASSIGN_OR_RETURN(out.admission.max_running,
                         AtLeastOne("max-concurrent", absl::GetFlag(FLAGS_max_concurrent)));
  BATON_ASSIGN_OR_RETURN(out.admission.max_queue,
                         AtLeastOne("max-queue", absl::GetFlag(FLAGS_max_queue)));
  out.admission.refuse_late = absl::GetFlag(FLAGS_refuse_late);
  out.deadline_s = absl::GetFlag(FLAGS_deadline_s);
  out.slo_ttft_s = absl::GetFlag(FLAGS_slo_ttft_s);
  out.slo_tpot_s = absl::GetFlag(FLAGS_slo_tpot_s);
  out.report_s = absl::GetFlag(FLAGS_report_s);
  if (!(out.deadline_s > 0 && out.slo_ttft_s > 0 && out.slo_tpot_s > 0 && out.report_s >= 0.001)) {
    return absl::InvalidArgumentError(
        "--deadline-s, --slo-ttft-s, --slo-tpot-s, --report-s: want more than 0");
  }
  BATON_ASSIGN_OR_RETURN(out.speed, SpeedFromFlags());
  return out;
}

std::string Percentiles(const SimHistogram& histogram) {
  return absl::StrFormat("%9.4f %9.4f %9.4f %9.4f %9.4f", histogram.mean(),
                         histogram.Percentile(50), histogram.Percentile(90),
                         histogram.Percentile(95), histogram.Percentile(99));
}

void PrintTable(const SplitResult& split, bool searched) {
  const SimResult& r = split.result;
  std::printf("prefill workers %d  decode workers %d%s\n", split.prefill, split.decode,
              searched ? "  (best split)" : "");
  std::printf("requests %lu  completed %lu  refused %lu  late %lu  within objectives %lu\n",
              static_cast<unsigned long>(r.requests), static_cast<unsigned long>(r.completed),
              static_cast<unsigned long>(r.refused), static_cast<unsigned long>(r.late),
              static_cast<unsigned long>(r.good));
  std::printf("goodput %.3f requests/s  output %.1f tokens/s  over %.1f s\n", r.goodput,
              static_cast<double>(r.output_tokens) / r.duration_s, r.duration_s);
  std::printf(
      "prefix hits %.1f %%  prefill busy %.1f %%  decode busy %.1f %%  computed by decode %lu"
      "  refused by workers %lu  prediction off by %.4f s\n",
      100 * r.prefix_hit_ratio, 100 * r.prefill_busy, 100 * r.decode_busy,
      static_cast<unsigned long>(r.local_prefills),
      static_cast<unsigned long>(r.refused_by_workers), r.prediction_error_s);
  std::printf("%-8s %9s %9s %9s %9s %9s\n", "seconds", "mean", "p50", "p90", "p95", "p99");
  std::printf("%-8s %s\n", "TTFT", Percentiles(r.ttft).c_str());
  std::printf("%-8s %s\n", "ITL", Percentiles(r.itl).c_str());
  std::printf("%-8s %s\n", "e2e", Percentiles(r.e2e).c_str());
  for (const auto& [prefill, goodput] : split.tried) {
    std::printf("  P:D %d:%d  goodput %.3f\n", prefill, split.prefill + split.decode - prefill,
                goodput);
  }
}

std::string HistogramJson(const SimHistogram& histogram) {
  return absl::StrFormat(
      "{\"mean\": %.9g, \"p50\": %.9g, \"p90\": %.9g, \"p95\": %.9g, \"p99\": %.9g, \"count\": %u}",
      histogram.mean(), histogram.Percentile(50), histogram.Percentile(90),
      histogram.Percentile(95), histogram.Percentile(99), histogram.count());
}

void PrintJson(const SplitResult& split) {
  const SimResult& r = split.result;
  std::string tried;
  for (const auto& [prefill, goodput] : split.tried) {
    absl::StrAppend(&tried, tried.empty() ? "" : ", ",
                    absl::StrFormat("{\"prefill\": %d, \"goodput\": %.9g}", prefill, goodput));
  }
  std::printf(
      "%s\n",
      absl::StrFormat(
          "{\"prefill_workers\": %d, \"decode_workers\": %d, \"requests\": %u, \"completed\": %u, "
          "\"refused\": %u, \"late\": %u, \"good\": %u, \"goodput\": %.9g, \"output_tokens\": %u, "
          "\"duration_s\": %.9g, \"prefix_hit_ratio\": %.9g, \"prefill_busy\": %.9g, "
          "\"decode_busy\": %.9g, \"local_prefills\": %u, \"refused_by_workers\": %u, "
          "\"prediction_error_s\": %.9g, \"ttft_s\": %s, \"itl_s\": %s, \"e2e_s\": %s, "
          "\"tried\": [%s]}",
          split.prefill, split.decode, r.requests, r.completed, r.refused, r.late, r.good,
          r.goodput, r.output_tokens, r.duration_s, r.prefix_hit_ratio, r.prefill_busy,
          r.decode_busy, r.local_prefills, r.refused_by_workers, r.prediction_error_s,
          HistogramJson(r.ttft), HistogramJson(r.itl), HistogramJson(r.e2e), tried)
          .c_str());
}

absl::StatusOr<SplitResult> RunFromFlags() {
  const std::string path = TraceFlag();
  if (path.empty()) return absl::InvalidArgumentError("--trace: want a file of JSON Lines");
  std::ifstream in(path);
  if (!in) return absl::NotFoundError(absl::StrCat("--trace: ", path, " cannot be opened"));
  BATON_ASSIGN_OR_RETURN(const std::vector<TraceRequest> trace, ReadTrace(in));
  BATON_ASSIGN_OR_RETURN(const SimOptions options, OptionsFromFlags());
  const int workers = absl::GetFlag(FLAGS_workers);
  if (workers != 0) return FindBestSplit(trace, options, workers);
  SplitResult out;
  out.prefill = options.prefill;
  out.decode = options.decode;
  BATON_ASSIGN_OR_RETURN(out.result, Simulate(trace, options));
  return out;
}

}  // namespace

int RunSim(int argc, char** argv) {
  const base::FlagsOutcome flags =
      base::HandleFlags(argc, argv, kUsage, {"cli/sim.cc", "cli/json_flag", "cli/trace_flag"});
  if (!flags.go_on) return flags.exit_code;
  InitLogging("sim", LogLevel::kWarning);
  const absl::StatusOr<SplitResult> split = RunFromFlags();
  if (!split.ok()) return PrintFailure("sim", split.status());
  if (JsonFlag()) {
    PrintJson(*split);
  } else {
    PrintTable(*split, absl::GetFlag(FLAGS_workers) != 0);
  }
  return 0;
}

}  // namespace baton::cli
