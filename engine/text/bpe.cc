#include "engine/text/bpe.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

namespace baton::text {
namespace {

// Up to here a plain scan for the lowest rank is faster than the heap
// (tests/bench/tokenizer_bench.cc).
constexpr size_t kShortPiece = 64;

uint64_t PairKey(TokenId left, TokenId right) { return (uint64_t{left} << 32) | right; }

}  // namespace

Bpe::Bpe(TokenMap tokens,
         size_t vocab_size,
         const std::vector<BpeMerge>& merges,
         bool whole_pieces_first)
    : tokens_(std::move(tokens)), whole_(new std::atomic<uint8_t>[vocab_size]) {
  for (size_t byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    byte_tokens_[byte] = Find(absl::string_view(&c, 1)).value_or(kNoToken);
  }
  for (size_t id = 0; id < vocab_size; ++id) {
    whole_[id].store(whole_pieces_first ? kWhole : kUnknown, std::memory_order_relaxed);
  }
  ranks_.reserve(merges.size());
  results_.reserve(merges.size());
  for (uint32_t rank = 0; rank < merges.size(); ++rank) {
    ranks_[PairKey(merges[rank].left, merges[rank].right)] = rank;
    results_.push_back(merges[rank].result);
  }
}

std::optional<TokenId> Bpe::Find(absl::string_view bytes) const {
  const auto it = tokens_.find(bytes);
  return it == tokens_.end() ? std::nullopt : std::optional<TokenId>(it->second);
}

uint32_t Bpe::Rank(TokenId left, TokenId right) const {
  const auto it = ranks_.find(PairKey(left, right));
  return it == ranks_.end() ? kNoRank : it->second;
}

void Bpe::Encode(absl::string_view piece, std::vector<TokenId>* out) const {
  const auto token = tokens_.find(piece);
  if (token != tokens_.end() && IsWhole(token->second, piece)) {
    out->push_back(token->second);
  } else {
    Merge(piece, out);
  }
}

bool Bpe::IsWhole(TokenId id, absl::string_view bytes) const {
  std::atomic<uint8_t>& whole = whole_[id];
  if (whole.load(std::memory_order_relaxed) == kUnknown) {
    std::vector<TokenId> ids;
    Merge(bytes, &ids);
    whole.store(ids.size() == 1 && ids[0] == id ? kWhole : kNotWhole, std::memory_order_relaxed);
  }
  return whole.load(std::memory_order_relaxed) == kWhole;
}

void Bpe::Merge(absl::string_view piece, std::vector<TokenId>* out) const {
  std::vector<TokenId> symbols;
  symbols.reserve(piece.size());
  for (const char c : piece) {
    const TokenId id = byte_tokens_[static_cast<uint8_t>(c)];
    if (id != kNoToken) symbols.push_back(id);
  }
  if (symbols.size() <= kShortPiece) {
    MergeShort(&symbols);
  } else {
    MergeLong(&symbols);
  }
  out->insert(out->end(), symbols.begin(), symbols.end());
}

// Again and again the lowest rank, the leftmost of equals. ranks[i] belongs to the pair (i, i + 1).
void Bpe::MergeShort(std::vector<TokenId>* symbols) const {
  if (symbols->size() < 2) return;
  std::array<uint32_t, kShortPiece> ranks;
  TokenId* const ids = symbols->data();
  size_t num_pairs = symbols->size() - 1;
  for (size_t i = 0; i < num_pairs; ++i) ranks[i] = Rank(ids[i], ids[i + 1]);
  while (num_pairs > 0) {
    size_t best = 0;
    for (size_t i = 1; i < num_pairs; ++i) {
      if (ranks[i] < ranks[best]) best = i;
    }
    if (ranks[best] == kNoRank) break;
    ids[best] = results_[ranks[best]];
    std::copy(ids + best + 2, ids + num_pairs + 1, ids + best + 1);
    std::copy(ranks.begin() + best + 1, ranks.begin() + num_pairs, ranks.begin() + best);
    --num_pairs;
    if (best > 0) ranks[best - 1] = Rank(ids[best - 1], ids[best]);
    if (best < num_pairs) ranks[best] = Rank(ids[best], ids[best + 1]);
  }
  symbols->resize(num_pairs + 1);
}

// A heap of pairs by (rank, position) over a doubly linked list; entries that a later merge has
// outdated are skipped.
void Bpe::MergeLong(std::vector<TokenId>* symbols) const {
  const size_t count = symbols->size();
  std::vector<TokenId>& ids = *symbols;  // kNoToken once merged into the symbol before
  constexpr uint32_t kEnd = UINT32_MAX;
  std::vector<uint32_t> next(count), previous(count);
  std::vector<uint64_t> entries;  // rank << 32 | position of the left symbol
  entries.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    next[i] = i + 1 < count ? i + 1 : kEnd;
    previous[i] = i > 0 ? i - 1 : kEnd;
    if (i + 1 == count) break;
    const uint32_t rank = Rank(ids[i], ids[i + 1]);
    if (rank != kNoRank) entries.push_back((uint64_t{rank} << 32) | i);
  }
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> heap(std::greater<>(),
                                                                            std::move(entries));
  while (!heap.empty()) {
    const uint32_t rank = static_cast<uint32_t>(heap.top() >> 32);
    const uint32_t at = static_cast<uint32_t>(heap.top());
    heap.pop();
    const uint32_t right = next[at];
    if (ids[at] == kNoToken || right == kEnd || Rank(ids[at], ids[right]) != rank) continue;
    ids[at] = results_[rank];
    ids[right] = kNoToken;
    next[at] = next[right];
    if (next[at] != kEnd) {
      previous[next[at]] = at;
      const uint32_t after = Rank(ids[at], ids[next[at]]);
      if (after != kNoRank) heap.push((uint64_t{after} << 32) | at);
    }
    if (previous[at] != kEnd) {
      const uint32_t before = Rank(ids[previous[at]], ids[at]);
      if (before != kNoRank) heap.push((uint64_t{before} << 32) | previous[at]);
    }
  }
  ids.erase(std::remove(ids.begin(), ids.end(), kNoToken), ids.end());
}

}  // namespace baton::text
