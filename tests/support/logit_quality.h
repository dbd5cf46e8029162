#pragma once

// How far logits of a text move, and what becomes of its perplexity.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "gtest/gtest.h"

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

// Logits have moved by no more than `moved_max` (root of the mean square), if they have, and
// perplexity by what that explains: a row of logits that moves by d changes -log p of the next
// token by at most d * sqrt(2) (the token, and the mean it is measured against) with any sign,
// which averages out over N tokens, four standard errors being allowed for, and by d^2 / 2 always
// in the same direction (second order of log-sum-exp). `exact_nll`: mean_nll() of the reference
// run.
inline void ExpectMovedWithin(const std::string& what,
                              const Quality& quality,
                              double exact_nll,
                              double moved_max) {
  const double change = quality.mean_nll() - exact_nll;
  const double d = quality.difference_rms();
  const double change_max =
      d * d / 2 + 4 * std::sqrt(2.0) * d / std::sqrt(static_cast<double>(quality.num_tokens));
  std::printf(
      "%s perplexity=%.4f (%+.3f %%, bound %.3f %%) logit_rms=%.3f moved_by=%.4f (bound %.4f) "
      "tokens=%ld\n",
      what.c_str(), std::exp(quality.mean_nll()), 100 * std::expm1(change),
      100 * std::expm1(change_max), quality.logit_rms(), d, moved_max,
      static_cast<long>(quality.num_tokens));
  EXPECT_GT(d, 0);
  EXPECT_LT(d, moved_max);
  EXPECT_LT(std::abs(change), change_max);
}

}  // namespace baton::testing_support
