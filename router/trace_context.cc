#include "router/trace_context.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace baton::router {
namespace {

// version - trace id - parent id - flags
constexpr size_t kHeaderBytes = 2 + 1 + 32 + 1 + 16 + 1 + 2;

bool IsHex(absl::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}
bool IsZero(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c == '0'; });
}

}  // namespace

std::string TraceContext::Header() const {
  if (trace_id.empty()) return "";
  return absl::StrCat("00-", trace_id, "-", span_id, sampled ? "-01" : "-00");
}

TraceContext ParseTraceparent(absl::string_view header, absl::string_view new_span_id) {
  TraceContext out;
  // A later version may be longer, then with a dash behind the flags.
  const bool sized =
      header.size() == kHeaderBytes ||
      (header.size() > kHeaderBytes && header.substr(0, 2) != "00" && header[kHeaderBytes] == '-');
  if (!sized || header[2] != '-' || header[35] != '-' || header[52] != '-') return out;
  const absl::string_view version = header.substr(0, 2), trace = header.substr(3, 32),
                          parent = header.substr(36, 16), flags = header.substr(53, 2);
  if (!IsHex(version) || version == "ff" || !IsHex(trace) || IsZero(trace) || !IsHex(parent) ||
      IsZero(parent) || !IsHex(flags)) {
    return out;
  }
  out.trace_id = std::string(trace);
  out.span_id = std::string(new_span_id);
  const char low = flags[1];
  out.sampled = ((low <= '9' ? low - '0' : low - 'a' + 10) & 1) != 0;
  return out;
}

}  // namespace baton::router
