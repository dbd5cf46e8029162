#include "cli/bench_summary.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace baton::cli {
namespace {

// Due at `due`, first token `ttft` later, then `tokens - 1` more, one each `gap`.
BenchRecord Record(double due, double ttft, uint32_t tokens, double gap) {
  BenchRecord record;
  record.due = due;
  record.sent = due + 0.25;
  record.prompt_tokens = 10;
  record.wanted_tokens = tokens;
  for (uint32_t i = 0; i < tokens; ++i) record.Arrived(due + ttft + i * gap, 1);
  record.end = record.last + 0.5;
  return record;
}

TEST(BenchSummaryTest, PercentilesLieOnTheLineBetweenRanks) {
  Sample sample;
  EXPECT_EQ(sample.Percentile(50), 0);
  for (const double value : {40.0, 10.0, 30.0, 20.0}) sample.Add(value);
  sample.Sort();
  EXPECT_DOUBLE_EQ(sample.Percentile(0), 10);
  EXPECT_DOUBLE_EQ(sample.Percentile(50), 25);
  EXPECT_DOUBLE_EQ(sample.Percentile(90), 37);  // rank 2.7 of 0 to 3
  EXPECT_DOUBLE_EQ(sample.Percentile(100), 40);
  EXPECT_DOUBLE_EQ(sample.mean(), 25);
  EXPECT_DOUBLE_EQ(sample.max(), 40);
}

// What the client lost before it sent counts as waiting: no coordinated omission.
TEST(BenchSummaryTest, LatenciesCountFromWhenARequestWasDue) {
  const BenchRecord record = Record(2, 1, 5, 0.5);
  EXPECT_DOUBLE_EQ(record.ttft(), 1);
  EXPECT_DOUBLE_EQ(record.e2e(), 3.5);
  EXPECT_DOUBLE_EQ(record.tpot(), 0.5);
  const BenchSummary summary = Summarize({record}, {});
  EXPECT_DOUBLE_EQ(summary.lag.max(), 0.25);
}

TEST(BenchSummaryTest, TokensOfOneMessageShareItsWait) {
  BenchRecord record;
  record.Arrived(1, 2);  // the first token brought another along
  record.Arrived(1.6, 3);
  record.Arrived(1.7, 0);  // no token: text alone, or the end
  ASSERT_EQ(record.gaps.size(), 3u);
  for (const float gap : record.gaps) EXPECT_FLOAT_EQ(gap, 0.2f);
  EXPECT_EQ(record.tokens, 5u);
  EXPECT_DOUBLE_EQ(record.tpot(), 0.15);
}

TEST(BenchSummaryTest, GoodputCountsWhatMeetsBothObjectives) {
  std::vector<BenchRecord> records = {Record(0, 1, 3, 0.1), Record(1, 3, 3, 0.1),
                                      Record(2, 1, 3, 0.5), Record(3, 1, 3, 0.1)};
  records[3].code = "UNAVAILABLE";
  const BenchSummary all = Summarize(records, {});
  EXPECT_EQ(all.good, 3u);
  const BenchSummary both = Summarize(records, {2, 0.2});
  EXPECT_EQ(both.requests, 4u);
  EXPECT_EQ(both.completed, 3u);
  EXPECT_EQ(both.good, 1u);
  EXPECT_DOUBLE_EQ(both.good_share(), 0.25);
  EXPECT_EQ(both.codes.at("UNAVAILABLE"), 1u);
  EXPECT_EQ(both.ttft.count(), 3u);
  EXPECT_EQ(both.itl.count(), 6u);
  EXPECT_DOUBLE_EQ(both.duration_s, 4.7);
  EXPECT_DOUBLE_EQ(both.PerSecond(47), 10);
  // An answer that is too short is not good, however fast.
  records[0].wanted_tokens = 4;
  EXPECT_EQ(Summarize(records, {2, 0.2}).good, 0u);
  EXPECT_EQ(Summarize(records, {}).short_answers, 1u);
}

TEST(BenchSummaryTest, JsonHasTheFiguresAndAnEmptyRunToo) {
  const std::string text =
      BenchJson({"h:1", "model \"x\"", "load", 3}, Summarize({Record(0, 1, 4, 0.1)}, {2, 0.2}));
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(json.is_object());
  EXPECT_EQ(json["model"], "model \"x\"");
  EXPECT_EQ(json["output_tokens"], 4);
  EXPECT_EQ(json["goodput"]["good"], 1);
  EXPECT_EQ(json["itl_s"]["count"], 3);
  const auto nothing = nlohmann::json::parse(BenchJson({}, Summarize({}, {})), nullptr, false);
  EXPECT_EQ(nothing["goodput"]["share"], 0);
}

TEST(BenchSummaryTest, HtmlEscapesNamesAndNeedsNothingFromOutside) {
  const std::vector<BenchRecord> records = {Record(0, 1, 4, 0.1), Record(1, 2, 4, 0.1)};
  const std::string page =
      BenchHtml({"h:1", "<script>alert(1)</script>", "load", 3}, Summarize(records, {}), records);
  EXPECT_EQ(page.find("<script"), std::string::npos);
  EXPECT_NE(page.find("&lt;script"), std::string::npos);
  for (const char* outside : {"http:", "https:", "src=", "href=", "@import", "url("})
    EXPECT_EQ(page.find(outside), std::string::npos) << outside;
  size_t plots = 0;
  for (size_t at = page.find("<svg"); at != std::string::npos; at = page.find("<svg", at + 1))
    ++plots;
  EXPECT_EQ(plots, 5u);
  EXPECT_EQ(page.find("nan"), std::string::npos);
  EXPECT_EQ(BenchHtml({}, Summarize({}, {}), {}).find("nan"), std::string::npos);
}

}  // namespace
}  // namespace baton::cli
