#pragma once

// The rows of logits of a step and the tokens drawn from them: by the backend as a part of the
// step, where it can, else by a Sampler from logits on the host. The ids are the same.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/ops/sample.h"
#include "engine/runtime/model_runner.h"
#include "engine/runtime/sampler.h"

namespace baton::runtime {

// What a draw depends on besides the logits, as in Sampler::Sample.
struct DrawSite {
  const SamplingParams& params;
  uint32_t choice;
  uint32_t position;
  uint32_t output_tokens;
  const TokenCounts& counts;
};

// What becomes of a row.
enum class RowUse {
  kToken,         // its token is drawn
  kBehindDrafts,  // if the drafts before it are right
  kDraft,         // its token is drawn, without log probabilities
};

// One step goes Begin; Add or AddShared for each row, in the order of rows; Step; perhaps
// DrawAhead; then Draw or DrawId of the rows that are wanted, each once (a shared row: once a
// choice).
//
// A backend that draws does so for a whole step. The logits of a step come to the host all the same
//   where the backend draws nothing: it is on the host, or the ranks of a pair have a part of each
//     row (ModelRunner::draw_limits);
//   where a row is shared by several choices, each of which changes it: first tokens with n > 1;
//   where a row asks for more alternatives than ops::kMaxLogprobs;
//   where there are more rows, or more edits of logits, than the backend has room for: penalties
//     over long answers in many rows.
// Allocates at construction, and once more for edits beyond what fits. Engine thread only.
class StepSampler {
 public:
  // `runner` outlives it. `num_tokens`: the tokenizer's size; ids from there up are never drawn.
  StepSampler(ModelRunner& runner, int num_tokens);

  void Begin();
  // What the next row's token depends on. Where the backend draws it is read before the call
  // returns; what it refers to stays until the row is drawn, the same but for a row behind drafts.
  void Add(const DrawSite& site, RowUse use = RowUse::kToken);
  void AddShared();
  // So far nothing has been added that the backend cannot draw. After Step: whether it has drawn.
  bool on_device() const { return on_device_; }
  int num_rows() const { return num_rows_; }

  // ModelRunner::Step of sequences with as many rows as were added.
  absl::Status Step(absl::Span<const StepSequence> sequences,
                    LayerObserver* observer,
                    StepTimings* timings);

  // Draws what is drawn in any case and is still to be, on all threads of the host that compute.
  void DrawAhead();

  // Step of rows that are on_device(), as the next step of `chain`, which it does not wait for: row
  // i is drawn into results[i]. (A row whose edits are refused is drawn without them.)
  absl::Status StepInChain(absl::Span<const StepSequence> sequences,
                           ops::DrawChain* chain,
                           absl::Span<ops::SampleResult> results);

  // `site`: the one that was added, or what it has become: that the drafts before the row are right
  // is known by now. Errors: those of Sampler::Sample.
  absl::StatusOr<SampledToken> Draw(int row, const DrawSite& site);
  absl::StatusOr<uint32_t> DrawId(int row, const DrawSite& site);

 private:
  ops::Draws DrawsOf() const;
  ops::SampleRow RowOf(const DrawSite& site, bool with_logprobs);
  // What the backend says of a row.
  absl::Status StatusOf(int row) const;
  // A row on the host, to be changed.
  absl::Span<float> Logits(int row);
  absl::StatusOr<SampledToken> DrawOnHost(int row, const DrawSite& site, RowUse use, int thread);

  ModelRunner& runner_;
  const ops::DrawLimits limits_;
  const int num_tokens_;
  std::vector<Sampler> samplers_;  // one a thread of the host that computes
  bool on_device_ = false;
  int num_rows_ = 0;
  std::vector<ops::SampleRow> rows_;
  std::vector<ops::TokenEdit> edits_;
  std::vector<absl::Status> statuses_;  // by row: of its edits
  std::vector<ops::SampleResult> results_;
  std::vector<bool> shared_;  // by row
  struct SureRow {
    int row;
    DrawSite site;
    RowUse use;
  };
  std::vector<SureRow> sure_;                        // rows that will be drawn, on the host
  std::vector<absl::StatusOr<SampledToken>> ahead_;  // of sure_, in DrawAhead's order; or empty
  std::vector<int> ahead_of_row_;                    // by row: index into ahead_, or -1
  absl::Span<float> logits_;                         // of the step, on the host
  std::vector<float> copied_;                        // a row that others want too
};

}  // namespace baton::runtime
