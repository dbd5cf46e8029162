// Tokens a second with drafts and without, in turn, through the whole decode loop: planning,
// drafting, the step, drawing, sending. One JSON line per pair of runs. Prompts are computed before
// the clock starts; both runs must give the same ids, or the bench fails.
// scripts/bench_speculation.py drives it and writes the table.
//
//   speculation_bench MODEL PROMPTS [weights=auto] [draft_model=PATH] [copy=q4] [ngram=1] [batch=1]
//                     [tokens=128] [temperature=0] [pairs=3] [threads=2] [isa=auto]
//
// PROMPTS is a text file, prompts divided by lines of "---"; control tokens in it are recognised.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "decode_worker/decode_loop.h"
#include "decode_worker/draft_models.h"
#include "engine/base/metrics.h"
#include "engine/base/status_macros.h"
#include "worker/engine_host.h"

namespace baton::tests {
namespace {

using runtime::EngineRequest;
using worker::v1::DecodeResponse;

struct Settings {
  std::string model, prompts;
  std::string weights = "auto", draft_model, copy, isa = "auto";
  int ngram = 1, batch = 1, tokens = 128, pairs = 3, threads = 2;
  std::string temperature = "0";
};

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What this thread has computed: with threads=1 all of a run, whoever else uses the machine.
double CpuNow() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// One request's tokens.
class Sink : public worker::CallSink<DecodeResponse> {
 public:
  bool Send(DecodeResponse response) override {
    for (const worker::v1::Token& token : response.tokens().tokens()) ids.push_back(token.id());
    return true;
  }
  void Finish(absl::Status end) override { status = std::move(end); }

  std::vector<uint32_t> ids;
  absl::Status status = absl::UnknownError("not finished");
};

struct Run {
  double tokens_per_second = 0;
  double tokens_per_cpu_second = 0;
  double gap_share = 0;  // time between steps, of all
  double drafts = 0, draft_tokens = 0, accepted = 0, steps = 0;
  std::vector<std::vector<uint32_t>> ids;
};

class Bench {
 public:
  absl::Status Init(const Settings& settings) {
    settings_ = settings;
    worker_options_.model = settings.model;
    worker_options_.weight_dtype = settings.weights;
    worker_options_.threads = settings.threads;
    worker_options_.cpu_isa = settings.isa;
    worker_options_.max_model_len = 2048;
    loop_options_.scheduler.max_batch = std::max(settings.batch, 8);
    loop_options_.speculation.ngram = settings.ngram != 0;
    const int rows = loop_options_.scheduler.max_batch +
                     loop_options_.scheduler.max_prefill_sequences +
                     loop_options_.speculation.max_step_drafts;
    BATON_ASSIGN_OR_RETURN(
        host_,
        worker::LoadEngine(worker_options_, loop_options_.scheduler.chunk_tokens + rows, rows));
    loop_options_.model_fingerprint = host_.ModelKey();
    BATON_ASSIGN_OR_RETURN(cost_, decode::MeasureStepCost(*host_.runner, rows, absl::Seconds(10)));
    return ReadPrompts();
  }

  absl::Status Measure() {
    for (int pair = 0; pair < settings_.pairs; ++pair) {
      // In turn: the machine's speed drifts.
      Run plain, drafted;
      for (int i = 0; i < 2; ++i) {
        const bool with_drafts = (pair + i) % 2 == 1;
        Run& run = with_drafts ? drafted : plain;
        BATON_ASSIGN_OR_RETURN(run, RunOnce(with_drafts));
      }
      if (plain.ids != drafted.ids) return absl::InternalError("ids differ with drafts");
      std::printf(
          "{\"plain\":%.3f,\"drafted\":%.3f,\"plain_cpu\":%.3f,\"drafted_cpu\":%.3f,\"drafts\":%."
          "0f,\"draft_tokens\":%.0f,"
          "\"accepted\":%.0f,\"steps_plain\":%.0f,\"steps_drafted\":%.0f,\"gap_plain\":%.4f,"
          "\"gap_drafted\":%.4f,\"device\":\"%s\"}\n",
          plain.tokens_per_second, drafted.tokens_per_second, plain.tokens_per_cpu_second,
          drafted.tokens_per_cpu_second, drafted.drafts, drafted.draft_tokens, drafted.accepted,
          plain.steps, drafted.steps, plain.gap_share, drafted.gap_share,
          host_.runner->device().c_str());
      std::fflush(stdout);
    }
    return absl::OkStatus();
  }

 private:
  absl::Status ReadPrompts() {
    std::ifstream file(settings_.prompts);
    if (!file) return absl::NotFoundError(settings_.prompts);
    std::stringstream text;
    text << file.rdbuf();
    const std::vector<std::string> prompts = absl::StrSplit(text.str(), "\n---\n");
    for (int i = 0; i < settings_.batch; ++i) {
      EngineRequest& request = requests_.emplace_back();
      request.prompt_ids =
          host_.tokenizer->Encode(prompts[i % prompts.size()], text::SpecialPolicy::kParse);
      if (request.prompt_ids.empty()) return absl::InvalidArgumentError("an empty prompt");
      request.params.max_tokens = static_cast<uint32_t>(settings_.tokens);
      request.params.seed = 1 + i;
      if (!absl::SimpleAtof(settings_.temperature, &request.params.temperature))
        return absl::InvalidArgumentError("temperature");
    }
    return absl::OkStatus();
  }

  absl::Status AddDrafters(decode::DecodeLoop* loop) {
    decode::DraftModelOptions draft;
    draft.max_batch = loop_options_.scheduler.max_batch;
    std::unique_ptr<decode::ModelDrafter> drafter;
    if (!settings_.draft_model.empty()) {
      BATON_ASSIGN_OR_RETURN(
          drafter, decode::LoadDraftModel(draft, settings_.draft_model, worker_options_, host_));
    } else if (!settings_.copy.empty()) {
      BATON_ASSIGN_OR_RETURN(drafter,
                             decode::LoadLowBitCopy(draft, settings_.copy, worker_options_, host_));
    }
    if (drafter != nullptr) loop->AddDrafter(std::move(drafter));
    return absl::OkStatus();
  }

  // All requests, until each has its first token.
  absl::Status Start(decode::DecodeLoop* loop, std::vector<std::shared_ptr<Sink>>* sinks) {
    sinks->clear();
    for (const EngineRequest& request : requests_) {
      sinks->push_back(std::make_shared<Sink>());
      BATON_RETURN_IF_ERROR(loop->Open(request, true, sinks->back()).status());
    }
    const auto all_started = [&] {
      return std::all_of(sinks->begin(), sinks->end(),
                         [](const auto& sink) { return !sink->ids.empty(); });
    };
    while (!all_started()) loop->RunOnce(absl::ZeroDuration());
    return absl::OkStatus();
  }

  absl::StatusOr<Run> RunOnce(bool drafted) {
    decode::DecodeLoopOptions options = loop_options_;
    if (!drafted) options.speculation.max_drafts = 0;
    const auto metrics = base::Metrics::Create(base::Role::kDecode, "bench");
    decode::DecodeLoop loop(options, *host_.runner, *host_.tokenizer,
                            worker::WorkerMetrics(metrics.get()));
    if (drafted) {
      loop.set_step_cost(cost_);
      BATON_RETURN_IF_ERROR(AddDrafters(&loop));
    }
    // Once for nothing: a worker has learnt what its drafts are worth from other requests.
    std::vector<std::shared_ptr<Sink>> sinks;
    BATON_RETURN_IF_ERROR(Start(&loop, &sinks));
    while (loop.RunOnce(absl::ZeroDuration())) {
    }
    const base::CounterId drafting[] = {base::CounterId::kSpecDecodeDrafts,
                                        base::CounterId::kSpecDecodeDraftTokens,
                                        base::CounterId::kSpecDecodeAcceptedTokens};
    double before[3];
    for (int i = 0; i < 3; ++i) before[i] = metrics->counter(drafting[i]).value();
    BATON_RETURN_IF_ERROR(Start(&loop, &sinks));
    const auto gaps = metrics->histogram(base::HistogramId::kStepGap);
    const double gap_before = gaps.sum();
    const size_t tokens_before = CountTokens(sinks);
    const uint64_t steps_before = gaps.count();
    const double start = Now();
    const double cpu_start = CpuNow();
    while (loop.RunOnce(absl::ZeroDuration())) {
    }
    const double seconds = Now() - start;
    const double cpu_seconds = CpuNow() - cpu_start;
    const auto tokens = static_cast<double>(CountTokens(sinks) - tokens_before);
    Run run;
    run.tokens_per_second = tokens / seconds;
    run.tokens_per_cpu_second = tokens / cpu_seconds;
    run.gap_share = (gaps.sum() - gap_before) / seconds;
    run.steps = static_cast<double>(gaps.count() - steps_before);
    double* const counted[] = {&run.drafts, &run.draft_tokens, &run.accepted};
    for (int i = 0; i < 3; ++i) *counted[i] = metrics->counter(drafting[i]).value() - before[i];
    for (const auto& sink : sinks) {
      BATON_RETURN_IF_ERROR(sink->status);
      run.ids.push_back(sink->ids);
    }
    return run;
  }

  static size_t CountTokens(const std::vector<std::shared_ptr<Sink>>& sinks) {
    size_t tokens = 0;
    for (const auto& sink : sinks) tokens += sink->ids.size();
    return tokens;
  }

  Settings settings_;
  worker::WorkerOptions worker_options_;
  decode::DecodeLoopOptions loop_options_;
  worker::EngineHost host_;
  decode::StepCost cost_;
  std::vector<EngineRequest> requests_;
};

bool Parse(int argc, char** argv, Settings* settings) {
  if (argc < 3) return false;
  settings->model = argv[1];
  settings->prompts = argv[2];
  const std::map<std::string, int*> numbers = {{"ngram", &settings->ngram},
                                               {"batch", &settings->batch},
                                               {"tokens", &settings->tokens},
                                               {"pairs", &settings->pairs},
                                               {"threads", &settings->threads}};
  const std::map<std::string, std::string*> names = {{"weights", &settings->weights},
                                                     {"draft_model", &settings->draft_model},
                                                     {"copy", &settings->copy},
                                                     {"isa", &settings->isa},
                                                     {"temperature", &settings->temperature}};
  for (int i = 3; i < argc; ++i) {
    const std::vector<std::string> sides = absl::StrSplit(argv[i], absl::MaxSplits('=', 1));
    if (sides.size() != 2) return false;
    if (const auto number = numbers.find(sides[0]); number != numbers.end()) {
      if (!absl::SimpleAtoi(sides[1], number->second) || *number->second < 0) return false;
    } else if (const auto name = names.find(sides[0]); name != names.end()) {
      *name->second = sides[1];
    } else {
      return false;
    }
  }
  return settings->batch > 0 && settings->tokens > 1;
}

absl::Status Main(const Settings& settings) {
  Bench bench;
  BATON_RETURN_IF_ERROR(bench.Init(settings));
  return bench.Measure();
}

}  // namespace
}  // namespace baton::tests

int main(int argc, char** argv) {
  baton::tests::Settings settings;
  if (!baton::tests::Parse(argc, argv, &settings)) {
    std::fprintf(stderr, "usage: speculation_bench MODEL PROMPTS [name=value...]\n");
    return 2;
  }
  const absl::Status status = baton::tests::Main(settings);
  if (!status.ok())
    std::fprintf(stderr, "speculation_bench: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
