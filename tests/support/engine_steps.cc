#include "tests/support/engine_steps.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "engine/base/log.h"

namespace baton::testing_support {

std::string SourcePath(const std::string& relative) {
  return std::string(BATON_SOURCE_DIR) + "/" + relative;
}

runtime::ModelRunnerOptions SmallOptions(const std::string& model_path) {
  runtime::ModelRunnerOptions options;
  options.model_path = model_path;
  options.num_blocks = 32;
  options.max_step_tokens = 512;
  options.max_logit_rows = 512;
  options.backend_options.num_threads = 1;
  return options;
}

StepDriver::StepDriver(runtime::ModelRunner& runner) : runner_(runner) {
  for (kv::BlockId block = 0; block < runner.layout().num_blocks; ++block) {
    free_.push_back(block);
    Poison(block);
  }
  std::shuffle(free_.begin(), free_.end(), std::mt19937(7));
}

std::vector<std::vector<std::vector<float>>> StepDriver::Step(std::vector<TestPart> parts) {
  std::vector<std::vector<int>> rows;
  std::vector<runtime::StepSequence> sequences;
  for (TestPart& part : parts) {
    const int start = static_cast<int>(part.sequence->cached.size());
    const int end = start + static_cast<int>(part.tokens.size());
    while (static_cast<int>(part.sequence->blocks.size()) < kv::BlocksFor(end)) {
      BATON_CHECK(!free_.empty(), "the test's pool is too small");
      part.sequence->blocks.push_back(free_.back());
      free_.pop_back();
    }
    rows.emplace_back();
    for (int i = 0; i < end - start; ++i) rows.back().push_back(i);
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    const TestPart& part = parts[i];
    sequences.push_back({part.tokens, static_cast<int>(part.sequence->cached.size()),
                         part.sequence->blocks, rows[i]});
  }
  absl::Span<float> logits;
  const absl::Status status = runner_.Step(sequences, nullptr, &logits, nullptr);
  BATON_CHECK(status.ok(), "step: ", status.ToString());

  const size_t vocab = runner_.config().vocab;
  std::vector<std::vector<std::vector<float>>> result(parts.size());
  const float* row = logits.data();
  for (size_t i = 0; i < parts.size(); ++i) {
    for (size_t t = 0; t < parts[i].tokens.size(); ++t, row += vocab)
      result[i].emplace_back(row, row + vocab);
    std::vector<uint32_t>& cached = parts[i].sequence->cached;
    cached.insert(cached.end(), parts[i].tokens.begin(), parts[i].tokens.end());
  }
  return result;
}

std::vector<std::vector<float>> StepDriver::Feed(TestSequence* sequence,
                                                 absl::Span<const uint32_t> tokens,
                                                 int chunk) {
  std::vector<std::vector<float>> logits;
  for (size_t first = 0; first < tokens.size(); first += chunk) {
    const absl::Span<const uint32_t> part = tokens.subspan(first, chunk);
    auto step = Step({{sequence, {part.begin(), part.end()}}});
    for (std::vector<float>& row : step[0]) logits.push_back(std::move(row));
  }
  return logits;
}

void StepDriver::Release(TestSequence* sequence) {
  for (const kv::BlockId block : sequence->blocks) {
    Poison(block);
    free_.push_back(block);
  }
  *sequence = {};
}

void StepDriver::Poison(kv::BlockId block) {
  // 0xff is NaN in e4m3, bf16 and f32 alike.
  const kv::KvLayout& layout = runner_.layout();
  const std::vector<uint8_t> poison(layout.block_bytes() * layout.num_layers, 0xff);
  runner_.WriteBlock(block, poison.data());
}

uint32_t ArgMax(absl::Span<const float> logits) {
  return static_cast<uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

std::vector<uint32_t> RandomTokens(int count, int vocab, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint32_t> tokens(count);
  for (uint32_t& token : tokens) token = random() % vocab;
  return tokens;
}

}  // namespace baton::testing_support
