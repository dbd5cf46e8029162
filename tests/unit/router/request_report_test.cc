#include "router/request_report.h"

#include "absl/strings/match.h"
#include "gtest/gtest.h"

#include "router/trace_context.h"
#include "tests/unit/router/generate_call_fixture.h"

namespace baton::router {
namespace {

constexpr char kTrace[] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

TEST(TraceContextTest, GoesOnUnderASpanOfOurs) {
  const TraceContext trace = ParseTraceparent(kTrace, "1111111111111111");
  EXPECT_EQ(trace.trace_id, "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(trace.Header(), "00-0af7651916cd43dd8448eb211c80319c-1111111111111111-01");
  EXPECT_EQ(
      ParseTraceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-02", "1").Header(),
      "00-0af7651916cd43dd8448eb211c80319c-1-00");
}

TEST(TraceContextTest, LaterVersionsMayBeLonger) {
  EXPECT_FALSE(ParseTraceparent("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more", "1")
                   .trace_id.empty());
}

TEST(TraceContextTest, MalformedHeadersGiveNoTrace) {
  for (const char* bad : {"", "00", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0",
                          "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
                          "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01.more",
                          "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                          "00-00000000000000000000000000000000-b7ad6b7169203331-01",
                          "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
                          "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
                          "00-0af7651916cd43dd8448eb211c80319c_b7ad6b7169203331-01",
                          "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0z"}) {
    EXPECT_TRUE(ParseTraceparent(bad, "1").trace_id.empty()) << bad;
    EXPECT_EQ(ParseTraceparent(bad, "1").Header(), "");
  }
}

TEST(RequestReportTest, FieldsNameEveryStageAndNoText) {
  RequestReport report;
  report.request_id = "req-1";
  report.label = std::string(100, 'l');
  report.method = "generate";
  report.code = absl::StatusCode::kUnavailable;
  report.message = "prefill p1: gone";
  report.completion_tokens = 3;
  report.timings.set_ttft_s(0.0123);
  report.timings.set_prefill_worker("p1:1");
  const std::string text = RequestLogFields(report);
  EXPECT_TRUE(
      absl::StartsWith(text, " request_id=req-1 label=" + std::string(64, 'l') + " method="))
      << text;
  EXPECT_TRUE(absl::StrContains(text, " code=UNAVAILABLE message=\"prefill p1: gone\"")) << text;
  for (const char* stage : {"queue", "tokenize", "prefill", "prefill_queue", "prefill_compute",
                            "append", "handover", "first_decode", "itl_mean", "e2e"}) {
    EXPECT_TRUE(absl::StrContains(text, absl::StrCat(" ", stage, "_ms=0.000"))) << stage;
  }
  EXPECT_TRUE(absl::StrContains(text, " ttft_ms=12.300")) << text;
  EXPECT_TRUE(absl::StrContains(text, " prefill_worker=p1:1")) << text;
}

TEST(RequestReportTest, ServerTimingIsInMilliseconds) {
  v1::Timings timings;
  timings.set_queue_s(0.001);
  timings.set_e2e_s(2);
  const std::string text = ServerTiming(timings);
  EXPECT_TRUE(absl::StartsWith(text, "queue;dur=1.000, tokenize;dur=0.000, ")) << text;
  EXPECT_TRUE(absl::EndsWith(text, "e2e;dur=2000.000")) << text;
}

using RequestEndTest = GenerateCallFixture;

TEST_F(RequestEndTest, EveryRequestIsReportedOnceHoweverItEnds) {
  std::vector<RequestReport> reports;
  deps_.on_end = [&](const RequestReport& report) { reports.push_back(report); };
  Start(Request({}));                  // refused
  Running running = Start(Request());  // cancelled with workers at it
  running.call->OnClientCancel(absl::CancelledError("gone"));
  ASSERT_EQ(reports.size(), 2u);
  EXPECT_EQ(reports[0].code, absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(reports[1].code, absl::StatusCode::kCancelled);
  EXPECT_EQ(reports[1].prompt_tokens, 3u);
  EXPECT_EQ(reports[1].attempts, 1u);
  EXPECT_FALSE(reports[1].timings.decode_worker().empty());
  EXPECT_TRUE(absl::StartsWith(running.received->trailers["baton-server-timing"], "queue;dur="));
}

}  // namespace
}  // namespace baton::router
