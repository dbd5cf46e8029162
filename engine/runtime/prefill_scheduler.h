#pragma once

// Which prompts are computed in the next step, and how much of each: chunks under a token budget.

#include <cstdint>
#include <vector>

#include "engine/runtime/sequence.h"

namespace baton::runtime {

struct PrefillChunk {
  Sequence* sequence = nullptr;
  int num_tokens = 0;
  bool last = false;  // reaches the end of the sequence: its logits are wanted
};

// Used by prefill workers, and by decode workers that compute a prompt themselves (no prefill
// worker, or a preempted sequence).
//
// Shortest first, with ageing: sequences are taken by the tokens they still want, less half of what
// has been computed for others since they came, less kPriorityTokens for each step of priority. So
// a prompt of L tokens is passed by shorter ones until 2 L tokens of theirs have been computed, and
// then comes first: nobody starves. Nor does a long prompt that has come first starve the others:
// where there are shorter ones, it gets half of a step. Plan is a function of the sequences, the
// memory and the tokens computed so far; no clock is asked. Engine thread only.
class PrefillScheduler {
 public:
  // What one step of priority is worth.
  static constexpr int kPriorityTokens = 4096;
  // Priorities beyond it count as much.
  static constexpr int kMaxPriority = 16;

  explicit PrefillScheduler(KvMemory* memory) : memory_(memory) {}

  // `sequence` outlives its stay here: until its last chunk is done or Remove. Urgent ones come
  // before all others, in order of arrival: those that were running already.
  void Enqueue(Sequence* sequence, bool urgent = false);
  // False if it is not here. Its blocks stay with it.
  bool Remove(Sequence* sequence);

  // The chunks of the next step, in the order above: at most `token_budget` tokens of at most
  // `max_sequences` sequences. Every chunk but a sequence's last ends on a block border. A sequence
  // is admitted when all its blocks can be had and `keep_available` blocks are left over, and
  // nobody is admitted past one that waits for blocks; its cached beginning is not computed again.
  void Plan(int token_budget,
            int max_sequences,
            int keep_available,
            std::vector<PrefillChunk>* chunks);
  // A planned chunk has been computed: advances the sequence, publishes its full blocks, and lets
  // it go after the last.
  void Finish(const PrefillChunk& chunk);

  int num_waiting() const { return static_cast<int>(entries_.size()) - num_admitted_; }
  int num_admitted() const { return num_admitted_; }
  bool empty() const { return entries_.empty(); }
  // Tokens not yet computed, of waiting and admitted sequences.
  int64_t queue_tokens() const;
  // Of the admitted ones, the one that came last; null if there is none.
  Sequence* YoungestAdmitted() const;

 private:
  struct Entry {
    Sequence* sequence;
    int64_t since;  // tokens_computed_ when it was queued
    bool urgent;
    bool admitted = false;  // has all its blocks
  };

  int64_t Score(const Entry& entry) const;
  void Sort();
  bool Admit(Entry* entry, int keep_available);
  // Most tokens of the first chunk.
  int FirstShare(int token_budget) const;
  // The first chunk, if it was held back for others, takes what they have left of the budget.
  static void Extend(PrefillChunk* first, int token_budget);

  KvMemory* memory_;
  std::vector<Entry> entries_;  // in the order of the last Plan
  int num_admitted_ = 0;
  int64_t tokens_computed_ = 0;
};

}  // namespace baton::runtime
