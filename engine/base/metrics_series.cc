#include "engine/base/metrics_series.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"

#include "engine/base/metrics_text.h"

namespace baton::base {
namespace {

template <typename Impl>
constexpr bool kIsHistogram = std::is_same_v<Impl, prometheus::Histogram>;

template <typename Impl>
constexpr prometheus::MetricType kTypeOf =
    kIsHistogram<Impl>                          ? prometheus::MetricType::Histogram
    : std::is_same_v<Impl, prometheus::Counter> ? prometheus::MetricType::Counter
                                                : prometheus::MetricType::Gauge;

std::vector<std::string> BoundTails(std::vector<double> bounds) {
  bounds.push_back(std::numeric_limits<double>::infinity());
  std::vector<std::string> tails;
  for (const double bound : bounds) {
    AppendNumber(bound, &tails.emplace_back());
    tails.back() += "\"} ";
  }
  return tails;
}

// Those of the whole family first, as prometheus-cpp itself has it.
std::string LabelText(const prometheus::Labels& constant, const prometheus::Labels& own) {
  std::string text;
  for (const prometheus::Labels* labels : {&constant, &own}) {
    for (const auto& [name, value] : *labels) AppendLabel(name, value, &text);
  }
  return text;
}

}  // namespace

template <typename Impl>
SeriesTable<Impl>::SeriesTable(prometheus::Family<Impl>* family,
                               const std::string& help,
                               const std::vector<double>& bounds)
    : family_(family),
      bounds_(bounds),
      help_lines_(FamilyHead(family->GetName(), help, kTypeOf<Impl>)),
      bound_tails_(BoundTails(bounds)) {}

template <typename Impl>
Impl* SeriesTable<Impl>::FindOrMake(const prometheus::Labels& labels) {
  if constexpr (kIsHistogram<Impl>) {
    return &family_->Add(labels, bounds_);
  } else {
    return &family_->Add(labels);
  }
}

template <typename Impl>
Impl* SeriesTable<Impl>::Add(const prometheus::Labels& labels) {
  MutexLock lock(&mutex_);
  Impl* const impl = FindOrMake(labels);
  if (!known_.insert(impl).second) return impl;
  Series series{impl, LabelText(family_->GetConstantLabels(), labels), ""};
  const std::string& name = family_->GetName();
  if constexpr (kIsHistogram<Impl>) {
    series.head =
        absl::StrCat(name, "_bucket{", series.labels, series.labels.empty() ? "" : ",", "le=\"");
  } else {
    series.head = LineHead(name, "", series.labels);
  }
  series_.push_back(std::move(series));
  return impl;
}

template <typename Impl>
void SeriesTable<Impl>::Remove(const prometheus::Labels& labels) {
  MutexLock lock(&mutex_);
  Impl* const impl = FindOrMake(labels);
  std::erase_if(series_, [impl](const Series& series) { return series.impl == impl; });
  known_.erase(impl);
  family_->Remove(impl);
}

template <typename Impl>
void SeriesTable<Impl>::AppendTo(std::string* out) const {
  MutexLock lock(&mutex_);
  if (series_.empty()) return;
  out->append(help_lines_);
  for (const Series& series : series_) AppendSeries(series, out);
}

template <typename Impl>
void SeriesTable<Impl>::AppendSeries(const Series& series, std::string* out) const {
  if constexpr (kIsHistogram<Impl>) {
    const prometheus::ClientMetric::Histogram histogram = series.impl->Collect().histogram;
    const size_t num_buckets = std::min(histogram.bucket.size(), bound_tails_.size());
    for (size_t i = 0; i < num_buckets; ++i) {
      out->append(series.head);
      out->append(bound_tails_[i]);
      AppendCount(histogram.bucket[i].cumulative_count, out);
      out->push_back('\n');
    }
    out->append(LineHead(family_->GetName(), "_sum", series.labels));
    AppendNumber(histogram.sample_sum, out);
    out->push_back('\n');
    out->append(LineHead(family_->GetName(), "_count", series.labels));
    AppendCount(histogram.sample_count, out);
  } else {
    out->append(series.head);
    AppendNumber(series.impl->Value(), out);
  }
  out->push_back('\n');
}

template class SeriesTable<prometheus::Counter>;
template class SeriesTable<prometheus::Gauge>;
template class SeriesTable<prometheus::Histogram>;

}  // namespace baton::base
