#pragma once

// From logits to a token, by coupling: the token at a position is the Gumbel-max draw over the
// filtered distribution, with noise keyed (seed, choice, position, token id). The draw depends on
// nothing else, so ids are the same in any batch, on any worker, and with any speculation.

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/runtime/sampling_params.h"
#include "engine/runtime/token_edits.h"

namespace baton::runtime {

struct SampledToken {
  uint32_t id = 0;
  bool has_logprob = false;
  // Of the model's distribution (log-softmax of the raw logits), before penalties, temperature and
  // filters.
  float logprob = 0;
  std::vector<std::pair<uint32_t, float>> top;  // most likely first; ties by id
};

// Owns scratch memory, so one per engine thread. Engine thread only.
//
// The filtered distribution is made in this order; each step sees the result of the one before:
//   1. logit_bias   added.
//   2. penalties    repetition over prompt and output: divides positive logits, multiplies others;
//                   then frequency * count and presence, over the output, are subtracted.
//   3. min_tokens   below it, stop tokens are out.
//   4. greedy       temperature under kGreedyTemperature, or top_p 0: the highest logit; ties go to
//                   the lowest id. Steps 5 to 9 do not happen.
//   5. temperature  divides, in double.
//   6. top_k        the k highest; of equal ones the lowest ids stay: exactly k are left.
//   7. top_p        the shortest row of most likely tokens (ties by id) that holds top_p of what
//                   top_k left; always at least one.
//   8. min_p        tokens at least min_p times as likely as the most likely one.
//   9. draw         argmax of logit / temperature + Gumbel noise; ties go to the lowest id.
class Sampler {
 public:
  // `vocab_size` logits a row; ids from `num_tokens` (the tokenizer's size) up are padding rows and
  // never drawn.
  Sampler(int vocab_size, int num_tokens);

  // Draws the token at `position` (the first generated one has position prompt_tokens).
  // `output_tokens` is how many this choice has generated: below min_tokens stop tokens are not
  // drawn. `logits` is scratch: it is changed.
  // Errors: INTERNAL "logits: not finite" when any of the vocabulary's logits is NaN or infinite;
  // INVALID_ARGUMENT when a biased id is outside the vocabulary or min_tokens leaves no token.
  absl::StatusOr<SampledToken> Sample(const SamplingParams& params,
                                      uint32_t choice,
                                      uint32_t position,
                                      uint32_t output_tokens,
                                      const TokenCounts& counts,
                                      absl::Span<float> logits);

  // The id that Sample would draw, without log probabilities: for drafts. Errors: those of Sample.
  absl::StatusOr<uint32_t> SampleId(const SamplingParams& params,
                                    uint32_t choice,
                                    uint32_t position,
                                    uint32_t output_tokens,
                                    const TokenCounts& counts,
                                    absl::Span<float> logits);

 private:
  // Steps 1 to 9 over the vocabulary without padding rows.
  absl::StatusOr<uint32_t> Choose(const SamplingParams& params,
                                  uint32_t choice,
                                  uint32_t position,
                                  uint32_t output_tokens,
                                  const TokenCounts& counts,
                                  absl::Span<float> tokens);
  // Steps 1 to 3: makes edits_ and applies them.
  absl::Status Edit(const SamplingParams& params,
                    uint32_t output_tokens,
                    const TokenCounts& counts,
                    absl::Span<float> logits);
  // `total`: what all weights add up to, where top_p is a share of that.
  void CollectCandidates(const SamplingParams& params,
                         float best,
                         std::optional<double> total,
                         absl::Span<const float> logits);
  void KeepTopK(int32_t top_k);
  // Of candidates_, where there is no `total_of_all`.
  void KeepTopP(float best, double temperature, float top_p, std::optional<double> total_of_all);
  // Of candidates [first, last) keeps the most likely ones that hold `missing`; drops those behind.
  void KeepMass(size_t first, size_t last, double missing, float best, double per_logit);
  // Sets weights_, each candidate's part beside that of `best`; returns their sum.
  double Weigh(float best, double per_logit);
  uint32_t Draw(const SamplingParams& params, uint32_t choice, uint32_t position, float best) const;
  // The logit that the model gave, before edits_.
  float RawLogit(absl::Span<const float> logits, uint32_t id) const;

  int vocab_size_;
  int num_tokens_;
  std::vector<std::pair<float, uint32_t>> candidates_;  // (logit, id)
  std::vector<double> weights_;                         // of the candidates
  std::vector<float> maxima_;                           // of blocks of logits
  std::vector<ops::TokenEdit> edits_;                   // of the row
};

// What Sample answers for logits that are not finite, and where no token may be drawn; for those
// who draw elsewhere.
absl::Status NotFinite();
absl::Status NoTokenLeft();

// The noise of a draw: standard Gumbel, a pure function of its key. Within (-3.7, 36.8).
double GumbelNoise(uint64_t seed, uint32_t choice, uint32_t position, uint32_t id);

}  // namespace baton::runtime
