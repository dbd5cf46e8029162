#include "engine/text/added_tokens.h"

namespace baton::text {

void AddedTokenFinder::Add(absl::string_view content, TokenId id) {
  starts_[static_cast<uint8_t>(content[0])] = true;
  uint32_t node = kRoot;
  for (const char c : content) {
    const uint64_t edge = (uint64_t{node} << 8) | static_cast<uint8_t>(c);
    // Every edge leads to a node of its own, so their number names the next one.
    node = edges_.try_emplace(edge, static_cast<uint32_t>(edges_.size() + 1)).first->second;
  }
  token_ends_.try_emplace(node, id);
}

std::optional<AddedTokenFinder::Match> AddedTokenFinder::Find(absl::string_view text,
                                                              size_t from,
                                                              size_t to) const {
  for (size_t begin = from; begin < to; ++begin) {
    if (!starts_[static_cast<uint8_t>(text[begin])]) continue;
    std::optional<Match> longest;
    uint32_t node = kRoot;
    for (size_t pos = begin; pos < to; ++pos) {
      const auto edge = edges_.find((uint64_t{node} << 8) | static_cast<uint8_t>(text[pos]));
      if (edge == edges_.end()) break;
      node = edge->second;
      const auto token = token_ends_.find(node);
      if (token != token_ends_.end()) longest = Match{begin, pos + 1, token->second};
    }
    if (longest) return longest;
  }
  return std::nullopt;
}

}  // namespace baton::text
