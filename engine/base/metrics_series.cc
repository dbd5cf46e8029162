#include "engine/base/metrics_series.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <type_traits>
#include <utility>

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

// Those of the whole family first, as prometheus-cpp itself has it.
std::string LabelText(const prometheus::Labels& constant, const prometheus::Labels& own) {
  std::string text;
  for (const prometheus::Labels* labels : {&constant, &own}) {
    for (const auto& [name, value] : *labels) AppendLabel(name, value, &text);
  }
  return text;
}

template <typename Impl>
double SumOf(const std::vector<const SeriesCell<Impl>*>& cells) {
  double sum = 0;
  for (const SeriesCell<Impl>* cell : cells) sum += cell->impl->Value();
  return sum;
}

}  // namespace

template <typename Impl>
LineTable<Impl>::LineTable(const std::string& name,
                           const std::string& help,
                           const std::vector<double>& bounds,
                           const std::vector<double>& kept)
    : name_(name), help_lines_(FamilyHead(name, help, kTypeOf<Impl>)) {
  if constexpr (kIsHistogram<Impl>) {
    std::vector<double> all = bounds;
    all.push_back(std::numeric_limits<double>::infinity());
    for (size_t i = 0; i < all.size(); ++i) {
      const bool shown = kept.empty() || i == bounds.size() ||
                         std::find(kept.begin(), kept.end(), all[i]) != kept.end();
      if (!shown) continue;
      kept_.push_back(i);
      AppendNumber(all[i], &bound_tails_.emplace_back());
      bound_tails_.back() += "\"} ";
    }
  }
}

template <typename Impl>
void LineTable<Impl>::Add(const std::string& labels, const SeriesCell<Impl>* cell) {
  const auto found = std::find_if(lines_.begin(), lines_.end(),
                                  [&](const Line& line) { return line.labels == labels; });
  Line& line = found != lines_.end() ? *found : lines_.emplace_back();
  line.cells.push_back(cell);
  line.text.clear();
  line.labels = labels;
  line.head = kIsHistogram<Impl>
                  ? absl::StrCat(name_, "_bucket{", labels, labels.empty() ? "" : ",", "le=\"")
                  : LineHead(name_, "", labels);
}

template <typename Impl>
void LineTable<Impl>::Remove(const SeriesCell<Impl>* cell) {
  for (Line& line : lines_) {
    if (std::erase(line.cells, cell) > 0) line.text.clear();
  }
  std::erase_if(lines_, [](const Line& line) { return line.cells.empty(); });
}

template <typename Impl>
void LineTable<Impl>::AppendTo(std::string* out) {
  if (lines_.empty()) return;
  out->append(help_lines_);
  for (Line& line : lines_) {
    // What comes in between goes into the text, perhaps, and makes it anew the next time.
    const uint64_t mark = MarkOf(line);
    if (line.text.empty() || line.mark != mark) {
      Render(&line);
      line.mark = mark;
    }
    out->append(line.text);
  }
}

template <typename Impl>
uint64_t LineTable<Impl>::MarkOf(const Line& line) {
  if constexpr (kIsHistogram<Impl>) {
    uint64_t changes = 0;
    for (const SeriesCell<Impl>* cell : line.cells)
      changes += cell->changes.load(std::memory_order_acquire);
    return changes;
  } else {
    return std::bit_cast<uint64_t>(SumOf(line.cells));
  }
}

template <typename Impl>
void LineTable<Impl>::Render(Line* line) const {
  std::string* const out = &line->text;
  out->clear();
  if constexpr (kIsHistogram<Impl>) {
    std::vector<uint64_t> counts(kept_.size(), 0);
    double sum = 0;
    for (const SeriesCell<Impl>* cell : line->cells) {
      const prometheus::ClientMetric::Histogram histogram = cell->impl->Collect().histogram;
      for (size_t i = 0; i < kept_.size(); ++i)
        counts[i] += histogram.bucket[kept_[i]].cumulative_count;
      sum += histogram.sample_sum;
    }
    for (size_t i = 0; i < kept_.size(); ++i) {
      out->append(line->head);
      out->append(bound_tails_[i]);
      AppendCount(counts[i], out);
      out->push_back('\n');
    }
    out->append(LineHead(name_, "_sum", line->labels));
    AppendNumber(sum, out);
    out->push_back('\n');
    out->append(LineHead(name_, "_count", line->labels));
    AppendCount(counts.back(), out);
  } else {
    out->append(line->head);
    AppendNumber(SumOf(line->cells), out);
  }
  out->push_back('\n');
}

template <typename Impl>
SeriesTable<Impl>::SeriesTable(prometheus::Family<Impl>* family,
                               const std::string& help,
                               const std::vector<double>& bounds)
    : family_(family), help_(help), bounds_(bounds), lines_(family->GetName(), help, bounds, {}) {}

template <typename Impl>
Impl* SeriesTable<Impl>::FindOrMake(const prometheus::Labels& labels) {
  if constexpr (kIsHistogram<Impl>) {
    return &family_->Add(labels, bounds_);
  } else {
    return &family_->Add(labels);
  }
}

template <typename Impl>
SeriesCell<Impl>* SeriesTable<Impl>::Add(const prometheus::Labels& labels) {
  MutexLock lock(&mutex_);
  Impl* const impl = FindOrMake(labels);
  std::unique_ptr<Series>& series = series_[impl];
  if (series != nullptr) return &series->cell;
  series = std::make_unique<Series>();
  series->labels = labels;
  series->cell.impl = impl;
  lines_.Add(LabelText(family_->GetConstantLabels(), labels), &series->cell);
  AddToAlias(*series);
  return &series->cell;
}

template <typename Impl>
void SeriesTable<Impl>::Remove(const prometheus::Labels& labels) {
  MutexLock lock(&mutex_);
  Impl* const impl = FindOrMake(labels);
  if (const auto found = series_.find(impl); found != series_.end()) {
    lines_.Remove(&found->second->cell);
    if (alias_lines_ != nullptr) alias_lines_->Remove(&found->second->cell);
    series_.erase(found);
  }
  family_->Remove(impl);
}

template <typename Impl>
void SeriesTable<Impl>::SetAlias(SeriesAlias alias) {
  MutexLock lock(&mutex_);
  alias_ = std::move(alias);
  alias_lines_ = std::make_unique<LineTable<Impl>>(alias_.name, help_, bounds_, alias_.bounds);
  for (const auto& [impl, series] : series_) AddToAlias(*series);
}

template <typename Impl>
void SeriesTable<Impl>::AddToAlias(const Series& series) {
  if (alias_lines_ == nullptr) return;
  const std::optional<std::string> labels = alias_.label_text(series.labels);
  if (labels) alias_lines_->Add(*labels, &series.cell);
}

template <typename Impl>
void SeriesTable<Impl>::AppendTo(std::string* out) const {
  MutexLock lock(&mutex_);
  lines_.AppendTo(out);
}

template <typename Impl>
void SeriesTable<Impl>::AppendAliasTo(std::string* out) const {
  MutexLock lock(&mutex_);
  if (alias_lines_ != nullptr) alias_lines_->AppendTo(out);
}

template class SeriesTable<prometheus::Counter>;
template class SeriesTable<prometheus::Gauge>;
template class SeriesTable<prometheus::Histogram>;

}  // namespace baton::base
