// Whole models on the device: their ids, and what a prompt and a step take.

#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/base/clock.h"
#include "engine/base/status_macros.h"
#include "engine/runtime/model_runner.h"
#include "engine/runtime/step_sampler.h"
#include "tests/device/device_bench.h"
#include "tests/device/floors.h"

namespace baton::device {
namespace {

using runtime::ModelRunner;
using runtime::ModelRunnerOptions;

struct ShapeOf {
  const char* name;
  int layers, hidden, heads, kv_heads, head_dim, ffn, vocab, context;
};
constexpr ShapeOf kShapes[] = {{"qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151936, 40960},
                               {"qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, 40960},
                               {"tiny", 2, 128, 2, 1, 128, 128, 64, 512}};

absl::StatusOr<std::string> WriteConfig(const std::string& name) {
  const auto* shape = std::find_if(std::begin(kShapes), std::end(kShapes),
                                   [&](const ShapeOf& s) { return name == s.name; });
  if (shape == std::end(kShapes))
    return absl::InvalidArgumentError(absl::StrCat("--shape=", name, ": not known"));
  std::string folder = (std::filesystem::temp_directory_path() / "baton_shape.XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) return absl::InternalError("no folder for the config");
  const Json config = {{"architectures", {"Qwen3ForCausalLM"}},
                       {"model_type", "qwen3"},
                       {"hidden_act", "silu"},
                       {"hidden_size", shape->hidden},
                       {"num_hidden_layers", shape->layers},
                       {"num_attention_heads", shape->heads},
                       {"num_key_value_heads", shape->kv_heads},
                       {"head_dim", shape->head_dim},
                       {"intermediate_size", shape->ffn},
                       {"vocab_size", shape->vocab},
                       {"max_position_embeddings", shape->context},
                       {"rms_norm_eps", 1e-6},
                       {"rope_theta", 1e6},
                       {"tie_word_embeddings", false},
                       {"eos_token_id", 1}};
  std::ofstream(folder + "/config.json") << config.dump();
  return folder;
}

// Sequences that each have blocks of their own. Tokens are drawn as a worker draws them, by the
// usual filters.
class Sequences {
 public:
  Sequences(ModelRunner* runner, int count, int tokens_each)
      : runner_(*runner), sampler_(*runner, runner->config().vocab) {
    params_.temperature = 0.7f;
    params_.top_p = 0.9f;
    const int blocks = kv::BlocksFor(tokens_each);
    for (int s = 0; s < count; ++s) {
      std::vector<kv::BlockId>& table = tables_.emplace_back(blocks);
      std::iota(table.begin(), table.end(), s * blocks);
    }
  }

  // Computes `count` tokens of one sequence from `start` on; may draw a token behind the last.
  absl::Status Prefill(int sequence, int start, int count, bool draw) {
    std::vector<uint32_t> ids(count);
    for (int i = 0; i < count; ++i) ids[i] = Id(start + i);
    const std::vector<int> last = {count - 1}, none;
    return Step({{ids, start, tables_[sequence], draw ? last : none}}, draw ? 1 : 0);
  }

  // One more token of each.
  absl::Status Decode(int context) {
    const std::vector<uint32_t> id = {Id(context)};
    const std::vector<int> row = {0};
    std::vector<runtime::StepSequence> parts;
    for (const auto& table : tables_) parts.push_back({id, context, table, row});
    return Step(parts, static_cast<int>(parts.size()));
  }

 private:
  absl::Status Step(const std::vector<runtime::StepSequence>& parts, int rows) {
    const runtime::DrawSite site = {params_, 0, 0, 0, no_counts_};
    sampler_.Begin();
    for (int row = 0; row < rows; ++row) sampler_.Add(site);
    BATON_RETURN_IF_ERROR(sampler_.Step(parts, nullptr, nullptr));
    for (int row = 0; row < rows; ++row) BATON_RETURN_IF_ERROR(sampler_.Draw(row, site).status());
    return absl::OkStatus();
  }
  uint32_t Id(int position) const {
    return static_cast<uint32_t>(position * 7919 + 13) %
           static_cast<uint32_t>(runner_.config().vocab);
  }

  ModelRunner& runner_;
  runtime::StepSampler sampler_;
  runtime::SamplingParams params_;
  const runtime::TokenCounts no_counts_;
  std::vector<std::vector<kv::BlockId>> tables_;
};

constexpr int kChunk = 8192;

absl::Status Fill(Sequences* sequences, int sequence, int tokens, int chunk, bool draw) {
  for (int start = 0; start < tokens; start += chunk) {
    const int count = std::min(chunk, tokens - start);
    BATON_RETURN_IF_ERROR(
        sequences->Prefill(sequence, start, count, draw && start + count == tokens));
  }
  return absl::OkStatus();
}

absl::StatusOr<Json> TimePrompts(ModelRunner* runner, const BenchOptions& options, bool fp8) {
  const ModelCost cost = CostOf(runner->config());
  const std::vector<int> lengths =
      options.tiny ? std::vector<int>{64} : std::vector<int>{1024, 4096, 16384, 32768};
  Json rows = Json::array();
  for (const int length : lengths) {
    Sequences sequences(runner, 1, length);
    const int chunk = options.tiny ? 32 : kChunk;
    BATON_ASSIGN_OR_RETURN(const double seconds,
                           MedianSeconds(options.tiny ? 1 : 3, [&]() -> absl::Status {
                             return Fill(&sequences, 0, length, chunk, true);
                           }));
    const double floor = PrefillFloor(cost, length, fp8);
    rows.push_back({{"tokens", length},
                    {"ms", seconds * 1e3},
                    {"floor_ms", floor * 1e3},
                    {"percent_of_floor", 100 * floor / seconds}});
  }
  return rows;
}

absl::StatusOr<Json> TimeSteps(ModelRunner* runner, const BenchOptions& options, bool fp8) {
  const ModelCost cost = CostOf(runner->config());
  const int context = options.tiny ? 65 : 2048, steps = options.tiny ? 2 : 24;
  const std::vector<int> batches =
      options.tiny ? std::vector<int>{1, 2} : std::vector<int>{1, 16, 64};
  Json rows = Json::array();
  for (const int batch : batches) {
    Sequences sequences(runner, batch, context + steps + 2);
    for (int s = 0; s < batch; ++s)
      BATON_RETURN_IF_ERROR(Fill(&sequences, s, context, options.tiny ? 32 : kChunk, false));
    int at = context;
    BATON_ASSIGN_OR_RETURN(const double seconds, MedianSeconds(steps, [&]() -> absl::Status {
                             return sequences.Decode(at++);
                           }));
    const double floor = DecodeFloor(cost, batch, context, fp8);
    rows.push_back({{"batch", batch},
                    {"context", context},
                    {"ms", seconds * 1e3},
                    {"floor_ms", floor * 1e3},
                    {"percent_of_floor", 100 * floor / seconds}});
  }
  return rows;
}

struct Greedy {
  std::vector<uint32_t> ids;
  std::vector<std::vector<float>> logits;  // of each id
};

absl::StatusOr<Greedy> Generate(const std::string& model, const std::string& backend, int count) {
  ModelRunnerOptions options;
  options.model_path = model;
  options.backend = backend;
  options.weight_dtype = "bf16";
  options.num_blocks = 4;
  options.backend_options.prefill_attention = "own";  // the other one rounds more
  BATON_ASSIGN_OR_RETURN(const std::unique_ptr<ModelRunner> runner, ModelRunner::Create(options));
  Greedy greedy;
  std::vector<uint32_t> tokens;
  for (uint32_t i = 0; i < 24; ++i) tokens.push_back((i * 97 + 300) % runner->config().vocab);
  const std::vector<kv::BlockId> blocks = {0, 1, 2, 3};
  int start = 0;
  for (int i = 0; i < count; ++i) {
    const std::vector<int> rows = {static_cast<int>(tokens.size()) - 1};
    absl::Span<float> logits;
    BATON_RETURN_IF_ERROR(runner->Step({{tokens, start, blocks, rows}}, nullptr, &logits, nullptr));
    start += static_cast<int>(tokens.size());
    greedy.logits.emplace_back(logits.begin(), logits.end());
    greedy.ids.push_back(
        static_cast<uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    tokens = {greedy.ids.back()};
  }
  return greedy;
}

}  // namespace

absl::StatusOr<Json> Ids(const BenchOptions& options) {
  const std::string model = options.models + "/tiny-qwen3";
  const int count = options.tiny ? 8 : 64;
  BATON_ASSIGN_OR_RETURN(const Greedy cpu, Generate(model, "cpu", count));
  BATON_ASSIGN_OR_RETURN(const Greedy cuda, Generate(model, "cuda", count));
  Json json = {{"count", count}, {"equal", cpu.ids == cuda.ids}};
  const auto parted = std::mismatch(cpu.ids.begin(), cpu.ids.end(), cuda.ids.begin()).first;
  if (parted == cpu.ids.end()) return json;
  // Behind the first difference the two say different texts. There, the two best must be closer
  // than the backends' logits are to each other.
  const size_t at = parted - cpu.ids.begin();
  const std::vector<float>&a = cpu.logits[at], &b = cuda.logits[at];
  float largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  const float gap = a[cpu.ids[at]] - a[cuda.ids[at]];
  json["first_difference"] = at;
  json["gap"] = gap;
  json["largest_logit_difference"] = largest;
  json["ok"] = gap <= 2 * largest && largest < 1;
  return json;
}

absl::StatusOr<Json> Model(const BenchOptions& options) {
  BATON_ASSIGN_OR_RETURN(const std::string folder, WriteConfig(options.shape));
  ModelRunnerOptions runner_options;
  runner_options.model_path = folder;
  runner_options.dummy_weights = true;
  runner_options.backend = "cuda";
  runner_options.weight_dtype = options.weight_dtype;
  runner_options.kv_dtype = "fp8";
  runner_options.backend_options.prefill_attention = options.prefill_attention;
  runner_options.max_step_tokens = options.tiny ? 32 : kChunk;
  // 64 sequences of 2,048 tokens and the steps behind them.
  runner_options.num_blocks = options.tiny ? 8 : 64 * 34;
  const absl::Duration start = base::Clock::Real().Now();
  absl::StatusOr<std::unique_ptr<ModelRunner>> runner = ModelRunner::Create(runner_options);
  std::filesystem::remove_all(folder);
  BATON_RETURN_IF_ERROR(runner.status());
  const double load_seconds = absl::ToDoubleSeconds(base::Clock::Real().Now() - start);
  const bool fp8 = options.weight_dtype == "fp8";
  Json json = {{"shape", options.shape},
               {"weight_dtype", options.weight_dtype},
               {"kv_dtype", "fp8"},
               {"backend", (*runner)->device()},
               {"load_seconds", load_seconds}};
  BATON_ASSIGN_OR_RETURN(json["ttft"], TimePrompts(runner->get(), options, fp8));
  BATON_ASSIGN_OR_RETURN(json["itl"], TimeSteps(runner->get(), options, fp8));
  return json;
}

}  // namespace baton::device
