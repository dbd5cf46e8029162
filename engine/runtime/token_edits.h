#pragma once

// Which logits a request changes before a token is drawn, and by what: logit_bias, penalties, stop
// tokens below min_tokens. Said once, for the sampler and for a device that draws by itself.

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/ops/sample.h"
#include "engine/runtime/sampling_params.h"

namespace baton::runtime {

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

// Whether the edits depend on the counts of tokens.
bool HasPenalties(const SamplingParams& params);

// Appends one edit for each token below `num_tokens` whose logit changes, in any order. In an edit
// the bias comes first, then the penalties, then the mask. `output_tokens` is how many this choice
// has generated. Of several biases of one token the sum counts. Errors: INVALID_ARGUMENT when a
// biased id is not below num_tokens; nothing is appended then.
absl::Status AppendTokenEdits(const SamplingParams& params,
                              uint32_t output_tokens,
                              const TokenCounts& counts,
                              int num_tokens,
                              std::vector<ops::TokenEdit>* edits);

}  // namespace baton::runtime
