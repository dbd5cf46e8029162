#include "worker/convert.h"

#include "engine/base/status_macros.h"

namespace baton::worker {
namespace {

runtime::SamplingParams ParamsFromProto(const v1::Sampling& sampling) {
  runtime::SamplingParams params;
  params.temperature = sampling.temperature();
  params.top_k = sampling.top_k();
  params.top_p = sampling.top_p();
  params.min_p = sampling.min_p();
  params.seed = sampling.seed();
  params.repetition_penalty = sampling.repetition_penalty();
  params.presence_penalty = sampling.presence_penalty();
  params.frequency_penalty = sampling.frequency_penalty();
  for (const auto& [id, bias] : sampling.logit_bias()) params.logit_bias.emplace_back(id, bias);
  params.stop.assign(sampling.stop().begin(), sampling.stop().end());
  params.stop_token_ids.assign(sampling.stop_token_ids().begin(), sampling.stop_token_ids().end());
  params.min_tokens = sampling.min_tokens();
  params.max_tokens = sampling.max_tokens();
  params.logprobs = sampling.logprobs();
  params.n = sampling.n();
  params.first_choice = sampling.first_choice();
  return params;
}

}  // namespace

absl::StatusOr<runtime::EngineRequest> RequestFromProto(const v1::RequestSpec& spec,
                                                        const runtime::RequestLimits& limits) {
  runtime::EngineRequest request;
  request.request_id = spec.request_id();
  request.prompt_ids.assign(spec.prompt_ids().begin(), spec.prompt_ids().end());
  request.params = ParamsFromProto(spec.sampling());
  request.cache_salt = spec.cache_salt();
  request.priority = spec.priority();
  request.resumed_tokens =
      static_cast<int>(std::min<uint32_t>(spec.resumed_tokens(), spec.prompt_ids_size()));
  BATON_RETURN_IF_ERROR(runtime::ValidateRequest(request, limits));
  return request;
}

v1::Token TokenToProto(uint32_t choice, uint32_t position, const runtime::SampledToken& token) {
  v1::Token proto;
  proto.set_choice(choice);
  proto.set_position(position);
  proto.set_id(token.id);
  proto.set_has_logprob(token.has_logprob);
  proto.set_logprob(token.logprob);
  for (const auto& [id, logprob] : token.top) {
    v1::Logprob* top = proto.add_top();
    top->set_token_id(id);
    top->set_logprob(logprob);
  }
  return proto;
}

v1::ChoiceFinished FinishToProto(uint32_t choice, const runtime::Finish& finish) {
  v1::ChoiceFinished proto;
  proto.set_choice(choice);
  switch (finish.reason) {
    case runtime::FinishReason::kNone:
      break;
    case runtime::FinishReason::kStopToken:
      proto.set_finish(v1::FINISH_STOP_TOKEN);
      proto.set_stop_token_id(finish.stop_token_id);
      break;
    case runtime::FinishReason::kStopString:
      proto.set_finish(v1::FINISH_STOP_STRING);
      proto.set_stop_index(static_cast<uint32_t>(finish.stop_index));
      break;
    case runtime::FinishReason::kLength:
      proto.set_finish(v1::FINISH_LENGTH);
      break;
  }
  return proto;
}

}  // namespace baton::worker
