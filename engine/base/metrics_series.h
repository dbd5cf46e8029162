#pragma once

// The series of one metric, with the text of their lines written once. A scrape then adds numbers
// only, which makes a page of a thousand lines cheap enough to be asked for many times a second.

#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "prometheus/family.h"
#include "prometheus/labels.h"

#include "engine/base/mutex.h"

namespace baton::base {

// Impl: prometheus::Counter, prometheus::Gauge or prometheus::Histogram. Thread-safe.
template <typename Impl>
class SeriesTable {
 public:
  // `family` outlives this; nothing else adds to it or removes from it. `bounds` are a histogram's,
  // without infinity.
  SeriesTable(prometheus::Family<Impl>* family,
              const std::string& help,
              const std::vector<double>& bounds);

  // The series with these labels, found or made.
  Impl* Add(const prometheus::Labels& labels);
  void Remove(const prometheus::Labels& labels);
  // All series in the text format 0.0.4, in the order in which they were made; nothing when there
  // is none.
  void AppendTo(std::string* out) const;

 private:
  struct Series {
    Impl* impl;
    std::string labels;  // `a="x",b="y"`
    std::string head;    // of its line; of a histogram: of its buckets, up to the bound
  };

  Impl* FindOrMake(const prometheus::Labels& labels);
  void AppendSeries(const Series& series, std::string* out) const;

  prometheus::Family<Impl>* const family_;
  const std::vector<double> bounds_;
  const std::string help_lines_;
  const std::vector<std::string> bound_tails_;  // `0.5"} `, and infinity's
  mutable Mutex mutex_;
  std::vector<Series> series_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_set<const Impl*> known_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace baton::base
