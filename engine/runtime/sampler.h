#pragma once

// From logits to a token, by coupling: the token at a position is the Gumbel-max draw over the filtered distribution,
// with noise keyed (seed, choice, position, token id). The draw depends on nothing else, so ids are the same in any
// batch, on any worker, and with any speculation.

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/runtime/sampling_params.h"

namespace baton::runtime {

struct SampledToken {
  uint32_t id = 0;
  bool has_logprob = false;
  // Of the model's distribution (log-softmax of the raw logits), before penalties, temperature and filters.
  float logprob = 0;
  std::vector<std::pair<uint32_t, float>> top;  // most likely first; ties by id
};

// What penalties need to know of one choice: counts of prompt and output tokens. Thread-compatible.
class TokenCounts {
 public:
  // `prompt` counts for the repetition penalty only.
  void AddPrompt(absl::Span<const uint32_t> ids);
  void AddOutput(uint32_t id);
  // Takes back the last addition of `id` (a rejected draft).
  void RemoveOutput(uint32_t id);

  struct Count {
    bool in_prompt = false;
    int32_t output = 0;
  };
  const absl::flat_hash_map<uint32_t, Count>& counts() const { return counts_; }

 private:
  absl::flat_hash_map<uint32_t, Count> counts_;
};

// Owns scratch memory, so one per engine thread. Engine thread only.
class Sampler {
 public:
  // `vocab_size` logits a row; ids from `num_tokens` (the tokenizer's size) up are padding rows and never drawn.
  Sampler(int vocab_size, int num_tokens);

  // Draws the token at `position` (the first generated one has position prompt_tokens). `output_tokens` is how many this
  // choice has generated: below min_tokens stop tokens are not drawn. `logits` is scratch: it is changed.
  // Errors: INTERNAL "logits: not finite" when any of the vocabulary's logits is NaN or infinite.
  absl::StatusOr<SampledToken> Sample(const SamplingParams& params, uint32_t choice, uint32_t position,
                                      uint32_t output_tokens, const TokenCounts& counts, absl::Span<float> logits);

 private:
  int vocab_size_;
  int num_tokens_;
  std::vector<std::pair<float, uint32_t>> candidates_;
};

}  // namespace baton::runtime
