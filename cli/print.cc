// How answers and failures look: JSON for programs, a short table for people.

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"

#include "cli/client.h"

namespace baton::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string ReasonName(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_STOP:
      return "stop";
    case v1::FINISH_REASON_LENGTH:
      return "length";
    default:
      return "unspecified";
  }
}

Json LogprobsJson(const std::vector<v1::TokenLogprob>& logprobs) {
  Json list = Json::array();
  for (const v1::TokenLogprob& token : logprobs) {
    Json top = Json::array();
    for (const v1::TopLogprob& other : token.top())
      top.push_back({{"token_id", other.token_id()}, {"logprob", other.logprob()}});
    list.push_back({{"token_id", token.token_id()}, {"logprob", token.logprob()}, {"top", top}});
  }
  return list;
}

Json ChoiceJson(const Answer::Choice& choice) {
  Json json = {{"text", choice.text},
               {"token_ids", choice.token_ids},
               {"finish_reason", ReasonName(choice.finished.reason())}};
  if (choice.finished.has_stop_string()) json["stop_string"] = choice.finished.stop_string();
  if (choice.finished.has_stop_token_id()) json["stop_token_id"] = choice.finished.stop_token_id();
  if (!choice.logprobs.empty()) json["logprobs"] = LogprobsJson(choice.logprobs);
  return json;
}

Json UsageJson(const v1::Usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens()},
          {"completion_tokens", usage.completion_tokens()},
          {"cached_prompt_tokens", usage.cached_prompt_tokens()},
          {"seed", usage.seed()}};
}

Json TimingsJson(const Answer& answer) {
  const v1::Timings& t = answer.timings;
  return {{"tokenize_s", t.tokenize_s()},
          {"queue_s", t.queue_s()},
          {"prefill_s", t.prefill_s()},
          {"prefill_queue_s", t.prefill_queue_s()},
          {"prefill_compute_s", t.prefill_compute_s()},
          {"append_s", t.append_s()},
          {"handover_exposed_s", t.handover_exposed_s()},
          {"first_decode_s", t.first_decode_s()},
          {"ttft_s", t.ttft_s()},
          {"itl_mean_s", t.itl_mean_s()},
          {"e2e_s", t.e2e_s()},
          {"kv_bytes", t.kv_bytes()},
          {"kv_transport", t.kv_transport()},
          {"prefill_worker", t.prefill_worker()},
          {"decode_worker", t.decode_worker()},
          {"retries", t.retries()},
          {"accept_length", t.accept_length()},
          {"client_ttft_s", absl::ToDoubleSeconds(answer.client_ttft)},
          {"client_e2e_s", absl::ToDoubleSeconds(answer.client_e2e)}};
}

double TokensPerSecond(const Answer& answer) {
  const double seconds = answer.timings.e2e_s() - answer.timings.ttft_s();
  return seconds > 0 && answer.usage.completion_tokens() > 1
             ? (answer.usage.completion_tokens() - 1) / seconds
             : 0;
}

}  // namespace

std::string AnswerJson(const Answer& answer) {
  Json json = answer.choices.size() == 1 ? ChoiceJson(answer.choices[0]) : Json::object();
  if (answer.choices.size() != 1) {
    json["choices"] = Json::array();
    for (const Answer::Choice& choice : answer.choices)
      json["choices"].push_back(ChoiceJson(choice));
  }
  json["usage"] = UsageJson(answer.usage);
  json["timings"] = TimingsJson(answer);
  json["request_id"] = answer.request_id;
  return json.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

std::string AnswerTable(const Answer& answer) {
  const v1::Timings& t = answer.timings;
  return absl::StrFormat(
      "  prompt tokens    %d (%d from the prefix cache)\n"
      "  answer tokens    %d\n"
      "  TTFT             %.1f ms (tokenize %.1f, queue %.1f, prefill %.1f)\n"
      "  ITL              %.1f ms\n"
      "  tokens/s         %.1f\n"
      "  KV handed over   %s\n"
      "  workers          prefill %s, decode %s\n",
      answer.usage.prompt_tokens(), answer.usage.cached_prompt_tokens(),
      answer.usage.completion_tokens(), 1e3 * t.ttft_s(), 1e3 * t.tokenize_s(), 1e3 * t.queue_s(),
      1e3 * t.prefill_s(), 1e3 * t.itl_mean_s(), TokensPerSecond(answer),
      t.kv_transport().empty()
          ? "nothing"
          : absl::StrFormat("%d bytes over %s (%.1f ms not hidden by compute)", t.kv_bytes(),
                            t.kv_transport(), 1e3 * t.handover_exposed_s()),
      t.prefill_worker().empty() ? "-" : t.prefill_worker(),
      t.decode_worker().empty() ? "-" : t.decode_worker());
}

int PrintFailure(absl::string_view what, const absl::Status& status) {
  std::fprintf(stderr, "%s: %s\n", std::string(what).c_str(), status.ToString().c_str());
  return 1;
}

}  // namespace baton::cli
