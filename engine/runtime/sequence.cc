#include "engine/runtime/sequence.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::runtime {
namespace {

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

absl::Status ValidateSampling(const SamplingParams& params, int vocab_size) {
  const std::pair<const char*, float> numbers[] = {
      {"temperature", params.temperature},
      {"top_p", params.top_p},
      {"min_p", params.min_p},
      {"repetition_penalty", params.repetition_penalty},
      {"presence_penalty", params.presence_penalty},
      {"frequency_penalty", params.frequency_penalty},
  };
  for (const auto& [name, value] : numbers) {
    if (!std::isfinite(value)) return Invalid(name, ": must be finite");
  }
  if (params.temperature < 0) return Invalid("temperature: ", params.temperature, " is below 0");
  if (params.repetition_penalty <= 0)
    return Invalid("repetition_penalty: ", params.repetition_penalty, " is not above 0");
  if (params.n < 1 || params.n > kMaxChoices)
    return Invalid("n: ", params.n, " is not in [1, ", kMaxChoices, "]");
  if (params.first_choice > static_cast<uint32_t>(kMaxChoices) - params.n)
    return Invalid("first_choice: ", params.first_choice, " with n=", params.n);
  if (params.max_tokens < 1) return Invalid("max_tokens: must be at least 1");
  if (params.logprobs < -1 || params.logprobs > kMaxLogprobs) {
    return Invalid("logprobs: ", params.logprobs, " is not in [-1, ", kMaxLogprobs, "]");
  }
  if (params.stop.size() > kMaxStopStrings)
    return Invalid("stop: more than ", kMaxStopStrings, " strings");
  for (const std::string& stop : params.stop) {
    if (stop.empty() || stop.size() > kMaxStopBytes)
      return Invalid("stop: a string is empty or above ", kMaxStopBytes, " bytes");
  }
  for (const auto& [id, bias] : params.logit_bias) {
    if (id >= static_cast<uint32_t>(vocab_size))
      return Invalid("logit_bias: token id ", id, " is not below ", vocab_size);
    if (!std::isfinite(bias)) return Invalid("logit_bias: must be finite");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateRequest(const EngineRequest& request, const RequestLimits& limits) {
  if (request.prompt_ids.empty()) return Invalid("prompt: no tokens");
  if (request.prompt_ids.size() > static_cast<size_t>(limits.max_prompt_tokens)) {
    return Invalid("prompt: prompt_tokens=", request.prompt_ids.size(),
                   " max_prompt_tokens=", limits.max_prompt_tokens);
  }
  for (uint32_t id : request.prompt_ids) {
    if (id >= static_cast<uint32_t>(limits.vocab_size)) {
      return Invalid("prompt: token id ", id, " is not below ", limits.vocab_size);
    }
  }
  // At least one token of the prompt is no output.
  if (request.resumed_tokens < 0 || request.resumed_tokens >= request.prompt_tokens()) {
    return Invalid("resumed_tokens: ", request.resumed_tokens,
                   " of prompt_tokens=", request.prompt_tokens());
  }
  if (request.params.n > 1 && request.resumed_tokens > 0)
    return Invalid("resumed_tokens: only with n = 1");
  if (request.params.max_tokens <= static_cast<uint32_t>(request.resumed_tokens)) {
    return Invalid("max_tokens: ", request.params.max_tokens,
                   " resumed_tokens=", request.resumed_tokens);
  }
  return ValidateSampling(request.params, limits.vocab_size);
}

void KvMemory::MatchPrefix(Sequence* sequence, int max_blocks) {
  BATON_CHECK(sequence->blocks.empty() && sequence->num_computed == 0);
  ExtendHashes(sequence);
  sequence->blocks = cache_.Match(sequence->tokens, sequence->hashes, max_blocks);
  sequence->num_computed = static_cast<int>(sequence->blocks.size()) * kv::kBlockTokens;
  sequence->num_cached = sequence->num_computed;
}

absl::Status KvMemory::Grow(Sequence* sequence, int num_tokens) {
  const int missing = kv::BlocksFor(num_tokens) - static_cast<int>(sequence->blocks.size());
  if (missing <= 0) return absl::OkStatus();
  BATON_ASSIGN_OR_RETURN(const std::vector<kv::BlockId> blocks, pool_.Allocate(missing));
  sequence->blocks.insert(sequence->blocks.end(), blocks.begin(), blocks.end());
  return absl::OkStatus();
}

void KvMemory::Shrink(Sequence* sequence, int num_tokens) {
  const auto keep = static_cast<size_t>(kv::BlocksFor(num_tokens));
  if (sequence->blocks.size() <= keep) return;
  pool_.Release(absl::MakeConstSpan(sequence->blocks).subspan(keep));
  sequence->blocks.resize(keep);
}

void KvMemory::Publish(Sequence* sequence) {
  ExtendHashes(sequence);
  const size_t full =
      std::min<size_t>(sequence->num_computed / kv::kBlockTokens, sequence->hashes.size());
  if (full <= sequence->num_published) return;
  cache_.Insert(sequence->tokens, absl::MakeConstSpan(sequence->hashes).first(full),
                absl::MakeConstSpan(sequence->blocks).first(full));
  sequence->num_published = full;
}

void KvMemory::Release(Sequence* sequence) {
  pool_.Release(sequence->blocks);
  sequence->blocks.clear();
  sequence->num_computed = 0;
  sequence->num_cached = 0;
  sequence->num_published = 0;
}

void KvMemory::ExtendHashes(Sequence* sequence) {
  sequence->hasher.Extend(sequence->tokens, &sequence->hashes);
}

}  // namespace baton::runtime
