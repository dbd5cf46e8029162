#include "router/ttft_model.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

namespace baton::router {
namespace {

constexpr double kForget = 0.98;         // per sample: the last 50 count
constexpr double kFloorSeconds = 0.001;  // errors below it are noise of timers and threads
constexpr double kTokenScale = 1e-3;
constexpr double kPairScale = 1e-6;
// A larger set of coefficients must explain this share of the samples better to be preferred: with
// prompts of one length only, any set fits, and the linear one goes wrong least elsewhere.
constexpr double kGain = 1e-4;

double Pairs(double cached, double prompt) { return prompt * prompt - cached * cached; }

// Gaussian elimination with pivoting of the `n` equations that `used` picks. False: singular.
bool Solve(const std::array<std::array<double, 3>, 3>& ata,
           const std::array<double, 3>& atb,
           const int* used,
           int n,
           double* x) {
  double a[3][4];
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) a[i][j] = ata[used[i]][used[j]];
    a[i][i] *= 1 + 1e-12;
    a[i][n] = atb[used[i]];
  }
  for (int i = 0; i < n; ++i) {
    int pivot = i;
    for (int r = i + 1; r < n; ++r) {
      if (std::abs(a[r][i]) > std::abs(a[pivot][i])) pivot = r;
    }
    if (std::abs(a[pivot][i]) < 1e-18) return false;
    std::swap(a[i], a[pivot]);
    for (int r = 0; r < n; ++r) {
      if (r == i) continue;
      const double factor = a[r][i] / a[i][i];
      for (int c = i; c <= n; ++c) a[r][c] -= factor * a[i][c];
    }
  }
  for (int i = 0; i < n; ++i) x[i] = a[i][n] / a[i][i];
  return true;
}

}  // namespace

double TtftCoefficients::Seconds(uint32_t cached_tokens, uint32_t prompt_tokens) const {
  const double prompt = prompt_tokens;
  const double cached = std::min(cached_tokens, prompt_tokens);
  return base_s + per_token_s * (prompt - cached) + per_token2_s * Pairs(cached, prompt);
}

void TtftModel::Observe(uint32_t cached_tokens, uint32_t prompt_tokens, double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || prompt_tokens == 0) return;
  const double error = std::abs(coefficients_.Seconds(cached_tokens, prompt_tokens) - seconds);
  if (fitted()) {
    mean_abs_error_s_ =
        num_samples_ == kSamplesNeeded ? error : 0.9 * mean_abs_error_s_ + 0.1 * error;
  }
  const double cached = std::min(cached_tokens, prompt_tokens);
  const double prompt = prompt_tokens;
  const double weight = 1 / std::pow(seconds + kFloorSeconds, 2);
  const std::array<double, 3> row = {1, (prompt - cached) * kTokenScale,
                                     Pairs(cached, prompt) * kPairScale};
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 3; ++j) ata_[i][j] = kForget * ata_[i][j] + weight * row[i] * row[j];
    atb_[i] = kForget * atb_[i] + weight * row[i] * seconds;
  }
  btb_ = kForget * btb_ + weight * seconds * seconds;
  ++num_samples_;
  Fit();
}

// The best of all sets of coefficients whose free solution has none below zero.
void TtftModel::Fit() {
  static constexpr int kSets[7][3] = {{1, -1, -1}, {0, 1, -1}, {1, 2, -1}, {0, -1, -1},
                                      {2, -1, -1}, {0, 2, -1}, {0, 1, 2}};
  double best = -1;
  for (const auto& set : kSets) {
    const int n = static_cast<int>(std::find(set, set + 3, -1) - set);
    double x[3];
    if (!Solve(ata_, atb_, set, n, x)) continue;
    if (std::any_of(x, x + n, [](double v) { return !(v >= 0); })) continue;
    double explained = 0;  // btb - |Ax - b|^2, at the minimum
    for (int i = 0; i < n; ++i) explained += x[i] * atb_[set[i]];
    if (best >= 0 && explained <= best + kGain * btb_) continue;
    best = explained;
    double all[3] = {0, 0, 0};
    for (int i = 0; i < n; ++i) all[set[i]] = x[i];
    coefficients_ = {all[0], all[1] * kTokenScale, all[2] * kPairScale};
  }
}

}  // namespace baton::router
