#pragma once

// The series of one metric and the text of their lines. Text is kept: a scrape makes it anew only
// for what has moved since the last one, so that a page of a thousand lines may be asked for many
// times a second.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "prometheus/family.h"
#include "prometheus/labels.h"

#include "engine/base/mutex.h"

namespace baton::base {

// Impl: prometheus::Counter, prometheus::Gauge or prometheus::Histogram.
template <typename Impl>
struct SeriesCell {
  Impl* impl = nullptr;
  // Of a histogram: its observations, each counted once it can be seen. Others tell by their value
  // that they have moved.
  std::atomic<uint64_t> changes{0};
};

// Another name for a metric: its series are added up by the labels they have under that name.
struct SeriesAlias {
  std::string name;
  std::vector<double> bounds;  // of a histogram, some of its own; empty: all
  // From the labels of a series, in the order of the page: `a="x",b="y"`. None: the series is left
  // out.
  std::function<std::optional<std::string>(const prometheus::Labels&)> label_text;
};

// The lines under one name, each the sum of its cells. Thread-compatible.
template <typename Impl>
class LineTable {
 public:
  // `bounds` are those of the cells, without infinity; `kept`, if any, those that are shown.
  LineTable(const std::string& name,
            const std::string& help,
            const std::vector<double>& bounds,
            const std::vector<double>& kept);

  // `cell` counts in the line with these labels from now on. It outlives this or is removed.
  void Add(const std::string& labels, const SeriesCell<Impl>* cell);
  // Lines without cells go.
  void Remove(const SeriesCell<Impl>* cell);
  // The text format 0.0.4, in the order in which lines were made; nothing when there is none.
  void AppendTo(std::string* out);

 private:
  struct Line {
    std::string labels;
    std::string head;  // of a histogram: of its buckets, up to the bound
    std::vector<const SeriesCell<Impl>*> cells;
    std::string text;   // as of `mark`; empty: never made
    uint64_t mark = 0;  // changes with the value
  };

  static uint64_t MarkOf(const Line& line);
  void Render(Line* line) const;

  const std::string name_;
  const std::string help_lines_;
  std::vector<size_t> kept_;              // of a histogram: the buckets that are shown
  std::vector<std::string> bound_tails_;  // theirs: `0.5"} `
  std::vector<Line> lines_;
};

// The series of one metric, and their lines under its names. Thread-safe.
template <typename Impl>
class SeriesTable {
 public:
  // `family` outlives this; nothing else adds to it or removes from it. `bounds` are a histogram's,
  // without infinity.
  SeriesTable(prometheus::Family<Impl>* family,
              const std::string& help,
              const std::vector<double>& bounds);

  // The series with these labels, found or made. It stays where it is until it is removed.
  SeriesCell<Impl>* Add(const prometheus::Labels& labels);
  void Remove(const prometheus::Labels& labels);
  // At most once.
  void SetAlias(SeriesAlias alias);

  void AppendTo(std::string* out) const;
  // Nothing where there is no alias.
  void AppendAliasTo(std::string* out) const;

 private:
  struct Series {
    prometheus::Labels labels;
    SeriesCell<Impl> cell;
  };

  Impl* FindOrMake(const prometheus::Labels& labels);
  void AddToAlias(const Series& series) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  prometheus::Family<Impl>* const family_;
  const std::string help_;
  const std::vector<double> bounds_;
  mutable Mutex mutex_;
  absl::flat_hash_map<Impl*, std::unique_ptr<Series>> series_ ABSL_GUARDED_BY(mutex_);
  mutable LineTable<Impl> lines_ ABSL_GUARDED_BY(mutex_);
  SeriesAlias alias_ ABSL_GUARDED_BY(mutex_);
  mutable std::unique_ptr<LineTable<Impl>> alias_lines_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace baton::base
