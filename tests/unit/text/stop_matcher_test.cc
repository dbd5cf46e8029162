#include "engine/text/stop_matcher.h"

#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace baton::text {
namespace {

StopMatcher Matcher(std::vector<std::string> stops, bool include_stop = false) {
  auto matcher = StopMatcher::Create(std::move(stops), include_stop);
  EXPECT_TRUE(matcher.ok()) << matcher.status();
  return *std::move(matcher);
}

// Feeds the portions until a match; "|" marks where one portion's release ends.
std::string Feed(StopMatcher matcher, const std::vector<std::string>& portions) {
  std::string out;
  for (const std::string& portion : portions) {
    if (matcher.Push(portion, &out)) return out + "!";
    out += "|";
  }
  matcher.Flush(&out);
  return out;
}

TEST(StopMatcherTest, ReleasesEverythingAtOnceWithoutStops) {
  EXPECT_EQ(Feed(StopMatcher(), {"ab", "", "c"}), "ab||c|");
  EXPECT_EQ(Feed(Matcher({}), {"ab"}), "ab|");
}

// Case 2.1.
TEST(StopMatcherTest, FindsAMatchThatBeginsInsideOneTokenAndEndsInAnother) {
  EXPECT_EQ(Feed(Matcher({"END"}), {"textE", "N", "Dmore"}), "text||!");
  EXPECT_EQ(Feed(Matcher({"END"}, true), {"textE", "N", "Dmore"}), "text||END!");
}

// Case 2.2 b.
TEST(StopMatcherTest, FlushReleasesTheBeginningOfAStopThatDidNotCome) {
  EXPECT_EQ(Feed(Matcher({"END"}), {"textEN"}), "text|EN");
  EXPECT_EQ(Feed(Matcher({"END"}), {"EN", "ENX"}), "|ENENX|");
}

// Case 2.2 a.
TEST(StopMatcherTest, NothingFollowsAMatch) {
  StopMatcher matcher = Matcher({"b"});
  std::string out;
  EXPECT_TRUE(matcher.Push("abc", &out));
  EXPECT_TRUE(matcher.Push("def", &out));
  matcher.Flush(&out);
  EXPECT_EQ(out, "a");
  EXPECT_EQ(matcher.matched_index(), 0u);
}

TEST(StopMatcherTest, TheMatchThatEndsFirstWinsAndTheLongestOfThose) {
  EXPECT_EQ(Feed(Matcher({"abcde", "cd"}), {"xabcdef"}), "xab!");
  StopMatcher matcher = Matcher({"cd", "bcd", "d"});
  std::string out;
  EXPECT_TRUE(matcher.Push("abcd", &out));
  EXPECT_EQ(out, "a");
  EXPECT_EQ(matcher.stop(*matcher.matched_index()), "bcd");
}

TEST(StopMatcherTest, OverlappingBeginningsAreNotMissed) {
  EXPECT_EQ(Feed(Matcher({"aab"}), {"a", "a", "a", "b"}), "||a|!");
  EXPECT_EQ(Feed(Matcher({"abab", "ba"}), {"abab"}), "a!");
}

TEST(StopMatcherTest, RefusesStopsThatCannotWork) {
  for (const auto& stops : {std::vector<std::string>{""},
                            std::vector<std::string>{std::string(kMaxStopStringBytes + 1, 'x')},
                            std::vector<std::string>(kMaxStopStrings + 1, "x")}) {
    EXPECT_EQ(StopMatcher::Create(stops, false).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  std::string nul("\0", 1);
  EXPECT_EQ(Feed(Matcher({nul}), {absl::StrCat("a", nul)}), "a!");
}

// The same by brute force: the smallest end of any match, then the longest.
std::string Expected(const std::string& text, const std::vector<std::string>& stops) {
  for (size_t end = 1; end <= text.size(); ++end) {
    size_t longest = 0;
    for (const std::string& stop : stops) {
      if (stop.size() <= end && text.compare(end - stop.size(), stop.size(), stop) == 0)
        longest = std::max(longest, stop.size());
    }
    if (longest > 0) return text.substr(0, end - longest) + "!";
  }
  return text;
}

TEST(StopMatcherTest, AgreesWithBruteForceForAnyCutIntoTokens) {
  std::mt19937 random(7);
  const auto word = [&](size_t max) {
    std::string text(1 + random() % max, 'a');
    for (char& c : text) c = static_cast<char>('a' + random() % 2);
    return text;
  };
  for (int round = 0; round < 5000; ++round) {
    std::vector<std::string> stops;
    for (size_t i = 0; i < 1 + round % 3u; ++i) stops.push_back(word(6));
    StopMatcher matcher = Matcher(stops);
    std::string text, out;
    bool matched = false;
    while (text.size() < 24 && !matched) {
      const std::string portion = word(5);
      text += portion;
      matched = matcher.Push(portion, &out);
      // What was released may never be taken back: it is a prefix of the final text whatever
      // follows.
      ASSERT_EQ(Expected(text, stops).compare(0, out.size(), out), 0);
    }
    matcher.Flush(&out);
    ASSERT_EQ(matched ? out + "!" : out, Expected(text, stops)) << text;
  }
}

}  // namespace
}  // namespace baton::text
