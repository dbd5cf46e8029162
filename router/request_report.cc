#include "router/request_report.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "engine/base/log.h"

namespace baton::router {
namespace {

constexpr size_t kMaxLabelBytes = 64;     // of a client's label
constexpr size_t kMaxMessageBytes = 256;  // of a failure's message

// The stages of a request in the order in which they happen.
std::vector<std::pair<const char*, double>> Stages(const v1::Timings& t) {
  return {{"queue", t.queue_s()},
          {"tokenize", t.tokenize_s()},
          {"prefill", t.prefill_s()},
          {"prefill_queue", t.prefill_queue_s()},
          {"prefill_compute", t.prefill_compute_s()},
          {"append", t.append_s()},
          {"ttft", t.ttft_s()},
          {"handover", t.handover_exposed_s()},
          {"first_decode", t.first_decode_s()},
          {"itl_mean", t.itl_mean_s()},
          {"e2e", t.e2e_s()}};
}

}  // namespace

std::string RequestLogFields(const RequestReport& report) {
  std::string out = LogField("request_id", report.request_id);
  if (!report.label.empty())
    absl::StrAppend(&out, LogField("label", report.label.substr(0, kMaxLabelBytes)));
  if (!report.trace_id.empty()) absl::StrAppend(&out, LogField("trace_id", report.trace_id));
  absl::StrAppend(&out, LogField("method", report.method),
                  LogField("code", absl::StatusCodeToString(report.code)));
  if (report.code != absl::StatusCode::kOk)
    absl::StrAppend(&out, LogField("message", report.message.substr(0, kMaxMessageBytes)));
  absl::StrAppend(&out, LogField("prompt_tokens", report.prompt_tokens),
                  LogField("cached_tokens", report.cached_prompt_tokens),
                  LogField("completion_tokens", report.completion_tokens),
                  LogField("attempts", report.attempts));
  for (const auto& [stage, seconds] : Stages(report.timings))
    absl::StrAppend(&out,
                    LogField(absl::StrCat(stage, "_ms"), absl::StrFormat("%.3f", 1e3 * seconds)));
  const v1::Timings& t = report.timings;
  if (!t.prefill_worker().empty())
    absl::StrAppend(&out, LogField("prefill_worker", t.prefill_worker()));
  if (!t.decode_worker().empty())
    absl::StrAppend(&out, LogField("decode_worker", t.decode_worker()));
  if (!t.kv_transport().empty())
    absl::StrAppend(&out, LogField("kv_transport", t.kv_transport()),
                    LogField("kv_bytes", t.kv_bytes()));
  return out;
}

std::string ServerTiming(const v1::Timings& timings) {
  std::string out;
  for (const auto& [stage, seconds] : Stages(timings))
    absl::StrAppend(&out, out.empty() ? "" : ", ", stage,
                    ";dur=", absl::StrFormat("%.3f", 1e3 * seconds));
  return out;
}

}  // namespace baton::router
