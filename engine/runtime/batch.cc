#include "engine/runtime/batch.h"

#include "engine/base/log.h"

namespace baton::runtime {

Batch::Batch(int max_sequences) {
  parts_.reserve(max_sequences);
  rows_.reserve(max_sequences);
}

void Batch::Clear() {
  parts_.clear();
  rows_.clear();
  num_tokens_ = 0;
  num_rows_ = 0;
}

void Batch::Add(const Sequence& sequence, int num_tokens, bool want_logits) {
  BATON_CHECK(!full() && num_tokens > 0 && num_tokens <= sequence.num_pending());
  rows_.push_back(num_tokens - 1);
  StepSequence part;
  part.tokens = absl::MakeConstSpan(sequence.tokens).subspan(sequence.num_computed, num_tokens);
  part.start = sequence.num_computed;
  part.block_table = sequence.blocks;
  if (want_logits) part.logit_rows = absl::MakeConstSpan(&rows_.back(), 1);
  parts_.push_back(part);
  num_tokens_ += num_tokens;
  num_rows_ += want_logits ? 1 : 0;
}

}  // namespace baton::runtime
