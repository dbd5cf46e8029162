#include "engine/base/metrics_compat.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"

#include "engine/base/metrics_text.h"

namespace baton::base {
namespace {

using Bounds = std::vector<double>;

// Boundaries of vLLM's histograms.
const Bounds& TtftBounds() {
  static const auto* const kBounds =
      new Bounds{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
                 1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640, 2560};
  return *kBounds;
}
const Bounds& ItlBounds() {
  static const auto* const kBounds = new Bounds{.01, .025, .05, .075, .1,  .15, .2, .3, .4, .5,
                                                .75, 1,    2.5, 5,    7.5, 10,  20, 40, 80};
  return *kBounds;
}
const Bounds& PhaseBounds() {
  static const auto* const kBounds = new Bounds{.3, .5, .8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                                30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
  return *kBounds;
}
const Bounds& TransferBounds() {
  static const auto* const kBounds =
      new Bounds{.005, .01, .025, .05, .075, .1, .2, .3, .5, .75, 1, 5};
  return *kBounds;
}
// All boundaries of ours are theirs too.
const Bounds& SameBounds() {
  static const auto* const kBounds = new Bounds{};
  return *kBounds;
}

// One alias. Series of `from` are added up by the new value of one label, or all into one.
struct Alias {
  const char* from;
  const char* to;
  // "label=ours:theirs,ours:theirs": series by this label, under another value; other values are
  // left out. "label": values stay as they are. Several with blanks between. "": one series.
  const char* labels = "";
  // "label=value": only series that carry it.
  const char* only = "";
  const Bounds& (*bounds)() = &SameBounds;
};

constexpr Alias kAliases[] = {
    {"baton_requests_running", "vllm:num_requests_running"},
    {"baton_requests_waiting", "vllm:num_requests_waiting"},
    {"baton_router_requests_in_flight", "vllm:num_requests_running"},
    {"baton_router_queue_depth", "vllm:num_requests_waiting"},
    {"baton_requests_waiting_by_reason", "vllm:num_requests_waiting_by_reason",
     "reason=capacity:capacity,kv_blocks:capacity,kv_transfer:deferred,grammar:deferred"},
    {"baton_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc"},
    {"baton_kv_cache_info", "vllm:cache_config_info", "block_size num_blocks>num_gpu_blocks"},
    {"baton_prefix_cache_queries_total", "vllm:prefix_cache_queries_total"},
    {"baton_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"},
    {"baton_preemptions_total", "vllm:num_preemptions_total"},
    {"baton_prompt_tokens_total", "vllm:prompt_tokens_total"},
    {"baton_generation_tokens_total", "vllm:generation_tokens_total"},
    {"baton_requests_finished_total", "vllm:request_success_total",
     "finished_reason=stop:stop,length:length,abort:abort"},
    {"baton_nan_logits_total", "vllm:corrupted_requests_total"},
    {"baton_time_to_first_token_seconds", "vllm:time_to_first_token_seconds", "", "", &TtftBounds},
    {"baton_router_time_to_first_token_seconds", "vllm:time_to_first_token_seconds", "", "",
     &TtftBounds},
    {"baton_inter_token_latency_seconds", "vllm:inter_token_latency_seconds", "", "", &ItlBounds},
    {"baton_router_inter_token_latency_seconds", "vllm:inter_token_latency_seconds", "", "",
     &ItlBounds},
    {"baton_request_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds",
     "", "", &ItlBounds},
    {"baton_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds", "", "", &PhaseBounds},
    {"baton_router_request_duration_seconds", "vllm:e2e_request_latency_seconds", "", "",
     &PhaseBounds},
    {"baton_request_queue_time_seconds", "vllm:request_queue_time_seconds", "", "", &PhaseBounds},
    {"baton_request_prefill_time_seconds", "vllm:request_prefill_time_seconds", "", "",
     &PhaseBounds},
    {"baton_request_decode_time_seconds", "vllm:request_decode_time_seconds", "", "", &PhaseBounds},
    {"baton_request_inference_time_seconds", "vllm:request_inference_time_seconds", "", "",
     &PhaseBounds},
    {"baton_request_prompt_tokens", "vllm:request_prompt_tokens"},
    {"baton_request_generation_tokens", "vllm:request_generation_tokens"},
    {"baton_request_params_max_tokens", "vllm:request_params_max_tokens"},
    {"baton_iteration_tokens", "vllm:iteration_tokens_total"},
    {"baton_spec_decode_drafts_total", "vllm:spec_decode_num_drafts_total"},
    {"baton_spec_decode_draft_tokens_total", "vllm:spec_decode_num_draft_tokens_total"},
    {"baton_spec_decode_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"},
    {"baton_spec_decode_accepted_tokens_per_pos_total",
     "vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"},
    {"baton_kv_transfer_duration_seconds", "vllm:nixl_xfer_time_seconds", "", "direction=recv",
     &TransferBounds},
    {"baton_kv_transfer_bytes", "vllm:nixl_bytes_transferred", "", "direction=recv"},
    {"baton_kv_transfer_failures_total", "vllm:nixl_num_failed_transfers_total"},
    {"baton_kv_reservation_expired_total", "vllm:nixl_num_kv_expired_reqs_total"},
};

// One label of an alias, taken apart.
struct LabelRule {
  std::string name, new_name;
  std::map<std::string, std::string> values;  // empty: they stay as they are
};

std::vector<LabelRule> ParseRules(absl::string_view text) {
  std::vector<LabelRule> rules;
  for (absl::string_view part : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> sides = absl::StrSplit(part, absl::MaxSplits('=', 1));
    const std::vector<std::string> names = absl::StrSplit(sides.first, '>');
    LabelRule rule{names.front(), names.back(), {}};
    for (absl::string_view pair : absl::StrSplit(sides.second, ',', absl::SkipEmpty())) {
      const std::pair<std::string, std::string> value = absl::StrSplit(pair, ':');
      rule.values.insert(value);
    }
    rules.push_back(std::move(rule));
  }
  return rules;
}

// "label=value", as one of `labels`.
bool Carries(const prometheus::Labels& labels, absl::string_view only) {
  if (only.empty()) return true;
  const std::pair<std::string, std::string> sides = absl::StrSplit(only, '=');
  const auto found = labels.find(sides.first);
  return found != labels.end() && found->second == sides.second;
}

// Adds the labels of the alias that a series with `labels` goes to; false: it goes to none.
bool AppendNewLabels(const prometheus::Labels& labels,
                     const std::vector<LabelRule>& rules,
                     std::string* text) {
  for (const LabelRule& rule : rules) {
    const auto value = labels.find(rule.name);
    if (value == labels.end()) return false;
    const auto mapped = rule.values.find(value->second);
    if (!rule.values.empty() && mapped == rule.values.end()) return false;
    AppendLabel(rule.new_name, rule.values.empty() ? value->second : mapped->second, text);
  }
  return true;
}

}  // namespace

std::optional<SeriesAlias> VllmAlias(absl::string_view name, const std::string& model_name) {
  const auto* const alias = std::find_if(std::begin(kAliases), std::end(kAliases),
                                         [name](const Alias& a) { return name == a.from; });
  if (alias == std::end(kAliases)) return std::nullopt;
  std::string constant;
  AppendLabel("engine", "0", &constant);
  AppendLabel("model_name", model_name, &constant);
  return SeriesAlias{alias->to, alias->bounds(),
                     [constant, rules = ParseRules(alias->labels), only = alias->only](
                         const prometheus::Labels& labels) -> std::optional<std::string> {
                       std::string text = constant;
                       if (!Carries(labels, only) || !AppendNewLabels(labels, rules, &text))
                         return std::nullopt;
                       return text;
                     }};
}

}  // namespace baton::base
