#include "decode_worker/ngram_index.h"

#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace baton::decode {
namespace {

using TokenIds = std::vector<uint32_t>;

NgramIndex::Match FindAtEnd(const TokenIds& tokens) {
  NgramIndex index(static_cast<int>(tokens.size()));
  index.Extend(tokens);
  return index.Find(tokens);
}

TEST(NgramIndexTest, FindsWhatFollowedTheSameEnd) {
  const NgramIndex::Match match = FindAtEnd({1, 2, 3, 4, 5, 9, 1, 2, 3, 4});
  EXPECT_EQ(match.length, 4);
  EXPECT_EQ(match.next, 4);
}

TEST(NgramIndexTest, TakesTheLongestMatchNotTheLatest) {
  // "7 1 2 3 4" occurs first, "1 2 3 4" with another token before it later.
  const NgramIndex::Match match = FindAtEnd({7, 1, 2, 3, 4, 50, 8, 1, 2, 3, 4, 60, 7, 1, 2, 3, 4});
  EXPECT_EQ(match.length, 5);
  EXPECT_EQ(match.next, 5);
}

TEST(NgramIndexTest, OfEqualMatchesTakesTheLatest) {
  const NgramIndex::Match match = FindAtEnd({8, 2, 3, 50, 9, 2, 3, 60, 7, 2, 3});
  EXPECT_EQ(match.length, 2);
  EXPECT_EQ(match.next, 7);
}

TEST(NgramIndexTest, FindsNothingInNewOrShortText) {
  EXPECT_EQ(FindAtEnd({1, 2, 3, 4, 5, 6, 7}).length, 0);
  EXPECT_EQ(FindAtEnd({}).length, 0);
  EXPECT_EQ(FindAtEnd({5}).length, 0);
  EXPECT_EQ(FindAtEnd({5, 5}).length, 0);
  EXPECT_EQ(FindAtEnd({5, 5, 5}).length, 2);  // overlapping itself
}

TEST(NgramIndexTest, LengthIsBounded) {
  EXPECT_EQ(FindAtEnd(TokenIds(500, 3)).length, NgramIndex::kMaxLength);
}

// Whatever the text and however it grew, a match is one, and a repeated end of 4 is never missed.
TEST(NgramIndexTest, MatchesAreRealInRandomTexts) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    const int size = 200;
    NgramIndex index(size);
    TokenIds tokens;
    while (static_cast<int>(tokens.size()) < size) {
      for (int step = 1 + random() % 4; step > 0 && static_cast<int>(tokens.size()) < size; --step)
        tokens.push_back(random() % 4);
      index.Extend(tokens);
      const NgramIndex::Match match = index.Find(tokens);
      const int end = static_cast<int>(tokens.size());
      ASSERT_LT(match.next, end);
      for (int i = 1; i <= match.length; ++i)
        ASSERT_EQ(tokens[match.next - i], tokens[end - i]) << "round " << round;
      if (match.length >= 4 || end < 5) continue;
      for (int other = 4; other < end; ++other) {
        ASSERT_FALSE(std::equal(tokens.end() - 4, tokens.end(), tokens.begin() + other - 4))
            << "missed at " << other;
      }
    }
  }
}

}  // namespace
}  // namespace baton::decode
