#include "cli/bench_summary.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"

namespace baton::cli {
namespace {

using Json = nlohmann::ordered_json;

Json SampleJson(const Sample& sample) {
  return {{"mean", sample.mean()},        {"p50", sample.Percentile(50)},
          {"p90", sample.Percentile(90)}, {"p95", sample.Percentile(95)},
          {"p99", sample.Percentile(99)}, {"max", sample.max()},
          {"count", sample.count()}};
}

std::string Row(const char* name, const Sample& sample) {
  return absl::StrFormat("%-8s %9.4f %9.4f %9.4f %9.4f %9.4f %9.4f\n", name, sample.mean(),
                         sample.Percentile(50), sample.Percentile(90), sample.Percentile(95),
                         sample.Percentile(99), sample.max());
}

}  // namespace

void BenchRecord::Arrived(double at, uint32_t count) {
  if (count == 0) return;
  if (tokens == 0) {
    // Tokens that come with the first one have no gap of their own.
    first = at;
  } else {
    gaps.insert(gaps.end(), count, static_cast<float>((at - last) / count));
  }
  tokens += count;
  last = at;
}

void Sample::Add(double value) { values_.push_back(value); }

void Sample::Sort() { std::sort(values_.begin(), values_.end()); }

double Sample::mean() const {
  if (values_.empty()) return 0;
  return std::accumulate(values_.begin(), values_.end(), 0.0) / static_cast<double>(values_.size());
}

double Sample::Percentile(double percent) const {
  if (values_.empty()) return 0;
  const double rank = percent / 100 * static_cast<double>(values_.size() - 1);
  const auto below = static_cast<size_t>(rank);
  const size_t above = std::min(below + 1, values_.size() - 1);
  return values_[below] + (rank - std::floor(rank)) * (values_[above] - values_[below]);
}

BenchSummary Summarize(const std::vector<BenchRecord>& records, const Objectives& objectives) {
  BenchSummary out;
  out.objectives = objectives;
  out.requests = records.size();
  for (const BenchRecord& record : records) {
    ++out.codes[record.code];
    out.duration_s = std::max(out.duration_s, record.end);
    out.output_tokens += record.tokens;
    out.retries += record.retries;
    out.lag.Add(record.sent - record.due);
    if (!record.ok()) continue;
    ++out.completed;
    out.prompt_tokens += record.prompt_tokens;
    out.cached_tokens += record.cached_tokens;
    if (record.tokens != record.wanted_tokens) ++out.short_answers;
    if (record.tokens > 0) out.ttft.Add(record.ttft());
    out.e2e.Add(record.e2e());
    if (record.tokens > 1) out.tpot.Add(record.tpot());
    for (const float gap : record.gaps) out.itl.Add(gap);
    out.good += record.tokens == record.wanted_tokens &&
                (objectives.ttft_s <= 0 || record.ttft() <= objectives.ttft_s) &&
                (objectives.tpot_s <= 0 || record.tpot() <= objectives.tpot_s);
  }
  for (Sample* sample : {&out.ttft, &out.itl, &out.tpot, &out.e2e, &out.lag}) sample->Sort();
  return out;
}

std::string BenchJson(const BenchSetting& setting, const BenchSummary& s) {
  Json codes = Json::object();
  for (const auto& [code, count] : s.codes) codes[code] = count;
  const Json json = {{"address", setting.address},
                     {"model", setting.model},
                     {"load", setting.load},
                     {"seed", setting.seed},
                     {"requests", s.requests},
                     {"completed", s.completed},
                     {"short_answers", s.short_answers},
                     {"codes", codes},
                     {"retries", s.retries},
                     {"duration_s", s.duration_s},
                     {"prompt_tokens", s.prompt_tokens},
                     {"cached_prompt_tokens", s.cached_tokens},
                     {"output_tokens", s.output_tokens},
                     {"requests_per_s", s.PerSecond(s.completed)},
                     {"output_tokens_per_s", s.PerSecond(s.output_tokens)},
                     {"goodput",
                      {{"slo_ttft_s", s.objectives.ttft_s},
                       {"slo_tpot_s", s.objectives.tpot_s},
                       {"good", s.good},
                       {"share", s.good_share()},
                       {"requests_per_s", s.PerSecond(s.good)}}},
                     {"ttft_s", SampleJson(s.ttft)},
                     {"itl_s", SampleJson(s.itl)},
                     {"tpot_s", SampleJson(s.tpot)},
                     {"e2e_s", SampleJson(s.e2e)},
                     {"client_lag_s", SampleJson(s.lag)}};
  return json.dump(2, ' ', false, Json::error_handler_t::replace);
}

std::string BenchTable(const BenchSetting& setting, const BenchSummary& s) {
  std::string codes;
  for (const auto& [code, count] : s.codes) absl::StrAppend(&codes, "  ", code, " ", count);
  std::string out = absl::StrFormat(
      "%s  %s\nrequests %u  completed %u %s  retries %u\n"
      "%.1f s  %.2f requests/s  %.1f output tokens/s  prompt tokens %u (%u cached)\n"
      "goodput %.2f requests/s (%.1f %% within the objectives)\n",
      setting.model, setting.load, s.requests, s.completed, codes, s.retries, s.duration_s,
      s.PerSecond(s.completed), s.PerSecond(s.output_tokens), s.prompt_tokens, s.cached_tokens,
      s.PerSecond(s.good), 100 * s.good_share());
  if (s.short_answers > 0)
    absl::StrAppend(&out, "answers of another length than asked for: ", s.short_answers, "\n");
  absl::StrAppendFormat(&out, "%-8s %9s %9s %9s %9s %9s %9s\n", "seconds", "mean", "p50", "p90",
                        "p95", "p99", "max");
  absl::StrAppend(&out, Row("TTFT", s.ttft), Row("ITL", s.itl), Row("TPOT", s.tpot),
                  Row("e2e", s.e2e), Row("lag", s.lag));
  return out;
}

}  // namespace baton::cli
