#include "router/live_page_json.h"

#include "nlohmann/json.hpp"

namespace baton::router {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr size_t kMaxLabelBytes = 64;

OrderedJson RequestJson(const RequestReport& report) {
  const v1::Timings& t = report.timings;
  return {{"id", report.request_id},
          {"label", report.label.substr(0, kMaxLabelBytes)},
          {"method", report.method},
          {"code", absl::StatusCodeToString(report.code)},
          {"message", report.message},
          {"ended_ms", absl::ToUnixMillis(report.ended)},
          {"prompt_tokens", report.prompt_tokens},
          {"cached_tokens", report.cached_prompt_tokens},
          {"completion_tokens", report.completion_tokens},
          {"attempts", report.attempts},
          {"queue_s", t.queue_s()},
          {"tokenize_s", t.tokenize_s()},
          {"prefill_s", t.prefill_s()},
          {"ttft_s", t.ttft_s()},
          {"handover_s", t.handover_exposed_s()},
          {"e2e_s", t.e2e_s()},
          {"itl_mean_s", t.itl_mean_s()},
          {"kv_bytes", t.kv_bytes()},
          {"kv_transport", t.kv_transport()},
          {"prefill_worker", t.prefill_worker()},
          {"decode_worker", t.decode_worker()}};
}

bool IsFailure(absl::StatusCode code) {
  return code == absl::StatusCode::kInternal || code == absl::StatusCode::kUnavailable ||
         code == absl::StatusCode::kDataLoss || code == absl::StatusCode::kUnknown;
}

OrderedJson MeanMs(double sum_s, int count) {
  return count == 0 ? OrderedJson() : OrderedJson(1e3 * sum_s / count);
}

}  // namespace

void RequestHistory::Note(const RequestReport& report) {
  const int64_t at = absl::ToUnixSeconds(report.ended);
  base::MutexLock lock(&mutex_);
  requests_.push_front(report);
  if (requests_.size() > kRequests) requests_.pop_back();
  Second& second = seconds_[static_cast<size_t>(at % kSeconds)];
  if (second.at != at) second = {.at = at};
  ++second.requests;
  second.failures += IsFailure(report.code) ? 1 : 0;
  second.tokens += report.completion_tokens;
  if (report.timings.ttft_s() > 0) {
    ++second.first_tokens;
    second.ttft_s += report.timings.ttft_s();
  }
  if (report.timings.itl_mean_s() > 0) {
    ++second.gap_means;
    second.itl_s += report.timings.itl_mean_s();
  }
}

std::string RequestHistory::Json(absl::Time now) const {
  OrderedJson requests = OrderedJson::array();
  OrderedJson ttft = OrderedJson::array(), itl = ttft, count = ttft, failures = ttft, tokens = ttft;
  const int64_t last = absl::ToUnixSeconds(now);
  {
    base::MutexLock lock(&mutex_);
    for (const RequestReport& report : requests_) requests.push_back(RequestJson(report));
    for (int64_t at = last - kSeconds + 1; at <= last; ++at) {
      const Second& slot = seconds_[static_cast<size_t>(at % kSeconds)];
      const Second second = slot.at == at ? slot : Second();
      ttft.push_back(MeanMs(second.ttft_s, second.first_tokens));
      itl.push_back(MeanMs(second.itl_s, second.gap_means));
      count.push_back(second.requests);
      failures.push_back(second.failures);
      tokens.push_back(second.tokens);
    }
  }
  const OrderedJson json = {{"series",
                             {{"ttft_ms", ttft},
                              {"itl_ms", itl},
                              {"requests", count},
                              {"failures", failures},
                              {"tokens", tokens}}},
                            {"requests", requests}};
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

}  // namespace baton::router
