#include "tests/simt/model_case.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace baton::simt {

using runtime::ModelRunner;
using runtime::ModelRunnerOptions;

ModelRunnerOptions OptionsOf(const ModelSetting& setting, const std::string& backend) {
  ModelRunnerOptions options;
  options.model_path = absl::StrCat(BATON_SOURCE_DIR, "/tests/data/models/", setting.model);
  options.backend = backend;
  options.weight_dtype = setting.weights;
  options.kv_dtype = setting.kv;
  options.max_model_len = 256;
  options.max_step_tokens = 128;
  options.num_blocks = 12;
  options.backend_options.num_threads = 1;
  options.backend_options.prefill_attention = "own";
  return options;
}

std::vector<std::vector<float>> StepTwo(ModelRunner* runner,
                                        int (&lengths)[2],
                                        int first_count,
                                        int second_count) {
  const std::vector<kv::BlockId> blocks[2] = {{7, 2, 9}, {4, 11, 0}};
  const int vocab = runner->config().vocab, counts[2] = {first_count, second_count};
  std::vector<uint32_t> tokens[2];
  std::vector<int> rows[2];
  std::vector<runtime::StepSequence> sequences;
  for (int s = 0; s < 2; ++s) {
    for (int i = 0; i < counts[s]; ++i) {
      tokens[s].push_back(static_cast<uint32_t>((lengths[s] + i) * 37 + 11 * s) % vocab);
      rows[s].push_back(i);
    }
    if (counts[s] > 0) sequences.push_back({tokens[s], lengths[s], blocks[s], rows[s]});
    lengths[s] += counts[s];
  }
  absl::Span<float> out;
  const absl::Status status = runner->Step(sequences, nullptr, &out, nullptr);
  EXPECT_TRUE(status.ok()) << status;
  std::vector<std::vector<float>> logits;
  for (size_t at = 0; at < out.size(); at += vocab)
    logits.emplace_back(out.begin() + at, out.begin() + at + vocab);
  return logits;
}

std::vector<std::vector<float>> RunModel(ModelRunner* runner) {
  int lengths[2] = {0, 0};
  std::vector<std::vector<float>> logits;
  const auto step = [&](int first_count, int second_count) {
    for (auto& row : StepTwo(runner, lengths, first_count, second_count))
      logits.push_back(std::move(row));
  };
  step(40, 20);  // both by the prefill kernel
  step(30, 1);   // over a cached prefix, beside a decode
  step(1, 1);
  step(5, 8);  // a verify
  step(1, 0);
  return logits;
}

std::vector<std::vector<float>> LogitsOf(const ModelSetting& setting,
                                         const std::string& backend,
                                         const std::string& prefill) {
  ModelRunnerOptions options = OptionsOf(setting, backend);
  options.backend_options.prefill_attention = prefill;
  const auto runner = ModelRunner::Create(options);
  EXPECT_TRUE(runner.ok()) << runner.status();
  if (!runner.ok()) return {};
  return RunModel(runner->get());
}

double RelativeError(const std::vector<std::vector<float>>& got,
                     const std::vector<std::vector<float>>& want) {
  double error = 0, size = 0;
  for (size_t row = 0; row < want.size(); ++row) {
    for (size_t i = 0; i < want[row].size(); ++i) {
      const double difference = double{got[row][i]} - want[row][i];
      error += difference * difference;
      size += double{want[row][i]} * want[row][i];
    }
  }
  return std::sqrt(error / size);
}

}  // namespace baton::simt
