#pragma once

// The flat arrays of one step, checked and filled from the sequences.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/ops/backend.h"
#include "engine/runtime/model_runner.h"

namespace baton::runtime {

struct StepLimits {
  int max_tokens = 0;
  int max_logit_rows = 0;
  int max_model_len = 0;
  int vocab_size = 0;
  int num_blocks = 0;
};

// Allocates at construction only. Engine thread only.
class StepInputs {
 public:
  explicit StepInputs(const StepLimits& limits);

  // Errors: INVALID_ARGUMENT with the sequence's index and the numbers: no sequence or one without
  // tokens; more tokens, rows or positions than the limits; a token outside the vocabulary; a block
  // table that is too short or names a block outside the pool; rows that do not ascend within the
  // sequence's tokens; drawn tokens that are not one a token, or of two chains. Nothing is filled
  // then.
  absl::Status Fill(absl::Span<const StepSequence> sequences);

  absl::Span<const int32_t> ids() const { return ids_; }
  absl::Span<const int32_t> positions() const { return positions_; }
  absl::Span<const int64_t> slots() const { return slots_; }
  absl::Span<const ops::SequenceView> sequences() const { return views_; }
  absl::Span<const int32_t> logit_rows() const { return logit_rows_; }
  // Empty where no sequence has tokens of a chain.
  absl::Span<const int32_t> drawn() const { return drawn_; }
  const ops::DrawChain* chain() const { return chain_; }

 private:
  absl::Status Validate(absl::Span<const StepSequence> sequences) const;
  void Append(const StepSequence& sequence);
  void AppendDrawn(absl::Span<const StepSequence> sequences);

  StepLimits limits_;
  std::vector<int32_t> ids_;
  std::vector<int32_t> positions_;
  std::vector<int64_t> slots_;
  std::vector<ops::SequenceView> views_;
  std::vector<int32_t> logit_rows_;
  std::vector<int32_t> drawn_;
  const ops::DrawChain* chain_ = nullptr;
};

}  // namespace baton::runtime
