#pragma once

// What `baton bench` will send, and when: pure arithmetic, the same for the same seed.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "cli/trace.h"

namespace baton::cli {

// Random numbers that are the same everywhere: the standard library's distributions are not.
class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(seed) {}
  uint64_t Next();
  double Uniform();  // in (0, 1)
  double Normal();   // mean 0, deviation 1

 private:
  uint64_t state_;
};

// Tokens of a prompt or an answer: "N", "MIN-MAX" (each equally likely), "normal:MEAN:DEVIATION" or
// "lognormal:MEDIAN:SIGMA", rounded and never below 1.
class LengthDistribution {
 public:
  // Errors: INVALID_ARGUMENT.
  static absl::StatusOr<LengthDistribution> Parse(absl::string_view text);
  uint32_t Draw(Dice* dice) const;

 private:
  enum class Kind : uint8_t { kUniform, kNormal, kLogNormal };
  Kind kind_ = Kind::kUniform;
  double a_ = 1, b_ = 1;
};

struct LoadOptions {
  uint32_t requests = 100;
  // Requests a second, at random moments (Poisson). 0: a fixed number at a time, all due at once.
  double rate = 0;
  LengthDistribution prompt_tokens, output_tokens;
  uint64_t seed = 1;
};

std::vector<TraceRequest> MakePlan(const LoadOptions& options);

// Ids of the request's prompt, below `vocab_size`. Requests of one prefix group begin alike for
// `prefix_tokens`; everything else differs, so that no cache helps unless the trace says so.
std::vector<uint32_t> PromptIds(const TraceRequest& request,
                                uint64_t number,
                                uint64_t seed,
                                uint32_t vocab_size);

}  // namespace baton::cli
