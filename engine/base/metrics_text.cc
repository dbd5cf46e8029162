#include "engine/base/metrics_text.h"

#include <charconv>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace baton::base {
namespace {

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

}  // namespace baton::base
