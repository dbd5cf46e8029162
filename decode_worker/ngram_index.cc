#include "decode_worker/ngram_index.h"

#include <algorithm>
#include <bit>

#include "engine/base/log.h"

namespace baton::decode {
namespace {

// Long matches are rare and good, short ones many and poor: a few of each are enough.
constexpr int kLongOrder = 4;
constexpr int kLongPlaces = 16;
constexpr int kShortOrder = 2;
constexpr int kShortPlaces = 4;

// Tokens before `end_a` and `end_b` that are equal, at most `limit`.
int CommonSuffix(absl::Span<const uint32_t> tokens, int end_a, int end_b, int limit) {
  limit = std::min({limit, end_a, end_b});
  int length = 0;
  while (length < limit && tokens[end_a - 1 - length] == tokens[end_b - 1 - length]) ++length;
  return length;
}

}  // namespace

NgramIndex::NgramIndex(int capacity)
    : mask_(std::bit_ceil(static_cast<uint32_t>(std::max(capacity, 16))) - 1) {
  long_.order = kLongOrder;
  long_.most_places = kLongPlaces;
  short_.order = kShortOrder;
  short_.most_places = kShortPlaces;
  for (Chains* chains : {&long_, &short_}) {
    chains->latest.assign(mask_ + 1, 0);
    chains->previous.assign(capacity + 1, 0);
  }
}

uint32_t NgramIndex::HashBefore(absl::Span<const uint32_t> tokens, int end, int order) {
  uint64_t hash = 0;
  for (int i = end - order; i < end; ++i) hash = (hash ^ tokens[i]) * 0x9e3779b97f4a7c15u;
  return static_cast<uint32_t>(hash >> 32);
}

void NgramIndex::Extend(absl::Span<const uint32_t> tokens) {
  const int size = static_cast<int>(tokens.size());
  BATON_CHECK(size >= size_ && size < static_cast<int>(long_.previous.size()), "tokens=", size);
  // A place is worth knowing when something follows it, so the end comes with the next token.
  for (int end = std::max(size_, 1); end < size; ++end) {
    for (Chains* chains : {&long_, &short_}) {
      if (end < chains->order) continue;
      int32_t& latest = chains->latest[HashBefore(tokens, end, chains->order) & mask_];
      chains->previous[end] = latest;
      latest = end;
    }
  }
  size_ = size;
}

void NgramIndex::FindIn(const Chains& chains,
                        absl::Span<const uint32_t> tokens,
                        Match* best) const {
  if (size_ <= chains.order) return;
  int32_t end = chains.latest[HashBefore(tokens, size_, chains.order) & mask_];
  for (int i = 0; i < chains.most_places && end != 0; ++i, end = chains.previous[end]) {
    const int length = CommonSuffix(tokens, end, size_, kMaxLength);
    if (length >= chains.order && length > best->length) *best = {length, end};
  }
}

NgramIndex::Match NgramIndex::Find(absl::Span<const uint32_t> tokens) const {
  BATON_CHECK(static_cast<int>(tokens.size()) == size_);
  Match best;
  FindIn(long_, tokens, &best);
  if (best.length == 0) FindIn(short_, tokens, &best);
  return best;
}

}  // namespace baton::decode
