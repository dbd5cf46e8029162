#pragma once

// process_*: CPU, memory, descriptors, start time, under the names every Prometheus client uses.

#include <vector>

#include "prometheus/metric_family.h"

namespace baton::base {

// Reads /proc. What cannot be read is left out.
std::vector<prometheus::MetricFamily> CollectProcessStats();

}  // namespace baton::base
