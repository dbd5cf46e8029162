#include "decode_worker/decode_scheduler.h"

#include <algorithm>
#include <limits>
#include <utility>

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

void DecodeScheduler::AddPreempted(Sequence* sequence) {
  prefill_.Enqueue(sequence, /*urgent=*/true);
  preempted_.push_back(sequence);
}

bool DecodeScheduler::Remove(Sequence* sequence) {
  std::erase(preempted_, sequence);
  const auto swapped =
      std::find_if(swapped_.begin(), swapped_.end(),
                   [sequence](const Swapped& entry) { return entry.sequence == sequence; });
  if (swapped != swapped_.end()) {
    swap_->Release(swapped->slots);
    swapped_.erase(swapped);
    return true;
  }
  return std::erase(running_, sequence) > 0 || prefill_.Remove(sequence);
}

const DecodeScheduler::Plan& DecodeScheduler::MakePlan() {
  plan_.decode.clear();
  BringBack();
  // Preemption takes from the back of running_, so what has been planned stays.
  for (size_t i = 0; i < running_.size() && i < static_cast<size_t>(options_.max_batch); ++i) {
    Sequence* sequence = running_[i];
    if (!MakeRoom(sequence)) break;
    plan_.decode.push_back(sequence);
  }
  // A block for the next token of everyone who runs is left alone, else who is let in is put back
  // at once.
  const int keep_available = swapped_.empty() ? num_running() : std::numeric_limits<int>::max();
  prefill_.Plan(options_.chunk_tokens, options_.max_prefill_sequences, keep_available,
                &plan_.chunks);
  return plan_;
}

void DecodeScheduler::BringBack() {
  while (!swapped_.empty() && SwapIn(swapped_.front())) {
    Sequence* sequence = swapped_.front().sequence;
    swap_->Release(swapped_.front().slots);
    swapped_.erase(swapped_.begin());
    AddRunning(sequence);
  }
}

bool DecodeScheduler::SwapIn(const Swapped& swapped) {
  Sequence* sequence = swapped.sequence;
  const int need = kv::BlocksFor(sequence->num_tokens());
  if (need + num_running() > memory_.pool().num_available()) return false;
  // What is still in the prefix cache need not be copied.
  memory_.MatchPrefix(sequence, kv::MaxMatchBlocks(sequence->num_tokens()));
  if (!memory_.Grow(sequence, sequence->num_tokens()).ok()) {
    memory_.Release(sequence);
    return false;
  }
  const size_t cached = static_cast<size_t>(sequence->num_computed) / kv::kBlockTokens;
  const absl::Span<const int> slots = absl::MakeConstSpan(swapped.slots).subspan(cached);
  swap_->In(slots, absl::MakeConstSpan(sequence->blocks).subspan(cached, slots.size()));
  sequence->num_computed = sequence->num_tokens() - 1;
  return true;
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
  Sequence* prefilling = prefill_.YoungestAdmitted();
  return prefilling != nullptr && prefilling->order > running_.back()->order ? prefilling
                                                                             : running_.back();
}

void DecodeScheduler::Preempt(Sequence* sequence) {
  ++preemptions_;
  const bool was_running = std::find(running_.begin(), running_.end(), sequence) != running_.end();
  Remove(sequence);
  std::vector<int> slots;
  if (was_running && swap_ != nullptr) {
    const auto used = static_cast<size_t>(kv::BlocksFor(sequence->num_computed));
    slots = swap_->Out(absl::MakeConstSpan(sequence->blocks).first(used));
  }
  memory_.Release(sequence);
  if (slots.empty()) return AddPreempted(sequence);
  const auto later = std::find_if(swapped_.begin(), swapped_.end(), [&](const Swapped& other) {
    return other.sequence->order > sequence->order;
  });
  swapped_.insert(later, Swapped{sequence, std::move(slots)});
}

int DecodeScheduler::GrowForDrafts(Sequence* sequence, int drafts) {
  const int room =
      static_cast<int>(sequence->blocks.size()) * kv::kBlockTokens - sequence->num_tokens();
  if (drafts <= room) return drafts;
  if (memory_.pool().num_available() <= num_running()) return room;
  return memory_.Grow(sequence, sequence->num_tokens() + drafts).ok() ? drafts : room;
}

void DecodeScheduler::FinishDecode(Sequence* sequence) {
  sequence->num_computed = sequence->num_tokens() - 1;
  memory_.Shrink(sequence, sequence->num_computed);
  memory_.Publish(sequence);
}

void DecodeScheduler::FinishChunk(const runtime::PrefillChunk& chunk) {
  prefill_.Finish(chunk);
  if (chunk.last) std::erase(preempted_, chunk.sequence);
}

int DecodeScheduler::num_preempted_waiting() const {
  return num_swapped() + static_cast<int>(std::count_if(
                             preempted_.begin(), preempted_.end(),
                             [](const Sequence* sequence) { return sequence->blocks.empty(); }));
}

}  // namespace baton::decode
