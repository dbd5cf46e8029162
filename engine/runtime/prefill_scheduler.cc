#include "engine/runtime/prefill_scheduler.h"

#include <algorithm>
#include <limits>

#include "engine/base/log.h"

namespace baton::runtime {
namespace {

// Computed tokens of others that outweigh one token of a prompt's own length.
constexpr int64_t kAgeing = 2;

// Tokens of the next chunk of a sequence with `pending` tokens from `start`: all that is left, or
// whole blocks. 0 when the budget holds neither.
int ChunkTokens(int start, int pending, int budget) {
  if (pending <= budget) return pending;
  const int border = (start + budget) / kv::kBlockTokens * kv::kBlockTokens;
  return std::max(0, border - start);
}

}  // namespace

void PrefillScheduler::Enqueue(Sequence* sequence, bool urgent) {
  BATON_CHECK(sequence->num_pending() > 0 && sequence->blocks.empty());
  entries_.push_back({sequence, tokens_computed_, urgent});
}

bool PrefillScheduler::Remove(Sequence* sequence) {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return entry.sequence == sequence; });
  if (found == entries_.end()) return false;
  num_admitted_ -= found->admitted ? 1 : 0;
  entries_.erase(found);
  return true;
}

int64_t PrefillScheduler::Score(const Entry& entry) const {
  if (entry.urgent) return std::numeric_limits<int64_t>::min();
  const int priority = std::clamp(entry.sequence->priority, -kMaxPriority, kMaxPriority);
  return kAgeing * (entry.sequence->num_pending() - int64_t{priority} * kPriorityTokens) -
         (tokens_computed_ - entry.since);
}

void PrefillScheduler::Sort() {
  std::sort(entries_.begin(), entries_.end(), [this](const Entry& a, const Entry& b) {
    const int64_t score_a = Score(a);
    const int64_t score_b = Score(b);
    return score_a != score_b ? score_a < score_b : a.sequence->order < b.sequence->order;
  });
}

bool PrefillScheduler::Admit(Entry* entry, int keep_available) {
  Sequence* sequence = entry->sequence;
  const int max_blocks = kv::MaxMatchBlocks(sequence->num_tokens());
  KvMemory::ExtendHashes(sequence);
  const int matched = memory_->cache().MatchLength(sequence->tokens, sequence->hashes, max_blocks);
  const int missing = kv::BlocksFor(sequence->num_tokens()) - matched;
  if (missing > memory_->pool().num_available() - keep_available) return false;
  // Matched blocks that nobody used were counted as available, so the second look can still fail.
  memory_->MatchPrefix(sequence, max_blocks);
  if (missing > memory_->pool().num_available() - keep_available ||
      !memory_->Grow(sequence, sequence->num_tokens()).ok()) {
    memory_->Release(sequence);
    return false;
  }
  entry->admitted = true;
  ++num_admitted_;
  return true;
}

int PrefillScheduler::FirstShare(int token_budget) const {
  const bool shorter_waits =
      std::any_of(entries_.begin(), entries_.end(), [this](const Entry& entry) {
        return entry.sequence->num_pending() < entries_.front().sequence->num_pending();
      });
  return shorter_waits ? std::min(token_budget, std::max(kv::kBlockTokens, token_budget / 2))
                       : token_budget;
}

void PrefillScheduler::Plan(int token_budget,
                            int max_sequences,
                            int keep_available,
                            std::vector<PrefillChunk>* chunks) {
  chunks->clear();
  Sort();
  const int share = FirstShare(token_budget);
  bool can_admit = true;
  for (Entry& entry : entries_) {
    if (static_cast<int>(chunks->size()) == max_sequences || token_budget == 0) break;
    if (!entry.admitted) {
      can_admit = can_admit && Admit(&entry, keep_available);
      if (!can_admit) continue;
    }
    Sequence* sequence = entry.sequence;
    const int tokens = ChunkTokens(sequence->num_computed, sequence->num_pending(),
                                   chunks->empty() ? share : token_budget);
    if (tokens == 0) continue;
    chunks->push_back({sequence, tokens, tokens == sequence->num_pending()});
    token_budget -= tokens;
  }
  if (!chunks->empty()) Extend(&chunks->front(), token_budget);
}

void PrefillScheduler::Extend(PrefillChunk* first, int token_budget) {
  const Sequence& sequence = *first->sequence;
  const int tokens =
      ChunkTokens(sequence.num_computed, sequence.num_pending(), first->num_tokens + token_budget);
  first->num_tokens = std::max(first->num_tokens, tokens);
  first->last = first->num_tokens == sequence.num_pending();
}

void PrefillScheduler::Finish(const PrefillChunk& chunk) {
  chunk.sequence->num_computed += chunk.num_tokens;
  tokens_computed_ += chunk.num_tokens;
  memory_->Publish(chunk.sequence);
  if (chunk.last) BATON_CHECK(Remove(chunk.sequence));
}

int64_t PrefillScheduler::queue_tokens() const {
  int64_t tokens = 0;
  for (const Entry& entry : entries_) tokens += entry.sequence->num_pending();
  return tokens;
}

Sequence* PrefillScheduler::YoungestAdmitted() const {
  Sequence* youngest = nullptr;
  for (const Entry& entry : entries_) {
    if (!entry.admitted) continue;
    if (youngest == nullptr || entry.sequence->order > youngest->order) youngest = entry.sequence;
  }
  return youngest;
}

}  // namespace baton::runtime
