#include "engine/base/metrics_compat.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace baton::base {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

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

const std::string* FindLabel(const ClientMetric& metric, absl::string_view name) {
  for (const ClientMetric::Label& label : metric.label) {
    if (label.name == name) return &label.value;
  }
  return nullptr;
}

bool Carries(const ClientMetric& metric, absl::string_view only) {
  if (only.empty()) return true;
  const std::pair<std::string, std::string> sides = absl::StrSplit(only, '=');
  const std::string* const value = FindLabel(metric, sides.first);
  return value != nullptr && *value == sides.second;
}

// The labels of the alias that `metric` goes to; false: to none.
bool NewLabels(const ClientMetric& metric,
               const std::vector<LabelRule>& rules,
               std::vector<ClientMetric::Label>* labels) {
  for (const LabelRule& rule : rules) {
    const std::string* const value = FindLabel(metric, rule.name);
    if (value == nullptr) return false;
    const auto found = rule.values.find(*value);
    if (!rule.values.empty() && found == rule.values.end()) return false;
    labels->push_back({rule.new_name, rule.values.empty() ? *value : found->second});
  }
  return true;
}

bool IsKept(double bound, const Bounds& bounds) {
  return bounds.empty() || std::isinf(bound) ||
         std::find(bounds.begin(), bounds.end(), bound) != bounds.end();
}

void AddHistogram(const ClientMetric::Histogram& from,
                  const Bounds& bounds,
                  ClientMetric::Histogram* to) {
  const bool first = to->bucket.empty();
  size_t i = 0;
  for (const ClientMetric::Bucket& bucket : from.bucket) {
    if (!IsKept(bucket.upper_bound, bounds)) continue;
    if (first) to->bucket.push_back({0, bucket.upper_bound});
    to->bucket[i++].cumulative_count += bucket.cumulative_count;
  }
  to->sample_count += from.sample_count;
  to->sample_sum += from.sample_sum;
}

// By place in kAliases.
const std::vector<std::vector<LabelRule>>& AliasRules() {
  static const auto* const kRules = [] {
    auto* const rules = new std::vector<std::vector<LabelRule>>();
    for (const Alias& alias : kAliases) rules->push_back(ParseRules(alias.labels));
    return rules;
  }();
  return *kRules;
}

MetricFamily Translate(const MetricFamily& family,
                       const Alias& alias,
                       const std::vector<LabelRule>& rules,
                       const std::string& model_name) {
  MetricFamily out{alias.to, family.help, family.type, {}};
  for (const ClientMetric& metric : family.metric) {
    std::vector<ClientMetric::Label> labels = {{"engine", "0"}, {"model_name", model_name}};
    if (!Carries(metric, alias.only) || !NewLabels(metric, rules, &labels)) continue;
    auto found = std::find_if(out.metric.begin(), out.metric.end(),
                              [&](const ClientMetric& m) { return m.label == labels; });
    if (found == out.metric.end()) {
      found = out.metric.emplace(out.metric.end());
      found->label = std::move(labels);
    }
    found->counter.value += metric.counter.value;
    found->gauge.value += metric.gauge.value;
    if (family.type == MetricType::Histogram)
      AddHistogram(metric.histogram, alias.bounds(), &found->histogram);
  }
  return out;
}

}  // namespace

bool HasVllmAlias(absl::string_view name) {
  return std::any_of(std::begin(kAliases), std::end(kAliases),
                     [name](const Alias& alias) { return name == alias.from; });
}

std::vector<MetricFamily> VllmAliases(const std::vector<MetricFamily>& families,
                                      const std::string& model_name) {
  std::vector<MetricFamily> out;
  for (size_t i = 0; i < std::size(kAliases); ++i) {
    for (const MetricFamily& family : families) {
      if (family.name != kAliases[i].from) continue;
      out.push_back(Translate(family, kAliases[i], AliasRules()[i], model_name));
    }
  }
  return out;
}

}  // namespace baton::base
