#pragma once

// The inputs of one step, gathered from sequences.

#include <vector>

#include "absl/types/span.h"
#include "engine/runtime/model_runner.h"
#include "engine/runtime/sequence.h"

namespace baton::runtime {

// Borrows the sequences' tokens and block tables: they must not change until the step is over.
// Allocates at construction only. Engine thread only.
class Batch {
 public:
  // `max_drafts`: most drafts of one sequence.
  explicit Batch(int max_sequences, int max_drafts = 0);

  void Clear();
  // The next `num_tokens` pending tokens of `sequence`; with `want_logits`, the logits of the last
  // of them.
  void Add(const Sequence& sequence, int num_tokens, bool want_logits);
  // The one pending token of `sequence` and then `drafts`, copied; the logits of all of them. With
  // a chain the drafts are its draws `drawn`, one a draft.
  void AddDecode(const Sequence& sequence,
                 absl::Span<const uint32_t> drafts,
                 const ops::DrawChain* chain = nullptr,
                 absl::Span<const int32_t> drawn = {});

  absl::Span<const StepSequence> parts() const { return parts_; }
  bool empty() const { return parts_.empty(); }
  bool full() const { return parts_.size() == parts_.capacity(); }
  int num_tokens() const { return num_tokens_; }
  int num_rows() const { return num_rows_; }

 private:
  std::vector<StepSequence> parts_;
  std::vector<int> rows_;         // one per part of Add, whether asked for or not
  std::vector<uint32_t> tokens_;  // of AddDecode
  std::vector<int32_t> drawn_;    // one for each of tokens_
  std::vector<int> all_rows_;     // 0, 1, 2, ...: the rows of AddDecode
  int num_tokens_ = 0;
  int num_rows_ = 0;
};

}  // namespace baton::runtime
