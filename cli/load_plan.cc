#include "cli/load_plan.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace baton::cli {
namespace {

constexpr double kMaxTokens = 10'000'000;

// Of a prefix group: FNV-1a.
uint64_t HashOf(absl::string_view text) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211u;
  return hash;
}

bool ParseNumber(absl::string_view text, double least, double* out) {
  return absl::SimpleAtod(text, out) && *out >= least && *out <= kMaxTokens;
}

}  // namespace

// SplitMix64.
uint64_t Dice::Next() {
  uint64_t z = state_ += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

double Dice::Uniform() { return (static_cast<double>(Next() >> 11) + 0.5) * 0x1p-53; }

double Dice::Normal() {  // Box and Muller
  const double radius = std::sqrt(-2 * std::log(Uniform()));
  return radius * std::cos(2 * std::numbers::pi * Uniform());
}

absl::StatusOr<LengthDistribution> LengthDistribution::Parse(absl::string_view text) {
  LengthDistribution out;
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ':');
  bool good = false;
  if (parts.size() == 3) {
    out.kind_ = parts[0] == "normal" ? Kind::kNormal : Kind::kLogNormal;
    good = (parts[0] == "normal" || parts[0] == "lognormal") && ParseNumber(parts[1], 1, &out.a_) &&
           ParseNumber(parts[2], 0, &out.b_);
  } else if (parts.size() == 1) {
    const std::vector<absl::string_view> ends = absl::StrSplit(text, '-');
    good = ends.size() <= 2 && ParseNumber(ends.front(), 1, &out.a_) &&
           ParseNumber(ends.back(), out.a_, &out.b_) && out.a_ == std::floor(out.a_) &&
           out.b_ == std::floor(out.b_);
  }
  if (good) return out;
  return absl::InvalidArgumentError(absl::StrCat("\"", text,
                                                 "\"; want N, MIN-MAX, normal:MEAN:DEVIATION or ",
                                                 "lognormal:MEDIAN:SIGMA, 1 or more tokens"));
}

uint32_t LengthDistribution::Draw(Dice* dice) const {
  double value = 0;
  switch (kind_) {
    case Kind::kUniform:
      value = a_ + std::floor(dice->Uniform() * (b_ - a_ + 1));
      break;
    case Kind::kNormal:
      value = std::round(a_ + b_ * dice->Normal());
      break;
    case Kind::kLogNormal:
      value = std::round(a_ * std::exp(b_ * dice->Normal()));
      break;
  }
  return static_cast<uint32_t>(std::clamp(value, 1.0, kMaxTokens));
}

std::vector<TraceRequest> MakePlan(const LoadOptions& options) {
  // Apart, so that another rate meets the same requests.
  Dice times(options.seed), lengths(options.seed ^ 0x5851f42d4c957f2du);
  std::vector<TraceRequest> out(options.requests);
  double now = 0;
  for (TraceRequest& request : out) {
    if (options.rate > 0) now -= std::log(times.Uniform()) / options.rate;
    request.arrival_s = now;
    request.prompt_tokens = options.prompt_tokens.Draw(&lengths);
    request.output_tokens = options.output_tokens.Draw(&lengths);
  }
  return out;
}

std::vector<uint32_t> PromptIds(const TraceRequest& request,
                                uint64_t number,
                                uint64_t seed,
                                uint32_t vocab_size) {
  const auto draw = [&](Dice* dice) {
    return static_cast<uint32_t>(dice->Next() % std::max<uint32_t>(1, vocab_size));
  };
  std::vector<uint32_t> ids(request.prompt_tokens);
  Dice shared(seed ^ HashOf(request.prefix_group)), own(seed + (number + 1) * 0xd1342543de82ef95u);
  const size_t common =
      request.prefix_group.empty() ? 0 : std::min<size_t>(request.prefix_tokens, ids.size());
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = draw(i < common ? &shared : &own);
  return ids;
}

}  // namespace baton::cli
