#include "cli/trace.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "engine/base/json.h"
#include "engine/base/status_macros.h"

namespace baton::cli {
namespace {

constexpr size_t kMaxRequests = 10'000'000;
constexpr uint32_t kMaxTokens = 10'000'000;

absl::Status Bad(absl::string_view field, absl::string_view want) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": want ", want));
}

absl::Status ReadTokens(const base::JsonValue& record,
                        const char* field,
                        uint32_t least,
                        uint32_t* out) {
  const base::JsonValue* value = record.Find(field);
  if (value == nullptr || !value->is_number() || !absl::SimpleAtoi(value->text(), out) ||
      *out < least || *out > kMaxTokens) {
    return Bad(field, absl::StrCat("a whole number in [", least, ", ", kMaxTokens, "]"));
  }
  return absl::OkStatus();
}

absl::Status ReadText(const base::JsonValue& record, const char* field, std::string* out) {
  const base::JsonValue* value = record.Find(field);
  if (value == nullptr || value->is_null()) return absl::OkStatus();
  if (!value->is_string() && !value->is_number()) return Bad(field, "a text");
  *out = value->text();
  return absl::OkStatus();
}

absl::StatusOr<TraceRequest> ReadRequest(const std::string& line) {
  BATON_ASSIGN_OR_RETURN(const base::JsonValue record, base::ParseJson(line));
  if (!record.is_object()) return absl::InvalidArgumentError("want a JSON object");
  TraceRequest out;
  const base::JsonValue* arrival = record.Find("arrival");
  if (arrival == nullptr || !arrival->is_number() ||
      !absl::SimpleAtod(arrival->text(), &out.arrival_s) || !std::isfinite(out.arrival_s) ||
      out.arrival_s < 0) {
    return Bad("arrival", "seconds, 0 or more");
  }
  BATON_RETURN_IF_ERROR(ReadTokens(record, "prompt_tokens", 1, &out.prompt_tokens));
  BATON_RETURN_IF_ERROR(ReadTokens(record, "output_tokens", 1, &out.output_tokens));
  BATON_RETURN_IF_ERROR(ReadText(record, "prefix_group", &out.prefix_group));
  BATON_RETURN_IF_ERROR(ReadText(record, "tenant", &out.tenant));
  BATON_RETURN_IF_ERROR(ReadText(record, "priority", &out.priority));
  if (out.priority != "high" && out.priority != "normal" && out.priority != "low")
    return Bad("priority", "high, normal or low");
  if (out.prefix_group.empty()) return out;
  out.prefix_tokens = out.prompt_tokens;
  out.is_session = record.Find("prefix_tokens") == nullptr;
  if (!out.is_session) {
    BATON_RETURN_IF_ERROR(ReadTokens(record, "prefix_tokens", 0, &out.prefix_tokens));
    out.prefix_tokens = std::min(out.prefix_tokens, out.prompt_tokens);
  }
  return out;
}

}  // namespace

absl::StatusOr<std::vector<TraceRequest>> ReadTrace(std::istream& in) {
  std::vector<TraceRequest> out;
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    absl::StatusOr<TraceRequest> request = ReadRequest(line);
    if (!request.ok()) return Annotate(request.status(), absl::StrCat("line ", number));
    if (out.size() == kMaxRequests)
      return absl::InvalidArgumentError(absl::StrCat("more than ", kMaxRequests, " requests"));
    out.push_back(*std::move(request));
  }
  if (in.bad()) return absl::InternalError("the trace cannot be read");
  if (out.empty()) return absl::InvalidArgumentError("the trace has no requests");
  std::stable_sort(out.begin(), out.end(), [](const TraceRequest& a, const TraceRequest& b) {
    return a.arrival_s < b.arrival_s;
  });
  return out;
}

}  // namespace baton::cli
