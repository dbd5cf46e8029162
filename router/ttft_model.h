#pragma once

// How long a worker takes to compute a prompt: fitted online to what was measured.

#include <array>
#include <cstdint>

namespace baton::router {

// T(n) = C + k1*n + k2*n^2. Of a prompt whose first tokens are cached only the rest is computed,
// but each of its tokens attends to all before it: T = C + k1*(n - cached) + k2*(n^2 - cached^2).
struct TtftCoefficients {
  double base_s = 0;
  double per_token_s = 1e-4;  // until something was measured
  double per_token2_s = 0;

  double Seconds(uint32_t cached_tokens, uint32_t prompt_tokens) const;
};

// Least squares of the relative error, so that long prompts do not outvote short ones, with old
// samples forgotten; no coefficient is ever negative. Thread-compatible.
class TtftModel {
 public:
  // `seconds`: from the first step of the prompt to its first token.
  void Observe(uint32_t cached_tokens, uint32_t prompt_tokens, double seconds);

  const TtftCoefficients& coefficients() const { return coefficients_; }
  // Enough was measured for its predictions to be acted upon.
  bool fitted() const { return num_samples_ >= kSamplesNeeded; }
  uint64_t num_samples() const { return num_samples_; }
  // Of the predictions made just before each observation, old ones forgotten.
  double mean_abs_error_s() const { return mean_abs_error_s_; }

  static constexpr uint64_t kSamplesNeeded = 8;

 private:
  void Fit();

  // Weighted normal equations over (1, tokens / 10^3, token pairs / 10^6).
  std::array<std::array<double, 3>, 3> ata_{};
  std::array<double, 3> atb_{};
  double btb_ = 0;
  uint64_t num_samples_ = 0;
  double mean_abs_error_s_ = 0;
  TtftCoefficients coefficients_;
};

}  // namespace baton::router
