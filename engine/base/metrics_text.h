#pragma once

// The text format 0.0.4 of Prometheus, written fast: pickers scrape a process up to 20 times a
// second, so a page must cost well under a millisecond.

#include <string>
#include <vector>

#include "prometheus/metric_family.h"

namespace baton::base {

// Families without series are left out.
std::string MetricsText(const std::vector<prometheus::MetricFamily>& families);

}  // namespace baton::base
