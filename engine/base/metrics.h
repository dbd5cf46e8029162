#pragma once

// Metrics of a process: typed handles over Prometheus. The table of all metrics is metrics_table.h.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "engine/base/metrics_table.h"

namespace prometheus {
class Counter;
class Gauge;
class Histogram;
}  // namespace prometheus

namespace baton::base {

template <typename Impl>
struct SeriesCell;

enum class Role : uint8_t { kRouter, kPrefill, kDecode };
// "router", "prefill", "decode".
absl::string_view RoleName(Role role);

#define BATON_METRIC_ID_(id, ...) k##id,
enum class CounterId { BATON_COUNTERS(BATON_METRIC_ID_) kNumIds };
enum class GaugeId { BATON_GAUGES(BATON_METRIC_ID_) kNumIds };
enum class HistogramId { BATON_HISTOGRAMS(BATON_METRIC_ID_) kNumIds };
#undef BATON_METRIC_ID_

// Handles are small values, thread-safe, valid as long as their Metrics. Take them once, not per
// event: the look-up locks. A default-made handle counts nothing, so that code can be tested
// without metrics.
class Counter {
 public:
  Counter() = default;
  void Increment(double by = 1) const;
  double value() const;

 private:
  friend class Metrics;
  explicit Counter(SeriesCell<prometheus::Counter>* cell) : cell_(cell) {}
  SeriesCell<prometheus::Counter>* cell_ = nullptr;
};

class Gauge {
 public:
  Gauge() = default;
  void Set(double value) const;
  void Add(double by) const;
  double value() const;

 private:
  friend class Metrics;
  explicit Gauge(SeriesCell<prometheus::Gauge>* cell) : cell_(cell) {}
  SeriesCell<prometheus::Gauge>* cell_ = nullptr;
};

class Histogram {
 public:
  Histogram() = default;
  // Takes a mutex: observe per step or request, not per token of a batch.
  void Observe(double value) const;
  uint64_t count() const;
  double sum() const;

 private:
  friend class Metrics;
  explicit Histogram(SeriesCell<prometheus::Histogram>* cell) : cell_(cell) {}
  SeriesCell<prometheus::Histogram>* cell_ = nullptr;
};

// All metrics of one process. Thread-safe.
class Metrics {
 public:
  // Registers the metrics of `role` and process_*; series with closed labels exist at once.
  static std::unique_ptr<Metrics> Create(Role role, absl::string_view model_name);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // `labels` are values in the order of the table. It is our bug, and checked, to ask for a metric
  // that this role does not export, for a wrong number of labels or for a value outside a closed
  // set. Keep open labels bounded.
  Counter counter(CounterId id, absl::Span<const absl::string_view> labels = {});
  Gauge gauge(GaugeId id, absl::Span<const absl::string_view> labels = {});
  Histogram histogram(HistogramId id, absl::Span<const absl::string_view> labels = {});
  // Shorthand: metrics.gauge(GaugeId::kKvBlocks, "free").
  Counter counter(CounterId id, absl::string_view label) {
    return counter(id, absl::MakeConstSpan(&label, 1));
  }
  Gauge gauge(GaugeId id, absl::string_view label) {
    return gauge(id, absl::MakeConstSpan(&label, 1));
  }
  Histogram histogram(HistogramId id, absl::string_view label) {
    return histogram(id, absl::MakeConstSpan(&label, 1));
  }

  // Takes a series away, for instance that of a peer that has gone. Its handles must not be used
  // any more.
  void Remove(GaugeId id, absl::Span<const absl::string_view> labels);

  Role role() const;
  // Scrapes carry vLLM's names beside ours from now on (metrics_compat.h). Call it before the first
  // scrape.
  void EnableVllmAliases();
  // Everything in the text format 0.0.4.
  std::string Scrape() const;
  // Only what endpoint pickers ask for many times a second: running, waiting, KV use and shape; of
  // a router, its load and its workers.
  std::string ScrapeLite() const;

 private:
  struct Impl;
  explicit Metrics(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton::base
