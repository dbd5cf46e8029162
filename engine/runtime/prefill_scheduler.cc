#include "engine/runtime/prefill_scheduler.h"

#include <algorithm>

#include "engine/base/log.h"

namespace baton::runtime {
namespace {

// Tokens of the next chunk of a sequence with `pending` tokens from `start`: all that is left, or
// whole blocks. 0 when the budget holds neither.
int ChunkTokens(int start, int pending, int budget) {
  if (pending <= budget) return pending;
  const int border = (start + budget) / kv::kBlockTokens * kv::kBlockTokens;
  return std::max(0, border - start);
}

template <typename Container>
bool Erase(Container* container, Sequence* sequence) {
  const auto found = std::find(container->begin(), container->end(), sequence);
  if (found == container->end()) return false;
  container->erase(found);
  return true;
}

}  // namespace

void PrefillScheduler::Enqueue(Sequence* sequence) {
  BATON_CHECK(sequence->num_pending() > 0 && sequence->blocks.empty());
  const auto later = std::find_if(waiting_.begin(), waiting_.end(), [&](const Sequence* other) {
    return other->order > sequence->order;
  });
  waiting_.insert(later, sequence);
}

bool PrefillScheduler::Remove(Sequence* sequence) {
  return Erase(&waiting_, sequence) || Erase(&admitted_, sequence);
}

bool PrefillScheduler::Admit(int keep_available) {
  Sequence* sequence = waiting_.front();
  const int max_blocks = kv::MaxMatchBlocks(sequence->num_tokens());
  KvMemory::ExtendHashes(sequence);
  const int matched = memory_->cache().MatchLength(sequence->tokens, sequence->hashes, max_blocks);
  const int missing = kv::BlocksFor(sequence->num_tokens()) - matched;
  if (missing + keep_available > memory_->pool().num_available()) return false;
  // Matched blocks that nobody used were counted as available, so the second look can still fail.
  memory_->MatchPrefix(sequence, max_blocks);
  if (missing + keep_available > memory_->pool().num_available() ||
      !memory_->Grow(sequence, sequence->num_tokens()).ok()) {
    memory_->Release(sequence);
    return false;
  }
  waiting_.pop_front();
  admitted_.push_back(sequence);
  return true;
}

void PrefillScheduler::Plan(int token_budget,
                            int max_sequences,
                            int keep_available,
                            std::vector<PrefillChunk>* chunks) {
  chunks->clear();
  for (size_t i = 0; static_cast<int>(chunks->size()) < max_sequences && token_budget > 0; ++i) {
    if (i == admitted_.size() && (waiting_.empty() || !Admit(keep_available))) return;
    Sequence* sequence = admitted_[i];
    const int tokens = ChunkTokens(sequence->num_computed, sequence->num_pending(), token_budget);
    if (tokens == 0) return;
    chunks->push_back({sequence, tokens, tokens == sequence->num_pending()});
    token_budget -= tokens;
  }
}

void PrefillScheduler::Finish(const PrefillChunk& chunk) {
  chunk.sequence->num_computed += chunk.num_tokens;
  memory_->Publish(chunk.sequence);
  if (chunk.last) BATON_CHECK(Erase(&admitted_, chunk.sequence));
}

int64_t PrefillScheduler::queue_tokens() const {
  int64_t tokens = 0;
  for (const Sequence* sequence : waiting_) tokens += sequence->num_pending();
  for (const Sequence* sequence : admitted_) tokens += sequence->num_pending();
  return tokens;
}

}  // namespace baton::runtime
