#include "engine/runtime/batch.h"

#include <algorithm>
#include <numeric>

#include "engine/base/log.h"

namespace baton::runtime {

Batch::Batch(int max_sequences, int max_drafts) : all_rows_(max_drafts + 1) {
  parts_.reserve(max_sequences);
  rows_.reserve(max_sequences);
  tokens_.reserve(static_cast<size_t>(max_sequences) * all_rows_.size());
  drawn_.reserve(tokens_.capacity());
  std::iota(all_rows_.begin(), all_rows_.end(), 0);
}

void Batch::Clear() {
  parts_.clear();
  rows_.clear();
  tokens_.clear();
  drawn_.clear();
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

void Batch::AddDecode(const Sequence& sequence,
                      absl::Span<const uint32_t> drafts,
                      const ops::DrawChain* chain,
                      absl::Span<const int32_t> drawn) {
  BATON_CHECK(!full() && sequence.num_pending() == 1 && drafts.size() < all_rows_.size());
  BATON_CHECK(chain == nullptr || drawn.size() == drafts.size());
  const size_t begin = tokens_.size();
  tokens_.push_back(sequence.tokens.back());
  tokens_.insert(tokens_.end(), drafts.begin(), drafts.end());
  StepSequence part;
  part.tokens = absl::MakeConstSpan(tokens_).subspan(begin);
  drawn_.resize(tokens_.size(), -1);
  if (chain != nullptr) {
    std::copy(drawn.begin(), drawn.end(), drawn_.begin() + static_cast<ptrdiff_t>(begin) + 1);
    part.drawn = absl::MakeConstSpan(drawn_).subspan(begin);
    part.chain = chain;
  }
  part.start = sequence.num_computed;
  part.block_table = sequence.blocks;
  part.logit_rows = absl::MakeConstSpan(all_rows_).first(part.tokens.size());
  parts_.push_back(part);
  num_tokens_ += static_cast<int>(part.tokens.size());
  num_rows_ += static_cast<int>(part.tokens.size());
}

}  // namespace baton::runtime
