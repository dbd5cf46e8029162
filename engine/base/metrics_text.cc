#include "engine/base/metrics_text.h"

#include <charconv>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace baton::base {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

void Append(absl::string_view text, std::string* out) { out->append(text.data(), text.size()); }

// Help texts escape backslash and new line; label values the quote too.
void AppendEscaped(absl::string_view text, bool quotes, std::string* out) {
  for (const char c : text) {
    if (c == '\\') {
      Append("\\\\", out);
    } else if (c == '\n') {
      Append("\\n", out);
    } else if (c == '"' && quotes) {
      Append("\\\"", out);
    } else {
      out->push_back(c);
    }
  }
}

const char* TypeName(MetricType type) {
  switch (type) {
    case MetricType::Counter:
      return "counter";
    case MetricType::Gauge:
      return "gauge";
    case MetricType::Histogram:
      return "histogram";
    default:
      return "untyped";
  }
}

}  // namespace

void AppendCount(uint64_t value, std::string* out) {
  char digits[24];
  out->append(digits, std::to_chars(digits, digits + sizeof(digits), value).ptr);
}

void AppendNumber(double value, std::string* out) {
  if (std::isnan(value)) return Append("NaN", out);
  if (std::isinf(value)) return Append(value < 0 ? "-Inf" : "+Inf", out);
  char digits[32];
  constexpr double kExact = 9007199254740992;  // 2^53: integers up to here print as such
  const auto end = value == std::floor(value) && std::fabs(value) < kExact
                       ? std::to_chars(digits, digits + sizeof(digits), static_cast<int64_t>(value))
                       : std::to_chars(digits, digits + sizeof(digits), value);
  out->append(digits, end.ptr);
}

void AppendLabel(absl::string_view name, absl::string_view value, std::string* out) {
  if (!out->empty()) out->push_back(',');
  Append(name, out);
  Append("=\"", out);
  AppendEscaped(value, true, out);
  out->push_back('"');
}

std::string LineHead(absl::string_view name, absl::string_view suffix, absl::string_view labels) {
  return labels.empty() ? absl::StrCat(name, suffix, " ")
                        : absl::StrCat(name, suffix, "{", labels, "} ");
}

std::string FamilyHead(absl::string_view name,
                       absl::string_view help,
                       prometheus::MetricType type) {
  std::string out = absl::StrCat("# HELP ", name, " ");
  AppendEscaped(help, false, &out);
  absl::StrAppend(&out, "\n# TYPE ", name, " ", TypeName(type), "\n");
  return out;
}

namespace {

// `a="x",b="y"`, once a series.
std::string LabelText(const ClientMetric& metric) {
  std::string text;
  for (const ClientMetric::Label& label : metric.label) AppendLabel(label.name, label.value, &text);
  return text;
}

void AppendHistogram(const std::string& name,
                     const std::string& labels,
                     const ClientMetric::Histogram& histogram,
                     std::string* out) {
  const std::string head = name + "_bucket{" + labels + (labels.empty() ? "le=\"" : ",le=\"");
  bool infinite = false;
  for (const ClientMetric::Bucket& bucket : histogram.bucket) {
    Append(head, out);
    AppendNumber(bucket.upper_bound, out);
    Append("\"} ", out);
    AppendCount(bucket.cumulative_count, out);
    out->push_back('\n');
    infinite |= std::isinf(bucket.upper_bound);
  }
  if (!infinite) {
    Append(head, out);
    Append("+Inf\"} ", out);
    AppendCount(histogram.sample_count, out);
    out->push_back('\n');
  }
  out->append(LineHead(name, "_sum", labels));
  AppendNumber(histogram.sample_sum, out);
  out->push_back('\n');
  out->append(LineHead(name, "_count", labels));
  AppendCount(histogram.sample_count, out);
  out->push_back('\n');
}

void AppendFamily(const MetricFamily& family, std::string* out) {
  out->append(FamilyHead(family.name, family.help, family.type));
  for (const ClientMetric& metric : family.metric) {
    const std::string labels = LabelText(metric);
    if (family.type == MetricType::Histogram) {
      AppendHistogram(family.name, labels, metric.histogram, out);
      continue;
    }
    out->append(LineHead(family.name, "", labels));
    AppendNumber(family.type == MetricType::Counter ? metric.counter.value : metric.gauge.value,
                 out);
    out->push_back('\n');
  }
}

}  // namespace

std::string MetricsText(const std::vector<MetricFamily>& families) {
  std::string out;
  out.reserve(size_t{128} << 10);
  for (const MetricFamily& family : families) {
    if (!family.metric.empty()) AppendFamily(family, &out);
  }
  return out;
}

}  // namespace baton::base
