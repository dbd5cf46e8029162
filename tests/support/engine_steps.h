#pragma once

// Drives a ModelRunner by hand: sequences with blocks of their own, cut into steps as a test likes.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/runtime/model_runner.h"

namespace baton::testing_support {

// The repository's file `relative`.
std::string SourcePath(const std::string& relative);

// A small pool and one thread; the caller sets what it tests.
runtime::ModelRunnerOptions SmallOptions(const std::string& model_path);

// One sequence: tokens that are in the cache and the blocks that hold them.
struct TestSequence {
  std::vector<kv::BlockId> blocks;
  std::vector<uint32_t> cached;
};

// What one sequence does in one step.
struct TestPart {
  TestSequence* sequence = nullptr;
  std::vector<uint32_t> tokens;
};

// Hands out blocks of the runner's pool in a scattered order, first filled with NaN, so that a read
// of a row that was never written shows.
class StepDriver {
 public:
  explicit StepDriver(runtime::ModelRunner& runner);

  // One step over all parts; logits [tokens of the part][V] per part.
  std::vector<std::vector<std::vector<float>>> Step(std::vector<TestPart> parts);
  // Appends `tokens` in steps of at most `chunk`; logits of every token.
  std::vector<std::vector<float>> Feed(TestSequence* sequence,
                                       absl::Span<const uint32_t> tokens,
                                       int chunk);
  // Gives the blocks back, filled with NaN again.
  void Release(TestSequence* sequence);

  runtime::ModelRunner& runner() { return runner_; }

 private:
  void Poison(kv::BlockId block);

  runtime::ModelRunner& runner_;
  std::vector<kv::BlockId> free_;
};

uint32_t ArgMax(absl::Span<const float> logits);

// Deterministic token ids in [0, vocab).
std::vector<uint32_t> RandomTokens(int count, int vocab, uint32_t seed);

}  // namespace baton::testing_support
