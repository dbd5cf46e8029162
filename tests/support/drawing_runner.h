#pragma once

// The fake model on a device that draws tokens itself, from what a row and its edits say and
// nothing else.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "engine/base/status_macros.h"
#include "engine/ops/draw_chain.h"
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

// Keeps results to itself until they are asked for, as the device does.
class FakeDrawChain : public ops::DrawChain {
 public:
  FakeDrawChain(int max_draws, int* finished) : max_draws_(max_draws), finished_(finished) {}
  int size() const override { return static_cast<int>(results_.size()); }
  absl::StatusOr<double> Finish() override {
    size_t next = 0;
    for (const absl::Span<ops::SampleResult> part : parts_) {
      for (ops::SampleResult& result : part) result = results_[next++];
    }
    parts_.clear();
    results_.clear();
    ++*finished_;
    if (!finish_status.ok()) return finish_status;
    return 1e-4;
  }
  void Add(const std::vector<ops::SampleResult>& results, absl::Span<ops::SampleResult> out) {
    BATON_CHECK(size() + static_cast<int>(results.size()) <= max_draws_);
    results_.insert(results_.end(), results.begin(), results.end());
    parts_.push_back(out);
  }
  uint32_t TokenOf(int draw) const {
    BATON_CHECK(draw < size());
    const ops::SampleResult& result = results_[draw];
    return result.status == ops::SampleStatus::kOk ? static_cast<uint32_t>(result.id)
                                                   : ops::kNoTokenDrawn;
  }

  absl::Status finish_status;

 private:
  const int max_draws_;
  int* const finished_;
  std::vector<ops::SampleResult> results_;
  std::vector<absl::Span<ops::SampleResult>> parts_;
};

// Runner and chain may be of different runners: target and draft model.
class DrawingRunner : public FakeRunner {
 public:
  explicit DrawingRunner(int num_blocks, ops::DrawLimits limits = {512, 4096})
      : FakeRunner(num_blocks), limits_(limits) {}

  ops::DrawLimits draw_limits() const override { return limits_; }
  bool reads_draw_chains() const override { return reads_chains; }
  absl::StatusOr<std::unique_ptr<ops::DrawChain>> NewDrawChain(int max_draws) override {
    auto made = std::make_unique<FakeDrawChain>(max_draws, &chains_finished);
    chain = made.get();
    return made;
  }

  absl::Status Step(absl::Span<const runtime::StepSequence> sequences,
                    runtime::LayerObserver* observer,
                    absl::Span<float>* logits,
                    runtime::StepTimings* timings) override {
    BATON_RETURN_IF_ERROR(FakeRunner::Step(WithTokens(sequences), observer, &last_, timings));
    rows_on_host += static_cast<int>(last_.size()) / kFakeVocab;
    if (logits != nullptr) *logits = last_;
    return absl::OkStatus();
  }

  absl::Status StepAndDraw(absl::Span<const runtime::StepSequence> sequences,
                           runtime::LayerObserver* observer,
                           const ops::Draws& draws,
                           runtime::StepTimings* timings) override {
    BATON_RETURN_IF_ERROR(FakeRunner::Step(WithTokens(sequences), observer, &last_, timings));
    BATON_CHECK(last_.size() == draws.rows.size() * kFakeVocab &&
                draws.results.size() == draws.rows.size());
    BATON_CHECK(static_cast<int>(draws.rows.size()) <= limits_.rows &&
                static_cast<int>(draws.edits.size()) <= limits_.edits);
    std::vector<ops::SampleResult> results;
    for (size_t i = 0; i < draws.rows.size(); ++i) {
      results.push_back(
          DrawOnDevice(draws.rows[i], draws, last_.subspan(i * kFakeVocab, kFakeVocab)));
      if (wrong && wrong(draws.rows[i].position))
        results.back().id = (results.back().id + 1) % kFakeVocab;
    }
    if (draws.chain != nullptr) {
      static_cast<FakeDrawChain*>(draws.chain)->Add(results, draws.results);
      rows_in_chains += static_cast<int>(results.size());
    } else {
      std::copy(results.begin(), results.end(), draws.results.begin());
      rows_on_device += static_cast<int>(results.size());
    }
    return absl::OkStatus();
  }

  int rows_on_device = 0, rows_on_host = 0, rows_in_chains = 0;
  int chains_finished = 0, steps_from_chains = 0;
  FakeDrawChain* chain = nullptr;  // the last one made
  bool reads_chains = true;
  std::function<bool(uint32_t position)> wrong;  // another token than the model's is drawn there

 private:
  // What a device would read: tokens that a chain has drawn in their places.
  absl::Span<const runtime::StepSequence> WithTokens(
      absl::Span<const runtime::StepSequence> sequences) {
    bool any = false;
    sequences_.assign(sequences.begin(), sequences.end());
    tokens_.clear();
    tokens_.reserve(sequences.size());
    for (runtime::StepSequence& sequence : sequences_) {
      if (sequence.drawn.empty()) continue;
      BATON_CHECK(sequence.drawn.size() == sequence.tokens.size());
      any = true;
      std::vector<uint32_t>& tokens =
          tokens_.emplace_back(sequence.tokens.begin(), sequence.tokens.end());
      for (size_t i = 0; i < tokens.size(); ++i) {
        if (sequence.drawn[i] < 0) continue;
        BATON_CHECK(tokens[i] == ops::kNoTokenDrawn, "the host has looked at it");
        tokens[i] = static_cast<const FakeDrawChain*>(sequence.chain)->TokenOf(sequence.drawn[i]);
      }
      sequence.tokens = tokens;
    }
    steps_from_chains += any ? 1 : 0;
    return sequences_;
  }

  std::vector<runtime::StepSequence> sequences_;
  std::vector<std::vector<uint32_t>> tokens_;
  const ops::DrawLimits limits_;
  absl::Span<float> last_;
};

}  // namespace baton::testing
