#include "engine/runtime/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::runtime {
namespace {

// Noise spans less than this (see UniformFromBits), so a token whose scaled logit lies further
// below the best one cannot win the draw: leaving it out changes nothing.
constexpr double kNoiseSpan = 41.0;

constexpr float kMasked = -std::numeric_limits<float>::infinity();

using Candidate = std::pair<float, uint32_t>;

// Likely before unlikely; of equal logits the lower id first. A type, so that algorithms inline it.
struct Before {
  bool operator()(const Candidate& a, const Candidate& b) const {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  }
};

// The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;

// One SplitMix64 stream per (seed, choice, position); the token id says which of its numbers.
uint64_t StreamKey(uint64_t seed, uint32_t choice, uint32_t position) {
  const uint64_t seeded = Mix(seed + kGolden);
  return Mix(seeded ^ Mix((uint64_t{choice} << 32 | position) + kGolden));
}

uint64_t NoiseBits(uint64_t stream_key, uint32_t id) {
  return Mix(stream_key + (uint64_t{id} + 1) * kGolden);
}

// Odd multiples of 2^-53: exact in double, never 0 or 1.
double UniformFromBits(uint64_t bits) { return static_cast<double>((bits >> 11) | 1) * 0x1p-53; }

// -log(-log(1 - u)): the fine end of u makes the large values, which decide the draw.
double GumbelFromBits(uint64_t bits) { return -std::log(-std::log1p(-UniformFromBits(bits))); }

// Above GumbelFromBits(bits), and cheap: -log1p(-u) >= u >= 2^floor(log2 u). Spares most tokens the
// two logarithms.
double GumbelBound(uint64_t bits) {
  constexpr double kLn2 = 0.69314718055994531;
  constexpr double kRounding = 1e-9;
  return kLn2 * (1 + std::countl_zero(bits | (uint64_t{1} << 11))) + kRounding;
}

// Four lanes, which every x86-64 has: plain loops over a vocabulary of 150,000 would cost 0.7 ms at
// -O2.
using Floats = float __attribute__((vector_size(16)));
using Ints = int32_t __attribute__((vector_size(16)));
constexpr size_t kLanes = 4;

using Doubles = double __attribute__((vector_size(16)));
using Longs = int64_t __attribute__((vector_size(16)));

// e^x of two x in [-700, 700], within 1e-15 of it; e^0 is 1 exactly. libm's takes one at a time.
inline __attribute__((always_inline)) Doubles Exp(Doubles x) {
  constexpr double kRoundMagic = 0x1.8p52;  // leaves the nearest integer in the low bits
  const Doubles magic = x * 1.4426950408889634 + kRoundMagic;
  const Doubles n = magic - kRoundMagic;
  const Doubles r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  const Doubles r2 = r * r, r4 = r2 * r2;
  // Taylor's series to r^12 / 12! (|r| <= 0.35: the rest is below 1e-16), in pairs.
  const Doubles a = (r * (1.0 / 6) + 0.5) * r2 + (r + 1.0);
  const Doubles b = (r * (1.0 / 5040) + 1.0 / 720) * r2 + (r * (1.0 / 120) + 1.0 / 24);
  const Doubles c =
      (r * (1.0 / 39916800) + 1.0 / 3628800) * r2 + (r * (1.0 / 362880) + 1.0 / 40320);
  const Doubles p = (c + r4 * (1.0 / 479001600)) * (r4 * r4) + b * r4 + a;
  // Times 2^n: the integer is added to the exponent.
  return reinterpret_cast<Doubles>(reinterpret_cast<Longs>(p) +
                                   (reinterpret_cast<Longs>(magic) << 52));
}

bool AllFinite(absl::Span<const float> values) {
  constexpr int32_t kExponent = 0x7f800000;
  Ints bad = {};
  size_t i = 0;
  for (; i + kLanes <= values.size(); i += kLanes) {
    Ints bits;
    std::memcpy(&bits, &values[i], sizeof(bits));
    bad |= (bits & kExponent) == kExponent;
  }
  bool any_bad = false;
  for (size_t lane = 0; lane < kLanes; ++lane) any_bad |= bad[lane] != 0;
  for (; i < values.size(); ++i) any_bad |= !std::isfinite(values[i]);
  return !any_bad;
}

// Is any of 16 values at least `limit`?
bool AnyReaches(const float* values, float limit) {
  Ints reaches = {};
  for (size_t i = 0; i < 16; i += kLanes) {
    Floats next;
    std::memcpy(&next, values + i, sizeof(next));
    reaches |= next >= limit;
  }
  return ((reaches[0] | reaches[1]) | (reaches[2] | reaches[3])) != 0;
}

float Max(absl::Span<const float> values) {
  Floats best = Floats{} + values[0];
  size_t i = 0;
  for (; i + kLanes <= values.size(); i += kLanes) {
    Floats next;
    std::memcpy(&next, &values[i], sizeof(next));
    best = next > best ? next : best;
  }
  float result = values[0];
  for (size_t lane = 0; lane < kLanes; ++lane) result = std::max(result, best[lane]);
  for (; i < values.size(); ++i) result = std::max(result, values[i]);
  return result;
}

// Highest logit, lowest id among equals.
uint32_t ArgMax(absl::Span<const float> logits) {
  return static_cast<uint32_t>(std::find(logits.begin(), logits.end(), Max(logits)) -
                               logits.begin());
}

bool IsGreedy(const SamplingParams& params) {
  return params.temperature < kGreedyTemperature || params.top_p == 0;
}

// x below -700: so little that any tiny value serves.
double LogSumExp(absl::Span<const float> logits) {
  const double best = Max(logits);
  const auto offset = [&](size_t i) { return std::max(logits[i] - best, -700.0); };
  Doubles sums = {};
  size_t i = 0;
  for (; i + 2 <= logits.size(); i += 2) sums += Exp(Doubles{offset(i), offset(i + 1)});
  if (i < logits.size()) sums[0] += Exp(Doubles{offset(i), 0})[0];
  return best + std::log(sums[0] + sums[1]);
}

// Eight lanes, for what costs most; where they are there is decided at run time. Lane by lane the
// arithmetic is the same with either instruction set.
using WideFloats = float __attribute__((vector_size(32)));
using WideInts = int32_t __attribute__((vector_size(32)));
constexpr size_t kWideLanes = 8;

// x becomes e^x: eight x in [-87, 0], within 2e-7 of it. A call would cost as much as it does.
inline __attribute__((always_inline)) void ToExp(WideFloats& x) {
  constexpr float kRoundMagic = 0x1.8p23f;  // leaves the nearest integer in the low bits
  const WideFloats magic = x * 1.44269504f + kRoundMagic;
  const WideFloats n = magic - kRoundMagic;
  const WideFloats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  // Taylor's series to r^7 / 7! (|r| <= 0.35).
  WideFloats p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  x = reinterpret_cast<WideFloats>(reinterpret_cast<WideInts>(p) +
                                   (reinterpret_cast<WideInts>(magic) << 23));
}

// The first `count` (up to eight) of `logits`, each as e^((logit - best) * per_logit), added to
// `sums`.
inline __attribute__((always_inline)) void AddWeights(
    const float* logits, size_t count, float best, float per_logit, WideFloats& sums) {
  WideFloats weights = WideFloats{} - std::numeric_limits<float>::infinity();
  std::memcpy(&weights, logits, count * sizeof(float));
  weights = (weights - best) * per_logit;
  weights = weights > -87.0f ? weights : WideFloats{} - 87.0f;
  ToExp(weights);
  sums += weights;
}

inline __attribute__((always_inline)) double SumOfWeightsIn(const float* logits,
                                                            size_t size,
                                                            float best,
                                                            float per_logit) {
  constexpr size_t kBlock = 16 * kWideLanes;  // more than few floats are added up in double
  double sum = 0;
  for (size_t first = 0; first < size; first += kBlock) {
    const size_t end = std::min(first + kBlock, size);
    WideFloats block = {};
    size_t i = first;
    for (; i + kWideLanes <= end; i += kWideLanes)
      AddWeights(logits + i, kWideLanes, best, per_logit, block);
    if (i < end) AddWeights(logits + i, end - i, best, per_logit, block);
    sum += ((double{block[0]} + block[1]) + (double{block[2]} + block[3])) +
           ((double{block[4]} + block[5]) + (double{block[6]} + block[7]));
  }
  return sum;
}

__attribute__((target("avx2"))) double SumOfWeightsAvx2(const float* logits,
                                                        size_t size,
                                                        float best,
                                                        float per_logit) {
  return SumOfWeightsIn(logits, size, best, per_logit);
}

// Sum of e^((logit - best) * per_logit), where `best` is the highest: top_p needs it of the whole
// vocabulary, to seven digits, where single weights are needed of few.
double SumOfWeights(absl::Span<const float> logits, float best, float per_logit) {
  static const bool kAvx2 = __builtin_cpu_supports("avx2") != 0;
  return kAvx2 ? SumOfWeightsAvx2(logits.data(), logits.size(), best, per_logit)
               : SumOfWeightsIn(logits.data(), logits.size(), best, per_logit);
}

// The `count` most likely of logits, most likely first.
std::vector<Candidate> Top(absl::Span<const float> logits, size_t count) {
  std::vector<Candidate> top;
  top.reserve(count + 1);
  for (uint32_t id = 0; id < logits.size() && count > 0; ++id) {
    const Candidate candidate{logits[id], id};
    if (top.size() == count && !Before()(candidate, top.back())) continue;
    top.insert(std::upper_bound(top.begin(), top.end(), candidate, Before()), candidate);
    if (top.size() > count) top.pop_back();
  }
  return top;
}

// The largest float that at least `count` logits reach, or a lower one: the count-th largest of the
// maxima of blocks. -infinity when there are fewer blocks.
float ReachedBy(absl::Span<const float> logits, size_t count, std::vector<float>* maxima) {
  constexpr size_t kBlock = 64;
  maxima->clear();
  for (size_t i = 0; i < logits.size(); i += kBlock)
    maxima->push_back(Max(logits.subspan(i, kBlock)));
  if (count > maxima->size()) return kMasked;
  const auto at = maxima->begin() + static_cast<ptrdiff_t>(count - 1);
  std::nth_element(maxima->begin(), at, maxima->end(), std::greater<float>());
  return *at;
}

float Clamped(double logit) {
  constexpr double kLimit = std::numeric_limits<float>::max();
  return static_cast<float>(std::clamp(logit, -kLimit, kLimit));
}

// The logit that takes the place of edit.raw.
float Edited(const SamplingParams& params, const ops::TokenEdit& edit) {
  if (edit.masked) return kMasked;
  float logit = edit.raw;
  if (edit.has_bias) logit = Clamped(double{logit} + edit.bias);
  if (!edit.penalised) return logit;
  double value = logit;
  value = value > 0 ? value / params.repetition_penalty : value * params.repetition_penalty;
  if (edit.output_count > 0)
    value -= double{params.frequency_penalty} * edit.output_count + params.presence_penalty;
  return Clamped(value);
}

// The lowest finite float that is not below `limit`: both say the same of every finite float.
float FloatNotBelow(double limit) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto nearest =
      static_cast<float>(std::max(limit, double{std::numeric_limits<float>::lowest()}));
  return nearest < limit ? std::nextafter(nearest, kInfinity) : nearest;
}

}  // namespace

double GumbelNoise(uint64_t seed, uint32_t choice, uint32_t position, uint32_t id) {
  return GumbelFromBits(NoiseBits(StreamKey(seed, choice, position), id));
}

absl::Status NotFinite() { return absl::InternalError("logits: not finite"); }

absl::Status NoTokenLeft() {
  return absl::InvalidArgumentError("min_tokens: every token is a stop token");
}

Sampler::Sampler(int vocab_size, int num_tokens)
    : vocab_size_(vocab_size), num_tokens_(std::min(num_tokens, vocab_size)) {
  BATON_CHECK(num_tokens_ > 0);
  candidates_.reserve(num_tokens_);
  weights_.reserve(num_tokens_);
  maxima_.reserve(num_tokens_ / 64 + 1);
}

absl::StatusOr<SampledToken> Sampler::Sample(const SamplingParams& params,
                                             uint32_t choice,
                                             uint32_t position,
                                             uint32_t output_tokens,
                                             const TokenCounts& counts,
                                             absl::Span<float> logits) {
  BATON_CHECK(static_cast<int>(logits.size()) == vocab_size_);
  if (!AllFinite(logits)) return NotFinite();
  const absl::Span<float> tokens = logits.first(num_tokens_);

  SampledToken result;
  double log_sum = 0;
  if (params.logprobs >= 0) {
    log_sum = LogSumExp(logits);
    for (const auto& [logit, id] : Top(tokens, params.logprobs)) {
      result.top.emplace_back(id, static_cast<float>(logit - log_sum));
    }
  }
  BATON_ASSIGN_OR_RETURN(result.id,
                         Choose(params, choice, position, output_tokens, counts, tokens));
  if (params.logprobs >= 0) {
    result.has_logprob = true;
    result.logprob = static_cast<float>(RawLogit(tokens, result.id) - log_sum);
  }
  return result;
}

absl::StatusOr<uint32_t> Sampler::SampleId(const SamplingParams& params,
                                           uint32_t choice,
                                           uint32_t position,
                                           uint32_t output_tokens,
                                           const TokenCounts& counts,
                                           absl::Span<float> logits) {
  BATON_CHECK(static_cast<int>(logits.size()) == vocab_size_);
  if (!AllFinite(logits)) return NotFinite();
  return Choose(params, choice, position, output_tokens, counts, logits.first(num_tokens_));
}

absl::StatusOr<uint32_t> Sampler::Choose(const SamplingParams& params,
                                         uint32_t choice,
                                         uint32_t position,
                                         uint32_t output_tokens,
                                         const TokenCounts& counts,
                                         absl::Span<float> tokens) {
  BATON_RETURN_IF_ERROR(Edit(params, output_tokens, counts, tokens));
  const uint32_t greedy = ArgMax(tokens);
  if (IsGreedy(params)) return greedy;
  const float best = tokens[greedy];
  // Behind a top_k, top_p is a share of what that has kept.
  std::optional<double> total;
  if (params.top_k <= 0 && params.top_p < 1)
    total = SumOfWeights(tokens, best, 1 / params.temperature);
  CollectCandidates(params, best, total, tokens);
  KeepTopK(params.top_k);
  KeepTopP(best, params.temperature, params.top_p, total);
  return Draw(params, choice, position, best);
}

absl::Status Sampler::Edit(const SamplingParams& params,
                           uint32_t output_tokens,
                           const TokenCounts& counts,
                           absl::Span<float> logits) {
  edits_.clear();
  BATON_RETURN_IF_ERROR(
      AppendTokenEdits(params, output_tokens, counts, static_cast<int>(logits.size()), &edits_));
  bool any_masked = false;
  for (ops::TokenEdit& edit : edits_) {
    edit.raw = logits[edit.id];
    logits[edit.id] = Edited(params, edit);
    any_masked = any_masked || edit.masked;
  }
  if (any_masked && Max(logits) == kMasked) return NoTokenLeft();
  return absl::OkStatus();
}

void Sampler::CollectCandidates(const SamplingParams& params,
                                float best,
                                std::optional<double> total,
                                absl::Span<const float> logits) {
  // At least every token that could be drawn, and masked ones never. A tiny temperature makes the
  // limit equal to `best`: then only its ties are left.
  double limit = best - kNoiseSpan * params.temperature;
  // What min_p drops, with room for rounding; but top_p wants its mass.
  if (params.min_p > 0 && params.top_p >= 1)
    limit = std::max(limit, best + (std::log(double{params.min_p}) - 1e-3) * params.temperature);
  // All tokens below this share hold less than what top_p leaves out, so all of them are: few of a
  // usual vocabulary are left.
  if (total.has_value()) {
    const double least = (1.0 - params.top_p) * *total / static_cast<double>(logits.size());
    limit = std::max(limit, best + (std::log(least) - 1e-3) * params.temperature);
  }
  float lowest = FloatNotBelow(limit);
  if (params.top_k > 0) lowest = std::max(lowest, ReachedBy(logits, params.top_k, &maxima_));
  constexpr size_t kBlock = 16;
  size_t count =
      0;  // few of many: those that are there are written anew, and more are made in time
  for (uint32_t id = 0; id < logits.size();) {
    const auto end = static_cast<uint32_t>(std::min<size_t>(id + kBlock, logits.size()));
    if (end - id == kBlock && !AnyReaches(&logits[id], lowest)) {
      id = end;
      continue;
    }
    if (candidates_.size() < count + kBlock) candidates_.resize(2 * count + kBlock);
    for (; id < end; ++id) {
      candidates_[count] = {logits[id], id};
      count += logits[id] >= lowest;
    }
  }
  candidates_.resize(count);
}

void Sampler::KeepTopK(int32_t top_k) {
  if (top_k <= 0 || static_cast<size_t>(top_k) >= candidates_.size()) return;
  std::nth_element(candidates_.begin(), candidates_.begin() + top_k, candidates_.end(), Before());
  candidates_.resize(top_k);
}

double Sampler::Weigh(float best, double per_logit) {
  weights_.resize(candidates_.size());
  const auto scaled = [&](size_t i) { return (double{candidates_[i].first} - best) * per_logit; };
  Doubles sums = {};
  size_t i = 0;
  for (; i + 2 <= candidates_.size(); i += 2) {
    const Doubles weights = Exp(Doubles{scaled(i), scaled(i + 1)});
    weights_[i] = weights[0];
    weights_[i + 1] = weights[1];
    sums += weights;
  }
  if (i < candidates_.size()) sums[0] += weights_[i] = Exp(Doubles{scaled(i), 0})[0];
  return sums[0] + sums[1];
}

// All tokens below `least` hold less than what may be left out, so all of them are: this leaves few
// of a usual vocabulary. The rest falls into buckets by logit; only one of them holds the last
// token to keep and needs an order, so there is no full sort.
void Sampler::KeepTopP(float best,
                       double temperature,
                       float top_p,
                       std::optional<double> total_of_all) {
  if (top_p >= 1 || candidates_.size() < 2) return;
  constexpr size_t kBuckets = 512;
  const double per_logit = 1.0 / temperature;
  const double total_of_candidates = Weigh(best, per_logit);
  const double total = total_of_all.value_or(total_of_candidates);
  const double among = total_of_all.has_value() ? num_tokens_ : candidates_.size();
  const double least = (1.0 - top_p) * total / among;
  // Equal logits share a bucket, and a lower one is never in an earlier bucket.
  const double per_bucket = kBuckets / (1e-9 - std::log(least)) * per_logit;
  const auto bucket_of = [&](const Candidate& candidate) {
    const double bucket = (double{best} - candidate.first) * per_bucket;
    return bucket < kBuckets - 1 ? static_cast<size_t>(bucket) : kBuckets - 1;
  };
  double masses[kBuckets] = {};
  size_t count = 0;
  for (size_t i = 0; i < candidates_.size(); ++i) {
    candidates_[count] = candidates_[i];
    if (weights_[i] < least) continue;
    masses[bucket_of(candidates_[count++])] += weights_[i];
  }
  candidates_.resize(count);
  double missing = top_p * total;
  size_t last_bucket = 0;
  while (last_bucket + 1 < kBuckets && masses[last_bucket] < missing)
    missing -= masses[last_bucket++];
  const auto split = std::partition(
      candidates_.begin(), candidates_.end(),
      [&](const Candidate& candidate) { return bucket_of(candidate) < last_bucket; });
  const auto end = std::partition(split, candidates_.end(), [&](const Candidate& candidate) {
    return bucket_of(candidate) == last_bucket;
  });
  KeepMass(split - candidates_.begin(), end - candidates_.begin(), missing, best, per_logit);
}

// Halves the range that holds the last token to keep, by the mass before its middle.
void Sampler::KeepMass(size_t first, size_t last, double missing, float best, double per_logit) {
  constexpr size_t kSortedDirectly = 32;
  const auto at = [this](size_t index) {
    return candidates_.begin() + static_cast<ptrdiff_t>(index);
  };
  const auto weight = [&](size_t i) {
    return Exp(Doubles{(double{candidates_[i].first} - best) * per_logit, 0})[0];
  };
  while (last - first > kSortedDirectly) {
    const size_t middle = first + (last - first) / 2;
    std::nth_element(at(first), at(middle), at(last), Before());
    double mass = 0;
    for (size_t i = first; i < middle; ++i) mass += weight(i);
    if (mass >= missing) {
      last = middle;
    } else {
      missing -= mass;
      first = middle;
    }
  }
  std::sort(at(first), at(last), Before());
  while (first < last && missing > 0) missing -= weight(first++);
  candidates_.resize(std::max<size_t>(first, 1));
}

uint32_t Sampler::Draw(const SamplingParams& params,
                       uint32_t choice,
                       uint32_t position,
                       float best) const {
  const double per_logit = 1.0 / params.temperature;
  const double limit =
      params.min_p > 0 ? std::log(double{params.min_p}) : -std::numeric_limits<double>::infinity();
  const uint64_t stream_key = StreamKey(params.seed, params.first_choice + choice, position);
  double best_score = -std::numeric_limits<double>::infinity();
  uint32_t winner = 0;
  for (const auto& [logit, id] : candidates_) {
    const double scaled = (double{logit} - best) * per_logit;
    if (scaled < limit) continue;
    const uint64_t bits = NoiseBits(stream_key, id);
    if (scaled + GumbelBound(bits) < best_score) continue;
    const double score = scaled + GumbelFromBits(bits);
    if (score > best_score || (score == best_score && id < winner)) {
      best_score = score;
      winner = id;
    }
  }
  return winner;
}

float Sampler::RawLogit(absl::Span<const float> logits, uint32_t id) const {
  for (const ops::TokenEdit& edit : edits_) {
    if (edit.id == static_cast<int32_t>(id)) return edit.raw;
  }
  return logits[id];
}

}  // namespace baton::runtime
