#pragma once

// The text format 0.0.4 of Prometheus, written fast: pickers scrape a process up to 20 times a
// second, so a page must cost well under a millisecond.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "prometheus/metric_family.h"

namespace baton::base {

// Parts of a page.
void AppendCount(uint64_t value, std::string* out);
// The shortest digits that read back as the same number.
void AppendNumber(double value, std::string* out);
// `name="value"`, after a comma where `out` is not empty.
void AppendLabel(absl::string_view name, absl::string_view value, std::string* out);
// `name{labels} ` or `name `.
std::string LineHead(absl::string_view name, absl::string_view suffix, absl::string_view labels);
// The lines HELP and TYPE.
std::string FamilyHead(absl::string_view name, absl::string_view help, prometheus::MetricType type);

// Families without series are left out.
std::string MetricsText(const std::vector<prometheus::MetricFamily>& families);

}  // namespace baton::base
