#pragma once

// Continuous batching: which sequences take part in the next step, and who gives way when blocks
// run out.

#include <vector>

#include "decode_worker/swap_space.h"
#include "engine/runtime/prefill_scheduler.h"
#include "engine/runtime/sequence.h"

namespace baton::decode {

struct DecodeSchedulerOptions {
  int max_batch = 64;             // most sequences that decode in one step
  int chunk_tokens = 512;         // most prompt tokens in one step, beside them
  int max_prefill_sequences = 8;  // most prompts in one step, beside them
};

// A sequence with one pending token decodes; one with more (a prompt without a prefill worker, or a
// preempted sequence) is computed in chunks beside the others. When no block is left for the next
// token, the youngest sequence gives all of its blocks back: they go to the swap space and come
// back when there is room, or, where that is full, are computed again. Its tokens stay, so nothing
// is drawn or sent twice.
//
// Nothing can hang: the oldest running sequence always advances, who was preempted comes back
// before anyone new is let in, oldest first, and a single sequence fits in the pool. The plan is a
// function of the sequences and the memory; no clock is asked. Engine thread only.
class DecodeScheduler {
 public:
  // A sequence of the full context must fit in the pool by itself.
  DecodeScheduler(const DecodeSchedulerOptions& options, runtime::KvMemory* memory);

  // Where preempted sequences go; null: none. Before the first of them.
  void set_swap_space(SwapSpace* swap) { swap_ = swap; }

  // Everything but its last token is computed.
  void AddRunning(runtime::Sequence* sequence);
  // Nothing is computed, and it has no blocks.
  void AddPrompt(runtime::Sequence* sequence) { prefill_.Enqueue(sequence); }
  // A sequence that was running elsewhere or has lost its blocks: as AddPrompt, before all prompts.
  void AddPreempted(runtime::Sequence* sequence);
  // False if it is not here. Its blocks stay with it.
  bool Remove(runtime::Sequence* sequence);

  struct Plan {
    std::vector<runtime::Sequence*> decode;  // one token each
    std::vector<runtime::PrefillChunk> chunks;
    bool empty() const { return decode.empty() && chunks.empty(); }
  };
  // The next step. Decoding sequences have a block for their token.
  const Plan& MakePlan();
  // The last one made.
  const Plan& plan() const { return plan_; }
  // Blocks for `drafts` more tokens of a planned sequence. How many fit: drafts never take the
  // blocks that running sequences need next, nor preempt anyone.
  int GrowForDrafts(runtime::Sequence* sequence, int drafts);
  // The planned sequence has its new tokens: all but the last of them are computed, and what
  // rejected drafts took is given back.
  void FinishDecode(runtime::Sequence* sequence);
  void FinishChunk(const runtime::PrefillChunk& chunk);

  int num_running() const { return static_cast<int>(running_.size()); }
  int num_waiting() const { return prefill_.num_waiting() + num_swapped(); }
  int num_prefilling() const { return prefill_.num_admitted(); }
  int num_swapped() const { return static_cast<int>(swapped_.size()); }
  bool empty() const { return running_.empty() && prefill_.empty() && swapped_.empty(); }
  int64_t queue_tokens() const { return prefill_.queue_tokens(); }
  // Preempted sequences that wait for blocks: nothing new is let in before them.
  int num_preempted_waiting() const;
  int64_t preemptions() const { return preemptions_; }

 private:
  struct Swapped {
    runtime::Sequence* sequence;
    std::vector<int> slots;  // of its blocks, from block 0
  };

  bool MakeRoom(runtime::Sequence* sequence);
  runtime::Sequence* Youngest() const;
  void Preempt(runtime::Sequence* sequence);
  // Swapped sequences come back while there is room, oldest first.
  void BringBack();
  bool SwapIn(const Swapped& swapped);

  const DecodeSchedulerOptions options_;
  runtime::KvMemory& memory_;
  SwapSpace* swap_ = nullptr;
  runtime::PrefillScheduler prefill_;
  std::vector<runtime::Sequence*> running_;    // by order
  std::vector<runtime::Sequence*> preempted_;  // computed again, or waiting for it
  std::vector<Swapped> swapped_;               // by order
  Plan plan_;
  int64_t preemptions_ = 0;
};

}  // namespace baton::decode
