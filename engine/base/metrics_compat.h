#pragma once

// Our metrics under the names that dashboards, autoscalers and endpoint pickers made for vLLM ask
// for. Made at scrape time from the values of our own, so they cost nothing in between.

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

#include "engine/base/metrics_series.h"

namespace baton::base {

// What a metric of ours is called there; none: it is not. Labels: model_name, engine="0" and, of
// few, one more. Histograms keep the boundaries that both sides know, so every count is exact.
std::optional<SeriesAlias> VllmAlias(absl::string_view name, const std::string& model_name);

}  // namespace baton::base
