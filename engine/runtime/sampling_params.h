#pragma once

// Resolved sampling parameters of one request: defaults applied, ranges checked by the router.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace baton::runtime {

struct SamplingParams {
  float temperature = 1.0f;  // below kGreedyTemperature: greedy
  int32_t top_k = 0;         // <= 0: off
  float top_p = 1.0f;        // 0: greedy
  float min_p = 0.0f;
  uint64_t seed = 0;
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  std::vector<std::pair<uint32_t, float>> logit_bias;
  std::vector<std::string> stop;         // byte strings
  std::vector<uint32_t> stop_token_ids;  // the user's and, unless ignore_eos, the model's
  uint32_t min_tokens = 0;
  uint32_t max_tokens = 1;
  int32_t logprobs = -1;  // -1: none; else number of alternatives
  uint32_t n = 1;
  // Number of the first of them, for the noise: a choice that is resumed by itself keeps its own.
  uint32_t first_choice = 0;
};

// Dividing logits by less than this overflows float; such a temperature is greedy.
inline constexpr float kGreedyTemperature = 1e-5f;

}  // namespace baton::runtime
