#pragma once

// Our metrics under the names that dashboards, autoscalers and endpoint pickers made for vLLM ask
// for. Made at scrape time from the values of our own, so they cost nothing in between.

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "prometheus/metric_family.h"

namespace baton::base {

// Whether one of the aliases is made from this metric of ours.
bool HasVllmAlias(absl::string_view name);

// `families` as collected from one process. Labels of the result: model_name, engine="0" and, of
// few, one more. Histograms keep the boundaries that both sides know, so every count is exact. A
// family that the process does not have gives none.
std::vector<prometheus::MetricFamily> VllmAliases(
    const std::vector<prometheus::MetricFamily>& families, const std::string& model_name);

}  // namespace baton::base
