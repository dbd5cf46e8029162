#pragma once

// The files of tests/golden/logits: what transformers computes on the random checkpoints (see
// tests/golden/README.md).

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace baton::testing_support {

struct LogitsGolden {
  std::string model;  // path of the checkpoint, from the root of the repository
  int vocab = 0;
  std::vector<uint32_t> prompt;
  std::vector<uint32_t> greedy;            // what follows the prompt
  std::vector<int> positions;              // of prompt and greedy, whose logits are known
  std::vector<std::vector<float>> logits;  // [positions][vocab]
  std::vector<double> inv_freq;
  double attention_factor = 1;
};

// Names of all of them, in order: a file NAME.json beside NAME.f32.
std::vector<std::string> LogitsGoldenNames();
absl::StatusOr<LogitsGolden> ReadLogitsGolden(const std::string& name);

}  // namespace baton::testing_support
