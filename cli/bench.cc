// `baton bench`: load on a running router, and what its users would have seen.

#include <cstdio>
#include <fstream>
#include <string>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "cli/access_flags.h"
#include "cli/bench_client.h"
#include "cli/client.h"
#include "cli/commands.h"
#include "cli/common_flags.h"
#include "cli/load_plan.h"
#include "engine/base/flags.h"
#include "engine/base/status_macros.h"

ABSL_FLAG(double,
          rate,
          0,
          "Requests a second, at random moments (Poisson): each is sent when it is due, whatever "
          "has ended. 0: --concurrency at a time.");
ABSL_FLAG(int32_t, concurrency, 8, "Requests under way at a time, where there is no rate.");
ABSL_FLAG(int32_t, requests, 100, "Requests in all.");
ABSL_FLAG(std::string,
          prompt_tokens,
          "512",
          "Length of prompts: N, MIN-MAX, normal:MEAN:DEVIATION or lognormal:MEDIAN:SIGMA.");
ABSL_FLAG(std::string, output_tokens, "128", "Length of answers, likewise.");
ABSL_FLAG(double, time_scale, 1, "Arrivals of a trace come this many times as fast.");
ABSL_FLAG(uint64_t, bench_seed, 1, "The same seed sends the same requests at the same moments.");
ABSL_FLAG(double, bench_temperature, 0, "Of all requests.");
ABSL_FLAG(double, slo_ttft, 0, "Seconds in which a good request has its first token; 0: any.");
ABSL_FLAG(double,
          slo_tpot,
          0,
          "Seconds between the tokens of a good request, in the mean; 0: any.");
ABSL_FLAG(int32_t, channels, 4, "Connections.");
ABSL_FLAG(std::string, html, "", "File that gets the report with plots; empty: none.");

namespace baton::cli {
namespace {

constexpr char kUsage[] =
    "baton bench --address HOST:PORT (--rate R | --concurrency N | --trace FILE): sends "
    "requests of random token ids and prints TTFT, ITL and e2e percentiles, goodput and tokens a "
    "second. Latencies count from the moment a request was due, also where the client was late.";

struct Load {
  std::vector<TraceRequest> plan;
  int concurrency = 0;
  std::string words;
};

absl::StatusOr<Load> LoadFromTrace(const std::string& path) {
  std::ifstream in(path);
  if (!in) return absl::NotFoundError(absl::StrCat("--trace: ", path, " cannot be opened"));
  const double scale = absl::GetFlag(FLAGS_time_scale);
  if (!(scale > 0 && scale <= 1e6))
    return absl::InvalidArgumentError("--time-scale: want more than 0");
  Load out;
  BATON_ASSIGN_OR_RETURN(out.plan, ReadTrace(in));
  const double first = out.plan.front().arrival_s;
  for (TraceRequest& request : out.plan) request.arrival_s = (request.arrival_s - first) / scale;
  out.words = absl::StrFormat("trace of %u requests, %.3g times as fast", out.plan.size(), scale);
  return out;
}

absl::StatusOr<Load> LoadFromFlags() {
  if (const std::string path = TraceFlag(); !path.empty()) return LoadFromTrace(path);
  LoadOptions options;
  Load out;
  const int requests = absl::GetFlag(FLAGS_requests);
  if (requests < 1 || requests > 10'000'000)
    return absl::InvalidArgumentError("--requests: want 1 to 10000000");
  options.requests = static_cast<uint32_t>(requests);
  options.rate = absl::GetFlag(FLAGS_rate);
  if (!(options.rate >= 0 && options.rate <= 1e6))
    return absl::InvalidArgumentError("--rate: want 0 to 1000000 requests a second");
  out.concurrency = options.rate > 0 ? 0 : absl::GetFlag(FLAGS_concurrency);
  if (options.rate == 0 && (out.concurrency < 1 || out.concurrency > 100'000))
    return absl::InvalidArgumentError("--concurrency: want 1 to 100000");
  options.seed = absl::GetFlag(FLAGS_bench_seed);
  const std::string prompt = absl::GetFlag(FLAGS_prompt_tokens);
  const std::string output = absl::GetFlag(FLAGS_output_tokens);
  absl::StatusOr<LengthDistribution> lengths = LengthDistribution::Parse(prompt);
  if (!lengths.ok()) return Annotate(lengths.status(), "--prompt-tokens");
  options.prompt_tokens = *lengths;
  lengths = LengthDistribution::Parse(output);
  if (!lengths.ok()) return Annotate(lengths.status(), "--output-tokens");
  options.output_tokens = *lengths;
  out.plan = MakePlan(options);
  out.words =
      absl::StrCat(options.rate > 0 ? absl::StrFormat("%.3g requests/s, Poisson", options.rate)
                                    : absl::StrCat(out.concurrency, " at a time"),
                   ", prompts of ", prompt, " and answers of ", output, " tokens");
  return out;
}

absl::Status WriteHtml(const std::string& path, const std::string& page) {
  std::ofstream out(path, std::ios::binary);
  out << page;
  out.close();
  if (!out) return absl::UnavailableError(absl::StrCat("--html: ", path, " cannot be written"));
  return absl::OkStatus();
}

absl::Status Bench() {
  BATON_ASSIGN_OR_RETURN(const Load load, LoadFromFlags());
  const Objectives objectives{absl::GetFlag(FLAGS_slo_ttft), absl::GetFlag(FLAGS_slo_tpot)};
  if (!(objectives.ttft_s >= 0 && objectives.tpot_s >= 0))
    return absl::InvalidArgumentError("--slo-ttft, --slo-tpot: want seconds, 0 or more");
  BenchClientOptions options;
  options.address = AddressFlag();
  BATON_ASSIGN_OR_RETURN(options.access, AccessFromFlags());
  options.channels = absl::GetFlag(FLAGS_channels);
  if (options.channels < 1 || options.channels > 1000)
    return absl::InvalidArgumentError("--channels: want 1 to 1000");
  options.concurrency = load.concurrency;
  options.timeout = TimeoutFlag();
  options.seed = absl::GetFlag(FLAGS_bench_seed);
  options.temperature = absl::GetFlag(FLAGS_bench_temperature);
  BATON_ASSIGN_OR_RETURN(const BenchRun run, RunPlan(load.plan, options));
  const BenchSetting setting{options.address, run.model, load.words, options.seed};
  const BenchSummary summary = Summarize(run.records, objectives);
  if (const std::string path = absl::GetFlag(FLAGS_html); !path.empty())
    BATON_RETURN_IF_ERROR(WriteHtml(path, BenchHtml(setting, summary, run.records)));
  std::printf("%s\n",
              (JsonFlag() ? BenchJson(setting, summary) : BenchTable(setting, summary)).c_str());
  return absl::OkStatus();
}

}  // namespace

int RunBench(int argc, char** argv) {
  const base::FlagsOutcome flags =
      base::HandleFlags(argc, argv, kUsage,
                        {"cli/bench.cc", "cli/common_flags", "cli/json_flag", "cli/trace_flag",
                         kAccessFlags, kTlsClientFlags});
  if (!flags.go_on) return flags.exit_code;
  const absl::Status status = Bench();
  return status.ok() ? 0 : PrintFailure("bench", status);
}

}  // namespace baton::cli
