#include "router/request_check.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"

#include "engine/base/status_macros.h"
#include "engine/process/grpc_status.h"

namespace baton::router {
namespace {

using process::FieldViolation;

absl::Status CheckRange(const char* field, bool set, float value, float least, float most) {
  if (!set || (value >= least && value <= most)) return absl::OkStatus();  // NaN is in no range
  return FieldViolation(absl::StrCat("sampling.", field),
                        absl::StrCat(value, " is not in [", least, ", ", most, "]"));
}

absl::Status CheckScalars(const v1::SamplingParams& s) {
  constexpr float kMaxFloat = std::numeric_limits<float>::max();
  BATON_RETURN_IF_ERROR(
      CheckRange("temperature", s.has_temperature(), s.temperature(), 0, kMaxFloat));
  BATON_RETURN_IF_ERROR(CheckRange("top_p", s.has_top_p(), s.top_p(), 0, 1));
  BATON_RETURN_IF_ERROR(CheckRange("min_p", s.has_min_p(), s.min_p(), 0, 1));
  BATON_RETURN_IF_ERROR(CheckRange("presence_penalty", s.has_presence_penalty(),
                                   s.presence_penalty(), -kMaxPenalty, kMaxPenalty));
  BATON_RETURN_IF_ERROR(CheckRange("frequency_penalty", s.has_frequency_penalty(),
                                   s.frequency_penalty(), -kMaxPenalty, kMaxPenalty));
  if (s.has_repetition_penalty() &&
      !(s.repetition_penalty() > 0 && std::isfinite(s.repetition_penalty()))) {
    return FieldViolation("sampling.repetition_penalty",
                          absl::StrCat(s.repetition_penalty(), " is not above 0"));
  }
  if (s.has_top_k() && s.top_k() < -1) {
    return FieldViolation("sampling.top_k",
                          absl::StrCat(s.top_k(), " is below -1; 0 and -1 mean off"));
  }
  if (s.has_max_tokens() && s.max_tokens() == 0) {
    return FieldViolation("sampling.max_tokens",
                          "0 is not allowed; leave it out for the rest of the context");
  }
  if (s.has_max_tokens() && s.min_tokens() > s.max_tokens()) {
    return FieldViolation("sampling.min_tokens",
                          absl::StrCat(s.min_tokens(), " is above max_tokens=", s.max_tokens()));
  }
  if (s.has_logprobs() && s.logprobs() > kMaxLogprobs) {
    return FieldViolation("sampling.logprobs",
                          absl::StrCat(s.logprobs(), " is above ", kMaxLogprobs));
  }
  if (s.has_n() && (s.n() == 0 || s.n() > kMaxChoices)) {
    return FieldViolation("sampling.n", absl::StrCat(s.n(), " is not in [1, ", kMaxChoices, "]"));
  }
  return absl::OkStatus();
}

absl::Status CheckLists(const v1::SamplingParams& s, uint32_t vocab_size) {
  if (s.stop_size() > kMaxStops) {
    return FieldViolation("sampling.stop",
                          absl::StrCat(s.stop_size(), " strings; at most ", kMaxStops));
  }
  for (const std::string& stop : s.stop()) {
    if (stop.empty()) return FieldViolation("sampling.stop", "an empty string would match at once");
    if (stop.size() > kMaxStopBytes) {
      return FieldViolation("sampling.stop", absl::StrCat("a string of ", stop.size(),
                                                          " bytes; at most ", kMaxStopBytes));
    }
  }
  if (s.stop_token_ids_size() > kMaxStopTokenIds) {
    return FieldViolation(
        "sampling.stop_token_ids",
        absl::StrCat(s.stop_token_ids_size(), " ids; at most ", kMaxStopTokenIds));
  }
  for (const uint32_t id : s.stop_token_ids()) {
    if (id >= vocab_size) {
      return FieldViolation("sampling.stop_token_ids",
                            absl::StrCat(id, " is not below vocab_size=", vocab_size));
    }
  }
  for (const auto& [id, bias] : s.logit_bias()) {
    if (id >= vocab_size) {
      return FieldViolation("sampling.logit_bias",
                            absl::StrCat(id, " is not below vocab_size=", vocab_size));
    }
    if (!(std::abs(bias) <= kMaxLogitBias)) {
      return FieldViolation(
          "sampling.logit_bias",
          absl::StrCat(bias, " is not in [-", kMaxLogitBias, ", ", kMaxLogitBias, "]"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPrompt(const v1::GenerateRequest& request, uint32_t vocab_size) {
  switch (request.prompt_case()) {
    case v1::GenerateRequest::PROMPT_NOT_SET:
      return FieldViolation("prompt", "one of text, token_ids and chat is needed");
    case v1::GenerateRequest::kText:
      if (request.text().empty()) return FieldViolation("text", "no tokens");
      break;
    case v1::GenerateRequest::kTokenIds:
      if (request.token_ids().ids_size() == 0) return FieldViolation("token_ids", "no tokens");
      for (const uint32_t id : request.token_ids().ids()) {
        if (id >= vocab_size) {
          return FieldViolation("token_ids",
                                absl::StrCat(id, " is not below vocab_size=", vocab_size));
        }
      }
      break;
    case v1::GenerateRequest::kChat:
      if (request.chat().messages_size() == 0)
        return FieldViolation("chat.messages", "no messages");
      break;
  }
  if (request.parse_special() && request.prompt_case() != v1::GenerateRequest::kText) {
    return FieldViolation("parse_special", "only for text");
  }
  if (!v1::Priority_IsValid(request.priority())) {
    return FieldViolation("priority", absl::StrCat(request.priority(), " is none of the classes"));
  }
  if (request.cache_salt().size() > kMaxSaltBytes) {
    return FieldViolation(
        "cache_salt", absl::StrCat(request.cache_salt().size(), " bytes; at most ", kMaxSaltBytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckRequest(const v1::GenerateRequest& request, uint32_t vocab_size) {
  BATON_RETURN_IF_ERROR(CheckPrompt(request, vocab_size));
  BATON_RETURN_IF_ERROR(CheckScalars(request.sampling()));
  return CheckLists(request.sampling(), vocab_size);
}

v1::SamplingParams DefaultSampling(const text::ModelTextConfig& config) {
  v1::SamplingParams out;
  out.set_temperature(config.temperature.value_or(1));
  out.set_top_k(config.top_k.value_or(0));
  out.set_top_p(config.top_p.value_or(1));
  out.set_min_p(config.min_p.value_or(0));
  out.set_repetition_penalty(config.repetition_penalty.value_or(1));
  out.set_presence_penalty(0);
  out.set_frequency_penalty(0);
  out.set_ignore_eos(false);
  out.set_min_tokens(0);
  out.set_n(1);
  return out;
}

absl::StatusOr<worker::v1::Sampling> ResolveSampling(const v1::GenerateRequest& request,
                                                     const text::ModelTextConfig& config,
                                                     uint32_t prompt_tokens,
                                                     uint32_t max_model_len,
                                                     uint64_t seed) {
  if (prompt_tokens == 0) return FieldViolation("prompt", "no tokens");
  if (prompt_tokens >= max_model_len) {
    return FieldViolation(
        "prompt", absl::StrCat("prompt_tokens=", prompt_tokens,
                               " leave no room for an answer in max_model_len=", max_model_len));
  }
  const uint32_t room = max_model_len - prompt_tokens;
  v1::SamplingParams s = DefaultSampling(config);
  s.MergeFrom(request.sampling());  // what is set, also to zero, wins
  worker::v1::Sampling out;
  out.set_max_tokens(s.has_max_tokens() ? std::min(s.max_tokens(), room) : room);
  if (s.min_tokens() > out.max_tokens()) {
    return FieldViolation("sampling.min_tokens",
                          absl::StrCat(s.min_tokens(), " is more than the context leaves: ", room));
  }
  out.set_temperature(s.temperature());
  out.set_top_k(std::max(s.top_k(), 0));
  out.set_top_p(s.top_p());
  out.set_min_p(s.min_p());
  out.set_seed(s.has_seed() ? s.seed() : seed);
  out.set_repetition_penalty(s.repetition_penalty());
  out.set_presence_penalty(s.presence_penalty());
  out.set_frequency_penalty(s.frequency_penalty());
  for (const auto& [id, bias] : s.logit_bias()) (*out.mutable_logit_bias())[id] = bias;
  for (const std::string& stop : s.stop()) out.add_stop(stop);
  for (const uint32_t id : s.stop_token_ids()) out.add_stop_token_ids(id);
  if (!s.ignore_eos()) {
    for (const uint32_t id : config.eos_ids) out.add_stop_token_ids(id);
  }
  out.set_min_tokens(s.min_tokens());
  out.set_logprobs(s.has_logprobs() ? static_cast<int32_t>(s.logprobs()) : -1);
  out.set_n(s.n());
  return out;
}

}  // namespace baton::router
