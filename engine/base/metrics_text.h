#pragma once

// Parts of a page in Prometheus's text format 0.0.4.

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "prometheus/metric_type.h"

namespace baton::base {

void AppendCount(uint64_t value, std::string* out);
// The shortest digits that read back as the same number.
void AppendNumber(double value, std::string* out);
// `name="value"`, after a comma where `out` is not empty.
void AppendLabel(absl::string_view name, absl::string_view value, std::string* out);
// `name{labels} ` or `name `.
std::string LineHead(absl::string_view name, absl::string_view suffix, absl::string_view labels);
// The lines HELP and TYPE.
std::string FamilyHead(absl::string_view name, absl::string_view help, prometheus::MetricType type);

}  // namespace baton::base
