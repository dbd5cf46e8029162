#include "cli/client_flags.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/types/optional.h"

ABSL_FLAG(absl::optional<float>,
          temperature,
          absl::nullopt,
          "0 is greedy. Unset: the model's default.");
ABSL_FLAG(absl::optional<int32_t>,
          top_k,
          absl::nullopt,
          "Sample from the k most likely tokens; 0 or -1 is off.");
ABSL_FLAG(
    absl::optional<float>,
    top_p,
    absl::nullopt,
    "Sample from the most likely tokens that hold this much probability, (0, 1]; 0 is greedy.");
ABSL_FLAG(absl::optional<float>,
          min_p,
          absl::nullopt,
          "Drop tokens less likely than this share of the most likely one, [0, 1].");
ABSL_FLAG(absl::optional<uint64_t>,
          seed,
          absl::nullopt,
          "Same seed, same answer. Unset: drawn by the router and shown in usage.");
ABSL_FLAG(absl::optional<float>,
          repetition_penalty,
          absl::nullopt,
          "Over prompt and output, > 0; 1 is off.");
ABSL_FLAG(absl::optional<float>, presence_penalty, absl::nullopt, "Over the output, [-2, 2].");
ABSL_FLAG(absl::optional<float>, frequency_penalty, absl::nullopt, "Over the output, [-2, 2].");
ABSL_FLAG(std::vector<std::string>,
          logit_bias,
          {},
          "ID:BIAS,... added to the logits of those token ids, [-100, 100].");
ABSL_FLAG(std::vector<std::string>, stop, {}, "Strings that end the answer, comma-separated.");
ABSL_FLAG(std::vector<std::string>,
          stop_token_ids,
          {},
          "Token ids that end the answer, comma-separated.");
ABSL_FLAG(absl::optional<bool>, ignore_eos, absl::nullopt, "Go on after the model's end tokens.");
ABSL_FLAG(absl::optional<uint32_t>,
          min_tokens,
          absl::nullopt,
          "No stop token before this many tokens.");
ABSL_FLAG(absl::optional<uint32_t>,
          max_tokens,
          absl::nullopt,
          "Most tokens of an answer. Unset: what is left of the context.");
ABSL_FLAG(absl::optional<uint32_t>,
          logprobs,
          absl::nullopt,
          "Log probabilities with this many alternatives, 0 to 20.");
ABSL_FLAG(absl::optional<uint32_t>, n, absl::nullopt, "Number of answers, 1 to 16.");

namespace baton::cli {
namespace {

absl::Status FillStops(v1::SamplingParams* sampling) {
  for (const std::string& stop : absl::GetFlag(FLAGS_stop)) sampling->add_stop(stop);
  for (const std::string& word : absl::GetFlag(FLAGS_stop_token_ids)) {
    uint32_t id = 0;
    if (!absl::SimpleAtoi(word, &id)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--stop-token-ids: \"", word, "\" is not a token id"));
    }
    sampling->add_stop_token_ids(id);
  }
  return absl::OkStatus();
}

absl::Status FillBias(v1::SamplingParams* sampling) {
  for (const std::string& word : absl::GetFlag(FLAGS_logit_bias)) {
    const std::vector<std::string> parts = absl::StrSplit(word, ':');
    uint32_t id = 0;
    float bias = 0;
    if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &id) ||
        !absl::SimpleAtof(parts[1], &bias)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--logit-bias: \"", word, "\" is not ID:BIAS"));
    }
    (*sampling->mutable_logit_bias())[id] = bias;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status FillSampling(v1::GenerateRequest* request) {
  v1::SamplingParams* const sampling = request->mutable_sampling();
  if (const auto value = absl::GetFlag(FLAGS_temperature)) sampling->set_temperature(*value);
  if (const auto value = absl::GetFlag(FLAGS_top_k)) sampling->set_top_k(*value);
  if (const auto value = absl::GetFlag(FLAGS_top_p)) sampling->set_top_p(*value);
  if (const auto value = absl::GetFlag(FLAGS_min_p)) sampling->set_min_p(*value);
  if (const auto value = absl::GetFlag(FLAGS_seed)) sampling->set_seed(*value);
  if (const auto value = absl::GetFlag(FLAGS_repetition_penalty))
    sampling->set_repetition_penalty(*value);
  if (const auto value = absl::GetFlag(FLAGS_presence_penalty))
    sampling->set_presence_penalty(*value);
  if (const auto value = absl::GetFlag(FLAGS_frequency_penalty))
    sampling->set_frequency_penalty(*value);
  if (const auto value = absl::GetFlag(FLAGS_ignore_eos)) sampling->set_ignore_eos(*value);
  if (const auto value = absl::GetFlag(FLAGS_min_tokens)) sampling->set_min_tokens(*value);
  if (const auto value = absl::GetFlag(FLAGS_max_tokens)) sampling->set_max_tokens(*value);
  if (const auto value = absl::GetFlag(FLAGS_logprobs)) sampling->set_logprobs(*value);
  if (const auto value = absl::GetFlag(FLAGS_n)) sampling->set_n(*value);
  if (absl::Status status = FillStops(sampling); !status.ok()) return status;
  return FillBias(sampling);
}

}  // namespace baton::cli
