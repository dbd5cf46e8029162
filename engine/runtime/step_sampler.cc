#include "engine/runtime/step_sampler.h"

#include <algorithm>
#include <utility>

#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::runtime {
namespace {

// For fewer logits waking a thread takes longer than drawing.
constexpr size_t kLogitsWorthAThread = 64 * 1024;

}  // namespace

StepSampler::StepSampler(ModelRunner& runner, int num_tokens)
    : runner_(runner),
      limits_(runner.draw_limits()),
      num_tokens_(std::min(num_tokens, runner.config().vocab)),
      samplers_(runner.host_threads(), Sampler(runner.config().vocab, num_tokens)),
      results_(limits_.rows),
      copied_(runner.config().vocab) {
  rows_.reserve(limits_.rows);
  edits_.reserve(limits_.edits);
  statuses_.reserve(limits_.rows);
}

void StepSampler::Begin() {
  on_device_ = limits_.rows > 0;
  num_rows_ = 0;
  rows_.clear();
  edits_.clear();
  statuses_.clear();
  shared_.clear();
  sure_.clear();
  ahead_.clear();
  ahead_of_row_.clear();
  logits_ = {};
}

void StepSampler::Add(const DrawSite& site, RowUse use) {
  if (use != RowUse::kBehindDrafts) sure_.push_back({num_rows_, site, use});
  ++num_rows_;
  shared_.push_back(false);
  ahead_of_row_.push_back(-1);
  const bool with_logprobs = use != RowUse::kDraft;
  if (num_rows_ > limits_.rows || (with_logprobs && site.params.logprobs > ops::kMaxLogprobs))
    on_device_ = false;
  if (!on_device_) return;
  rows_.push_back(RowOf(site, with_logprobs));
  if (edits_.size() > static_cast<size_t>(limits_.edits)) on_device_ = false;
}

void StepSampler::AddShared() {
  ++num_rows_;
  shared_.push_back(true);
  ahead_of_row_.push_back(-1);
  on_device_ = false;
}

ops::SampleRow StepSampler::RowOf(const DrawSite& site, bool with_logprobs) {
  const SamplingParams& params = site.params;
  ops::SampleRow row;
  row.temperature = params.temperature;
  row.top_p = params.top_p;
  row.min_p = params.min_p;
  row.top_k = params.top_k;
  row.seed = params.seed;
  row.choice = params.first_choice + site.choice;
  row.position = site.position;
  row.repetition_penalty = params.repetition_penalty;
  row.presence_penalty = params.presence_penalty;
  row.frequency_penalty = params.frequency_penalty;
  row.num_logprobs = with_logprobs ? params.logprobs : -1;
  row.first_edit = static_cast<int32_t>(edits_.size());
  // A row whose edits are refused is drawn without: whether it is finite is to be known.
  statuses_.push_back(
      AppendTokenEdits(params, site.output_tokens, site.counts, num_tokens_, &edits_));
  row.num_edits = static_cast<int32_t>(edits_.size()) - row.first_edit;
  return row;
}

absl::Status StepSampler::Step(absl::Span<const StepSequence> sequences,
                               LayerObserver* observer,
                               StepTimings* timings) {
  if (!on_device_ || num_rows_ == 0) {
    BATON_RETURN_IF_ERROR(runner_.Step(sequences, observer, &logits_, timings));
    BATON_CHECK(logits_.size() == num_rows_ * copied_.size(), "rows=", num_rows_);
    return absl::OkStatus();
  }
  ops::Draws draws = DrawsOf();
  draws.results = absl::MakeSpan(results_).first(rows_.size());
  return runner_.StepAndDraw(sequences, observer, draws, timings);
}

absl::Status StepSampler::StepInChain(absl::Span<const StepSequence> sequences,
                                      ops::DrawChain* chain,
                                      absl::Span<ops::SampleResult> results) {
  BATON_CHECK(on_device_ && static_cast<int>(results.size()) == num_rows_);
  ops::Draws draws = DrawsOf();
  draws.results = results;
  draws.chain = chain;
  return runner_.StepAndDraw(sequences, nullptr, draws, nullptr);
}

ops::Draws StepSampler::DrawsOf() const {
  ops::Draws draws;
  draws.rows = rows_;
  draws.edits = edits_;
  draws.num_tokens = num_tokens_;
  return draws;
}

void StepSampler::DrawAhead() {
  if (on_device_ || samplers_.size() < 2 || sure_.size() < 2 ||
      sure_.size() * copied_.size() < kLogitsWorthAThread)
    return;
  ahead_.resize(sure_.size(), absl::UnknownError("not drawn"));
  runner_.ForEach(static_cast<int>(sure_.size()), [&](int index, int thread) {
    const SureRow& sure = sure_[index];
    ahead_of_row_[sure.row] = index;
    ahead_[index] = DrawOnHost(sure.row, sure.site, sure.use, thread);
  });
}

absl::StatusOr<SampledToken> StepSampler::DrawOnHost(int row,
                                                     const DrawSite& site,
                                                     RowUse use,
                                                     int thread) {
  Sampler& sampler = samplers_[thread];
  if (use != RowUse::kDraft) {
    return sampler.Sample(site.params, site.choice, site.position, site.output_tokens, site.counts,
                          Logits(row));
  }
  SampledToken token;
  BATON_ASSIGN_OR_RETURN(token.id, sampler.SampleId(site.params, site.choice, site.position,
                                                    site.output_tokens, site.counts, Logits(row)));
  return token;
}

absl::StatusOr<SampledToken> StepSampler::Draw(int row, const DrawSite& site) {
  BATON_CHECK(row >= 0 && row < num_rows_);
  if (!on_device_) {
    return ahead_of_row_[row] >= 0 ? std::move(ahead_[ahead_of_row_[row]])
                                   : DrawOnHost(row, site, RowUse::kToken, 0);
  }
  BATON_RETURN_IF_ERROR(StatusOf(row));
  const ops::SampleResult& result = results_[row];
  SampledToken token;
  token.id = static_cast<uint32_t>(result.id);
  token.has_logprob = rows_[row].num_logprobs >= 0;
  if (token.has_logprob) token.logprob = result.logprob;
  for (int i = 0; i < result.num_top; ++i)
    token.top.emplace_back(static_cast<uint32_t>(result.top_ids[i]), result.top_logprobs[i]);
  return token;
}

absl::StatusOr<uint32_t> StepSampler::DrawId(int row, const DrawSite& site) {
  BATON_CHECK(row >= 0 && row < num_rows_);
  if (!on_device_) {
    BATON_ASSIGN_OR_RETURN(const SampledToken token,
                           ahead_of_row_[row] >= 0 ? std::move(ahead_[ahead_of_row_[row]])
                                                   : DrawOnHost(row, site, RowUse::kDraft, 0));
    return token.id;
  }
  BATON_RETURN_IF_ERROR(StatusOf(row));
  return static_cast<uint32_t>(results_[row].id);
}

// In the order in which Sampler looks.
absl::Status StepSampler::StatusOf(int row) const {
  if (results_[row].status == ops::SampleStatus::kNotFinite) return NotFinite();
  BATON_RETURN_IF_ERROR(statuses_[row]);
  return results_[row].status == ops::SampleStatus::kAllMasked ? NoTokenLeft() : absl::OkStatus();
}

absl::Span<float> StepSampler::Logits(int row) {
  const absl::Span<float> logits = logits_.subspan(row * copied_.size(), copied_.size());
  if (!shared_[row]) return logits;
  std::copy(logits.begin(), logits.end(), copied_.begin());
  return absl::MakeSpan(copied_);
}

}  // namespace baton::runtime
