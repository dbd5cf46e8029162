#pragma once

// Which prompts are computed in the next step, and how much of each: chunks under a token budget.

#include <cstdint>
#include <deque>
#include <vector>

#include "engine/runtime/sequence.h"

namespace baton::runtime {

struct PrefillChunk {
  Sequence* sequence = nullptr;
  int num_tokens = 0;
  bool last = false;  // reaches the end of the sequence: its logits are wanted
};

// Used by prefill workers, and by decode workers that compute a prompt themselves (no prefill
// worker, or a preempted sequence). Admits in order of arrival and never lets a later sequence pass
// an earlier one that waits for blocks, so nobody starves. Engine thread only.
class PrefillScheduler {
 public:
  explicit PrefillScheduler(KvMemory* memory) : memory_(memory) {}

  // `sequence` outlives its stay here: until its last chunk is done or Remove.
  void Enqueue(Sequence* sequence);
  // False if it is not here. Its blocks stay with it.
  bool Remove(Sequence* sequence);

  // The chunks of the next step, oldest sequence first: at most `token_budget` tokens of at most
  // `max_sequences` sequences. Every chunk but a sequence's last ends on a block border. A sequence
  // is admitted when all its blocks can be had and `keep_available` blocks are left over; its
  // cached beginning is not computed again.
  void Plan(int token_budget,
            int max_sequences,
            int keep_available,
            std::vector<PrefillChunk>* chunks);
  // A planned chunk has been computed: advances the sequence, publishes its full blocks, and lets
  // it go after the last.
  void Finish(const PrefillChunk& chunk);

  int num_waiting() const { return static_cast<int>(waiting_.size()); }
  int num_admitted() const { return static_cast<int>(admitted_.size()); }
  bool empty() const { return waiting_.empty() && admitted_.empty(); }
  // Tokens not yet computed, of waiting and admitted sequences.
  int64_t queue_tokens() const;
  absl::Span<Sequence* const> admitted() const { return admitted_; }

 private:
  bool Admit(int keep_available);

  KvMemory* memory_;
  std::deque<Sequence*> waiting_;    // by order
  std::vector<Sequence*> admitted_;  // by order of admission; all have their blocks
};

}  // namespace baton::runtime
