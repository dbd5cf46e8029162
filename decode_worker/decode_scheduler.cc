#include "decode_worker/decode_scheduler.h"

#include <algorithm>

#include "engine/base/log.h"

namespace baton::decode {

using runtime::Sequence;

DecodeScheduler::DecodeScheduler(const DecodeSchedulerOptions& options, runtime::KvMemory* memory)
    : options_(options), memory_(*memory), prefill_(memory) {
  plan_.decode.reserve(options.max_batch);
  plan_.chunks.reserve(options.max_prefill_sequences);
}

void DecodeScheduler::AddRunning(Sequence* sequence) {
  BATON_CHECK(sequence->num_pending() == 1);
  const auto later = std::find_if(running_.begin(), running_.end(), [&](const Sequence* other) {
    return other->order > sequence->order;
  });
  running_.insert(later, sequence);
}

bool DecodeScheduler::Remove(Sequence* sequence) {
  std::erase(preempted_, sequence);
  return std::erase(running_, sequence) > 0 || prefill_.Remove(sequence);
}

const DecodeScheduler::Plan& DecodeScheduler::MakePlan() {
  plan_.decode.clear();
  // Preemption takes from the back of running_, so what has been planned stays.
  for (size_t i = 0; i < running_.size() && i < static_cast<size_t>(options_.max_batch); ++i) {
    Sequence* sequence = running_[i];
    if (!MakeRoom(sequence)) break;
    plan_.decode.push_back(sequence);
  }
  // A block for the next token of everyone who runs is left alone, else who is let in is put back
  // at once.
  prefill_.Plan(options_.chunk_tokens, options_.max_prefill_sequences, num_running(),
                &plan_.chunks);
  return plan_;
}

bool DecodeScheduler::MakeRoom(Sequence* sequence) {
  while (!memory_.Grow(sequence, sequence->num_tokens()).ok()) {
    Sequence* victim = Youngest();
    Preempt(victim);
    if (victim == sequence) return false;
  }
  return true;
}

Sequence* DecodeScheduler::Youngest() const {
  Sequence* youngest = running_.back();
  for (Sequence* sequence : prefill_.admitted()) {
    if (sequence->order > youngest->order) youngest = sequence;
  }
  return youngest;
}

void DecodeScheduler::Preempt(Sequence* sequence) {
  ++preemptions_;
  Remove(sequence);
  memory_.Release(sequence);
  prefill_.Enqueue(sequence);
  preempted_.push_back(sequence);
}

void DecodeScheduler::FinishDecode(Sequence* sequence) {
  sequence->num_computed = sequence->num_tokens();
  memory_.Publish(sequence);
}

void DecodeScheduler::FinishChunk(const runtime::PrefillChunk& chunk) {
  prefill_.Finish(chunk);
  if (chunk.last) std::erase(preempted_, chunk.sequence);
}

int DecodeScheduler::num_preempted_waiting() const {
  return static_cast<int>(
      std::count_if(preempted_.begin(), preempted_.end(),
                    [](const Sequence* sequence) { return sequence->blocks.empty(); }));
}

}  // namespace baton::decode
