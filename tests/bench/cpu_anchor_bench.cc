// Prefill and decode speed of a whole model on the CPU backend, one sample per line of standard
// input ("prefill" or "decode"), answered by one line of JSON with the machine's own figures (AMX
// and FMA in registers, DRAM read) measured just before and just after. scripts/bench_cpu_anchor.py
// drives it, interleaved with llama.cpp.
//
//   cpu_anchor_bench MODEL [threads=N] [prompt=512] [gen=128] [weights=auto] [kv=auto] [isa=auto]

#include <chrono>
#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "engine/base/status_macros.h"
#include "engine/runtime/model_runner.h"
#include "tests/bench/probes.h"

namespace baton::tests {
namespace {

struct Settings {
  std::string model;
  int num_threads = 2, prompt_tokens = 512, decode_tokens = 128;
  std::string weights = "auto", kv = "auto", isa = "auto";
};

struct Probes {
  double amx, fma, read;
};

Probes Probe(int num_threads) {
  return {AmxPeakFlops(), FmaPeakFlops(), ReadBytesPerSecond(num_threads)};
}

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One sequence in blocks 0, 1, 2, ...
class Sequence {
 public:
  Sequence(runtime::ModelRunner* runner, int num_tokens) : runner_(*runner), tokens_(num_tokens) {
    uint32_t state = 12345;
    for (uint32_t& token : tokens_) {
      state = state * 1664525u + 1013904223u;
      token = (state >> 8) % static_cast<uint32_t>(runner->config().vocab);
    }
    for (int i = 0; i < kv::BlocksFor(num_tokens); ++i) blocks_.push_back(i);
  }

  // Tokens [start, start + count); returns seconds.
  absl::StatusOr<double> Run(int start, int count) {
    const int last = count - 1;
    const runtime::StepSequence step = {
        .tokens = absl::MakeConstSpan(tokens_).subspan(start, count),
        .start = start,
        .block_table = blocks_,
        .logit_rows = absl::MakeConstSpan(&last, 1)};
    absl::Span<float> logits;
    const double begin = Seconds();
    BATON_RETURN_IF_ERROR(runner_.Step(absl::MakeConstSpan(&step, 1), nullptr, &logits, nullptr));
    return Seconds() - begin;
  }

 private:
  runtime::ModelRunner& runner_;
  std::vector<uint32_t> tokens_;
  std::vector<kv::BlockId> blocks_;
};

absl::StatusOr<double> Sample(const std::string& command,
                              const Settings& settings,
                              Sequence* sequence) {
  if (command == "prefill") return sequence->Run(0, settings.prompt_tokens);
  if (command != "decode") return absl::InvalidArgumentError("commands: prefill, decode");
  double total = 0;
  for (int i = 0; i < settings.decode_tokens; ++i) {
    BATON_ASSIGN_OR_RETURN(const double seconds, sequence->Run(settings.prompt_tokens + i, 1));
    total += seconds;
  }
  return total;
}

void Print(const std::string& command,
           int num_tokens,
           double seconds,
           const Probes& before,
           const Probes& after,
           const runtime::ModelRunner& runner) {
  std::printf(
      "{\"test\":\"%s\",\"tokens\":%d,\"seconds\":%.6f,\"tokens_per_second\":%.3f,"
      "\"amx_tflops\":[%.3f,%.3f],\"fma_gflops\":[%.1f,%.1f],\"read_gb_per_second\":[%.2f,%.2f],"
      "\"device\":\"%s\"}\n",
      command.c_str(), num_tokens, seconds, num_tokens / seconds, before.amx * 1e-12,
      after.amx * 1e-12, before.fma * 1e-9, after.fma * 1e-9, before.read * 1e-9, after.read * 1e-9,
      runner.device().c_str());
  std::fflush(stdout);
}

absl::Status Serve(const Settings& settings) {
  runtime::ModelRunnerOptions options;
  options.model_path = settings.model;
  options.weight_dtype = settings.weights;
  options.kv_dtype = settings.kv;
  options.max_step_tokens = settings.prompt_tokens;
  options.num_blocks = kv::BlocksFor(settings.prompt_tokens + settings.decode_tokens);
  options.backend_options.num_threads = settings.num_threads;
  options.backend_options.isa = settings.isa;
  BATON_ASSIGN_OR_RETURN(const std::unique_ptr<runtime::ModelRunner> runner,
                         runtime::ModelRunner::Create(options));
  Sequence sequence(runner.get(), settings.prompt_tokens + settings.decode_tokens);
  std::printf("{\"ready\":true,\"device\":\"%s\"}\n", runner->device().c_str());
  std::fflush(stdout);
  for (std::string command; std::getline(std::cin, command);) {
    const Probes before = Probe(settings.num_threads);
    BATON_ASSIGN_OR_RETURN(const double seconds, Sample(command, settings, &sequence));
    const Probes after = Probe(settings.num_threads);
    Print(command, command == "prefill" ? settings.prompt_tokens : settings.decode_tokens, seconds,
          before, after, *runner);
  }
  return absl::OkStatus();
}

bool Parse(int argc, char** argv, Settings* settings) {
  if (argc < 2) return false;
  settings->model = argv[1];
  const std::map<std::string, int*> numbers = {{"threads", &settings->num_threads},
                                               {"prompt", &settings->prompt_tokens},
                                               {"gen", &settings->decode_tokens}};
  const std::map<std::string, std::string*> names = {
      {"weights", &settings->weights}, {"kv", &settings->kv}, {"isa", &settings->isa}};
  for (int i = 2; i < argc; ++i) {
    const std::string arg = argv[i];
    const size_t equal = arg.find('=');
    const std::string key = arg.substr(0, equal),
                      value = equal == std::string::npos ? "" : arg.substr(equal + 1);
    if (const auto number = numbers.find(key); number != numbers.end()) {
      if (!absl::SimpleAtoi(value, number->second) || *number->second < 1) return false;
    } else if (const auto name = names.find(key); name != names.end()) {
      *name->second = value;
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace baton::tests

int main(int argc, char** argv) {
  baton::tests::Settings settings;
  if (!baton::tests::Parse(argc, argv, &settings)) {
    std::fprintf(stderr,
                 "usage: cpu_anchor_bench MODEL [threads=N] [prompt=512] [gen=128] [weights=auto] "
                 "[kv=auto] [isa=auto]\n");
    return 2;
  }
  const absl::Status status = baton::tests::Serve(settings);
  if (!status.ok())
    std::fprintf(stderr, "cpu_anchor_bench: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
