#pragma once

// How far logits of a text move, and what becomes of its perplexity.

#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/support/engine_steps.h"

namespace baton::testing_support {

using Logits = std::vector<std::vector<float>>;

// Sums over all scored tokens of all windows.
struct Quality {
  double nll = 0;
  double logit_squares = 0;       // of the logits' distance from their row's mean
  double difference_squares = 0;  // of that distance's change against the reference run
  int64_t num_tokens = 0;
  int64_t num_logits = 0;

  double mean_nll() const { return nll / static_cast<double>(num_tokens); }
  double logit_rms() const { return std::sqrt(logit_squares / static_cast<double>(num_logits)); }
  double difference_rms() const {
    return std::sqrt(difference_squares / static_cast<double>(num_logits));
  }
};

inline double NegativeLogLikelihood(const std::vector<float>& logits, uint32_t target) {
  const double best = logits[ArgMax(logits)];
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - best);
  return best + std::log(sum) - logits[target];
}

inline double Mean(const std::vector<float>& row) {
  double sum = 0;
  for (const float value : row) sum += value;
  return sum / static_cast<double>(row.size());
}

// Over the tokens that have a next one in their window.
inline Quality CompareLogits(const Logits& logits,
                             const Logits& expected,
                             const std::vector<uint32_t>& ids,
                             size_t window) {
  Quality quality;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (i % window == window - 1) continue;
    quality.nll += NegativeLogLikelihood(logits[i], ids[i + 1]);
    quality.num_tokens += 1;
    quality.num_logits += static_cast<int64_t>(logits[i].size());
    const double mean = Mean(logits[i]);
    const double expected_mean = Mean(expected[i]);
    for (size_t id = 0; id < logits[i].size(); ++id) {
      const double expected_distance = expected[i][id] - expected_mean;
      const double difference = (logits[i][id] - mean) - expected_distance;
      quality.logit_squares += expected_distance * expected_distance;
      quality.difference_squares += difference * difference;
    }
  }
  return quality;
}

}  // namespace baton::testing_support
