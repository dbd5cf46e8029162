#include "engine/base/metrics.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"

#include "engine/base/log.h"
#include "engine/base/metrics_compat.h"
#include "engine/base/metrics_series.h"
#include "engine/base/process_stats.h"

namespace baton::base {
namespace {

constexpr unsigned kRouter = 1u << static_cast<int>(Role::kRouter);
constexpr unsigned kPrefill = 1u << static_cast<int>(Role::kPrefill);
constexpr unsigned kDecode = 1u << static_cast<int>(Role::kDecode);
constexpr unsigned kWorkers = kPrefill | kDecode;
constexpr unsigned kAll = kRouter | kWorkers;

using Buckets = std::vector<double>;

// What a page may grow by until the next scrape, and the head that goes before it.
constexpr size_t kPageSlackBytes = size_t{8} << 10;

// The boundaries of vLLM and OpenTelemetry are among ours, so that their histograms can be derived
// exactly; the others resolve what is fast.
const Buckets& TtftBuckets() {
  static const auto* const kBuckets =
      new Buckets{.001, .0025, .005, .01, .02, .03, .04, .06, .08, .1, .15, .25, .35,
                  .5,   .75,   1,    2.5, 5,   7.5, 10,  20,  40,  80, 160, 640, 2560};
  return *kBuckets;
}
const Buckets& ItlBuckets() {
  static const auto* const kBuckets = new Buckets{
      .0005, .001, .002, .003, .004, .005, .006, .008, .01, .0125, .015, .02, .025, .03, .04, .05,
      .075,  .1,   .15,  .2,   .3,   .4,   .5,   .75,  1,   2.5,   5,    7.5, 10,   20,  40,  80};
  return *kBuckets;
}
const Buckets& OverheadBuckets() {
  static const auto* const kBuckets =
      new Buckets{1e-5,   2e-5, 3e-5, 5e-5, .000075, .0001, .00015, .0002, .0003, .0005,
                  .00075, .001, .002, .005, .01,     .05,   .1,     .5,    2};
  return *kBuckets;
}
// From what takes microseconds at best to what may take minutes.
const Buckets& FineBuckets() {
  static const auto* const kBuckets =
      new Buckets{1e-5, 3e-5, 1e-4, 2e-4, 5e-4, .001, .002, .005, .01, .02, .05,
                  .1,   .2,   .5,   1,    2,    5,    10,   20,   60,  300};
  return *kBuckets;
}
const Buckets& PhaseBuckets() {
  static const auto* const kBuckets =
      new Buckets{.001, .005, .01, .02, .04, .08, .16, .3, .5,  .8,  1,   1.5, 2,    2.5,
                  5,    10,   15,  20,  30,  40,  50,  60, 120, 240, 480, 960, 1920, 7680};
  return *kBuckets;
}
const Buckets& TransferSecondsBuckets() {
  static const auto* const kBuckets =
      new Buckets{.0002, .0005, .001, .002, .005, .01, .025, .05, .075, .1, .2, .3, .5, .75, 1, 5};
  return *kBuckets;
}
// 2^11 to 2^33 in steps of 4.
const Buckets& BytesBuckets() {
  static const auto* const kBuckets =
      new Buckets{2048,    8192,     32768,     131072,    524288,     2097152,
                  8388608, 33554432, 134217728, 536870912, 2147483648, 8589934592};
  return *kBuckets;
}
const Buckets& TokensBuckets() {
  static const auto* const kBuckets =
      new Buckets{1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5};
  return *kBuckets;
}

// One and more than kMaxDrafts of the decode worker.
const Buckets& AcceptLengthBuckets() {
  static const auto* const kBuckets = new Buckets{1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16};
  return *kBuckets;
}

struct Label {
  std::string name;
  std::vector<std::string> values;  // empty: open
};

struct MetricDef {
  const char* name;
  unsigned roles;
  const char* labels;
  const char* help;
  const Buckets& (*buckets)();
};

constexpr auto kOverhead = &OverheadBuckets;
constexpr auto kFine = &FineBuckets;
constexpr auto kTtft = &TtftBuckets;
constexpr auto kItl = &ItlBuckets;
constexpr auto kPhase = &PhaseBuckets;
constexpr auto kTransferSeconds = &TransferSecondsBuckets;
constexpr auto kBytes = &BytesBuckets;
constexpr auto kTokens = &TokensBuckets;
constexpr auto kAcceptLength = &AcceptLengthBuckets;

#define BATON_PLAIN_(id, name, roles, labels, help) {name, roles, labels, help, nullptr},
#define BATON_HISTOGRAM_(id, name, roles, labels, buckets, help) \
  {name, roles, labels, help, buckets},
constexpr MetricDef kCounters[] = {BATON_COUNTERS(BATON_PLAIN_)};
constexpr MetricDef kGauges[] = {BATON_GAUGES(BATON_PLAIN_)};
constexpr MetricDef kHistograms[] = {BATON_HISTOGRAMS(BATON_HISTOGRAM_)};
#undef BATON_PLAIN_
#undef BATON_HISTOGRAM_

std::vector<Label> ParseLabels(absl::string_view spec) {
  std::vector<Label> labels;
  for (absl::string_view part : absl::StrSplit(spec, ' ', absl::SkipEmpty())) {
    std::vector<std::string> sides = absl::StrSplit(part, absl::MaxSplits('=', 1));
    Label label{sides[0], {}};
    if (sides.size() == 2) label.values = absl::StrSplit(sides[1], '|');
    labels.push_back(std::move(label));
  }
  return labels;
}

// One metric: its family in the registry, and the series found or made in it.
template <typename Impl>
struct Family {
  std::vector<Label> labels;
  prometheus::Family<Impl>* family = nullptr;  // null: this role does not export it
  std::unique_ptr<SeriesTable<Impl>> series;   // of that family
  const MetricDef* def = nullptr;

  SeriesCell<Impl>* Series(absl::Span<const absl::string_view> values) {
    BATON_CHECK(family != nullptr, "metric of another role: ", def->name);
    return series->Add(LabelMap(values));
  }

  prometheus::Labels LabelMap(absl::Span<const absl::string_view> values) const {
    BATON_CHECK(values.size() == labels.size(), "labels of ", def->name);
    prometheus::Labels map;
    for (size_t i = 0; i < labels.size(); ++i) {
      const auto& closed = labels[i].values;
      BATON_CHECK(
          closed.empty() || std::find(closed.begin(), closed.end(), values[i]) != closed.end(),
          "label of ", def->name, ": ", labels[i].name, "=", values[i]);
      map[labels[i].name] = std::string(values[i]);
    }
    return map;
  }

  // Makes every series of a metric without open labels.
  void AddClosedSeries(std::vector<absl::string_view>* prefix) {
    if (prefix->size() == labels.size()) {
      Series(*prefix);
      return;
    }
    for (const std::string& value : labels[prefix->size()].values) {
      prefix->push_back(value);
      AddClosedSeries(prefix);
      prefix->pop_back();
    }
  }
};

template <typename Impl>
prometheus::Family<Impl>& Register(const MetricDef& def,
                                   const prometheus::Labels& constant,
                                   prometheus::Registry* registry) {
  if constexpr (std::is_same_v<Impl, prometheus::Counter>) {
    return prometheus::BuildCounter().Name(def.name).Help(def.help).Labels(constant).Register(
        *registry);
  } else if constexpr (std::is_same_v<Impl, prometheus::Gauge>) {
    return prometheus::BuildGauge().Name(def.name).Help(def.help).Labels(constant).Register(
        *registry);
  } else {
    return prometheus::BuildHistogram().Name(def.name).Help(def.help).Labels(constant).Register(
        *registry);
  }
}

template <typename Impl, size_t N>
std::vector<Family<Impl>> MakeFamilies(const MetricDef (&defs)[N],
                                       Role role,
                                       const prometheus::Labels& constant,
                                       prometheus::Registry* registry) {
  std::vector<Family<Impl>> families(N);
  for (size_t i = 0; i < N; ++i) {
    families[i].def = &defs[i];
    if ((defs[i].roles & (1u << static_cast<int>(role))) == 0) continue;
    families[i].labels = ParseLabels(defs[i].labels);
    families[i].family = &Register<Impl>(defs[i], constant, registry);
    families[i].series = std::make_unique<SeriesTable<Impl>>(
        families[i].family, defs[i].help,
        defs[i].buckets == nullptr ? Buckets{} : defs[i].buckets());
    std::vector<absl::string_view> prefix;
    families[i].AddClosedSeries(&prefix);
  }
  return families;
}

}  // namespace

absl::string_view RoleName(Role role) {
  switch (role) {
    case Role::kRouter:
      return "router";
    case Role::kPrefill:
      return "prefill";
    case Role::kDecode:
      return "decode";
  }
  return "unknown";
}

void Counter::Increment(double by) const {
  if (cell_ != nullptr) cell_->impl->Increment(by);
}
double Counter::value() const { return cell_ == nullptr ? 0 : cell_->impl->Value(); }

void Gauge::Set(double value) const {
  if (cell_ != nullptr) cell_->impl->Set(value);
}
void Gauge::Add(double by) const {
  if (cell_ != nullptr) cell_->impl->Increment(by);
}
double Gauge::value() const { return cell_ == nullptr ? 0 : cell_->impl->Value(); }

void Histogram::Observe(double value) const {
  if (cell_ == nullptr) return;
  cell_->impl->Observe(value);
  cell_->changes.fetch_add(1, std::memory_order_release);
}
uint64_t Histogram::count() const {
  return cell_ == nullptr ? 0 : cell_->impl->Collect().histogram.sample_count;
}
double Histogram::sum() const {
  return cell_ == nullptr ? 0 : cell_->impl->Collect().histogram.sample_sum;
}

struct Metrics::Impl {
  Role role;
  std::string model_name;
  prometheus::Registry registry;
  std::vector<Family<prometheus::Counter>> counters;
  std::vector<Family<prometheus::Gauge>> gauges;
  std::vector<Family<prometheus::Histogram>> histograms;
  // A page is about as long as the one before.
  mutable std::atomic<size_t> page_bytes{size_t{128} << 10};

  // Each family that this role exports.
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    const auto visit_all = [&](const auto& families) {
      for (const auto& family : families) {
        if (family.series != nullptr) visit(family);
      }
    };
    visit_all(counters);
    visit_all(gauges);
    visit_all(histograms);
  }
};

std::unique_ptr<Metrics> Metrics::Create(Role role, absl::string_view model_name) {
  auto impl = std::make_unique<Impl>();
  impl->role = role;
  impl->model_name = std::string(model_name);
  const prometheus::Labels constant = {{"model_name", std::string(model_name)},
                                       {"role", std::string(RoleName(role))}};
  impl->counters = MakeFamilies<prometheus::Counter>(kCounters, role, constant, &impl->registry);
  impl->gauges = MakeFamilies<prometheus::Gauge>(kGauges, role, constant, &impl->registry);
  impl->histograms =
      MakeFamilies<prometheus::Histogram>(kHistograms, role, constant, &impl->registry);
  return std::unique_ptr<Metrics>(new Metrics(std::move(impl)));
}

Metrics::Metrics(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Metrics::~Metrics() = default;

Counter Metrics::counter(CounterId id, absl::Span<const absl::string_view> labels) {
  return Counter(impl_->counters[static_cast<size_t>(id)].Series(labels));
}
Gauge Metrics::gauge(GaugeId id, absl::Span<const absl::string_view> labels) {
  return Gauge(impl_->gauges[static_cast<size_t>(id)].Series(labels));
}
Histogram Metrics::histogram(HistogramId id, absl::Span<const absl::string_view> labels) {
  return Histogram(impl_->histograms[static_cast<size_t>(id)].Series(labels));
}

void Metrics::Remove(GaugeId id, absl::Span<const absl::string_view> labels) {
  Family<prometheus::Gauge>& family = impl_->gauges[static_cast<size_t>(id)];
  family.series->Remove(family.LabelMap(labels));
}

Role Metrics::role() const { return impl_->role; }

void Metrics::EnableVllmAliases() {
  impl_->ForEach([this](const auto& family) {
    std::optional<SeriesAlias> alias = VllmAlias(family.def->name, impl_->model_name);
    if (alias) family.series->SetAlias(*std::move(alias));
  });
}

std::string Metrics::Scrape() const {
  std::string out;
  out.reserve(impl_->page_bytes.load() + kPageSlackBytes);
  impl_->ForEach([&out](const auto& family) { family.series->AppendTo(&out); });
  AppendProcessStats(&out);
  impl_->ForEach([&out](const auto& family) { family.series->AppendAliasTo(&out); });
  impl_->page_bytes.store(out.size());
  return out;
}

std::string Metrics::ScrapeLite() const {
  static constexpr GaugeId kIds[] = {GaugeId::kRequestsRunning,        GaugeId::kRequestsWaiting,
                                     GaugeId::kKvCacheUsageRatio,      GaugeId::kKvCacheInfo,
                                     GaugeId::kRouterRequestsInFlight, GaugeId::kRouterQueueDepth,
                                     GaugeId::kRouterWorkers};
  std::string out;
  std::string aliases;
  for (const GaugeId id : kIds) {
    const auto& series = impl_->gauges[static_cast<size_t>(id)].series;
    if (series == nullptr) continue;
    series->AppendTo(&out);
    series->AppendAliasTo(&aliases);
  }
  return out + aliases;
}

}  // namespace baton::base
