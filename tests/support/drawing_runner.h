#pragma once

// The fake model on a device that draws tokens itself, from what a row and its edits say and
// nothing else.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "engine/base/status_macros.h"
#include "engine/runtime/sampler.h"
#include "tests/support/fake_runner.h"

namespace baton::testing {

// What a device answers for one row of logits.
inline ops::SampleResult DrawOnDevice(const ops::SampleRow& row,
                                      const ops::Draws& draws,
                                      absl::Span<const float> raw) {
  ops::SampleResult result = {ops::SampleStatus::kOk, -1, 0, 0, {}, {}};
  std::vector<float> logits(raw.begin(), raw.end());
  if (!std::all_of(raw.begin(), raw.end(), [](float logit) { return std::isfinite(logit); })) {
    result.status = ops::SampleStatus::kNotFinite;
    return result;
  }
  constexpr float kNever = std::numeric_limits<float>::lowest();
  for (const ops::TokenEdit& edit : draws.edits.subspan(row.first_edit, row.num_edits)) {
    BATON_CHECK(edit.id >= 0 && edit.id < draws.num_tokens);
    double logit = logits[edit.id];
    if (edit.has_bias) logit = static_cast<float>(logit + edit.bias);
    if (edit.penalised) {
      logit = logit > 0 ? logit / row.repetition_penalty : logit * row.repetition_penalty;
      if (edit.output_count > 0)
        logit -= double{row.frequency_penalty} * edit.output_count + row.presence_penalty;
    }
    logits[edit.id] = edit.masked ? kNever : static_cast<float>(logit);
  }
  if (*std::max_element(logits.begin(), logits.begin() + draws.num_tokens) == kNever) {
    result.status = ops::SampleStatus::kAllMasked;
    return result;
  }
  runtime::SamplingParams params;
  params.temperature = row.temperature;
  params.top_k = row.top_k;
  params.top_p = row.top_p;
  params.min_p = row.min_p;
  params.seed = row.seed;
  runtime::Sampler sampler(static_cast<int>(raw.size()), draws.num_tokens);
  const auto drawn =
      sampler.SampleId(params, row.choice, row.position, 0, {}, absl::MakeSpan(logits));
  BATON_CHECK(drawn.ok());
  result.id = static_cast<int32_t>(*drawn);
  if (row.num_logprobs < 0) return result;
  double sum = 0;
  for (const float logit : raw) sum += std::exp(double{logit});
  const auto logprob = [&](int32_t id) { return static_cast<float>(raw[id] - std::log(sum)); };
  result.logprob = logprob(result.id);
  std::vector<int32_t> ids(draws.num_tokens);
  for (int32_t id = 0; id < draws.num_tokens; ++id) ids[id] = id;
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return raw[a] > raw[b]; });
  result.num_top = std::min(row.num_logprobs, draws.num_tokens);
  for (int i = 0; i < result.num_top; ++i) {
    result.top_ids[i] = ids[i];
    result.top_logprobs[i] = logprob(ids[i]);
  }
  return result;
}

class DrawingRunner : public FakeRunner {
 public:
  explicit DrawingRunner(int num_blocks, ops::DrawLimits limits = {512, 4096})
      : FakeRunner(num_blocks), limits_(limits) {}

  ops::DrawLimits draw_limits() const override { return limits_; }

  absl::Status Step(absl::Span<const runtime::StepSequence> sequences,
                    runtime::LayerObserver* observer,
                    absl::Span<float>* logits,
                    runtime::StepTimings* timings) override {
    BATON_RETURN_IF_ERROR(FakeRunner::Step(sequences, observer, &last_, timings));
    rows_on_host += static_cast<int>(last_.size()) / kFakeVocab;
    if (logits != nullptr) *logits = last_;
    return absl::OkStatus();
  }

  absl::Status StepAndDraw(absl::Span<const runtime::StepSequence> sequences,
                           runtime::LayerObserver* observer,
                           const ops::Draws& draws,
                           runtime::StepTimings* timings) override {
    BATON_RETURN_IF_ERROR(FakeRunner::Step(sequences, observer, &last_, timings));
    BATON_CHECK(last_.size() == draws.rows.size() * kFakeVocab &&
                draws.results.size() == draws.rows.size());
    BATON_CHECK(static_cast<int>(draws.rows.size()) <= limits_.rows &&
                static_cast<int>(draws.edits.size()) <= limits_.edits);
    for (size_t i = 0; i < draws.rows.size(); ++i) {
      draws.results[i] =
          DrawOnDevice(draws.rows[i], draws, last_.subspan(i * kFakeVocab, kFakeVocab));
    }
    rows_on_device += static_cast<int>(draws.rows.size());
    return absl::OkStatus();
  }

  int rows_on_device = 0, rows_on_host = 0;

 private:
  const ops::DrawLimits limits_;
  absl::Span<float> last_;
};

}  // namespace baton::testing
