#include "cli/trace.h"

#include <sstream>
#include <string>

#include "gtest/gtest.h"

namespace baton::cli {
namespace {

absl::StatusOr<std::vector<TraceRequest>> Read(const std::string& text) {
  std::istringstream in(text);
  return ReadTrace(in);
}

TEST(TraceTest, ReadsRequestsInOrderOfArrival) {
  const auto trace = Read(
      "{\"arrival\": 2.5, \"prompt_tokens\": 100, \"output_tokens\": 7}\n\n"
      "{\"arrival\": 1, \"prompt_tokens\": 50, \"output_tokens\": 1, \"prefix_group\": \"a\", "
      "\"prefix_tokens\": 64, \"tenant\": \"t\", \"priority\": \"low\"}\n"
      "{\"arrival\": 3, \"prompt_tokens\": 50, \"output_tokens\": 1, \"prefix_group\": 17}\n");
  ASSERT_TRUE(trace.ok()) << trace.status();
  ASSERT_EQ(trace->size(), 3u);
  EXPECT_EQ((*trace)[0].prefix_tokens, 50u) << "no more than the prompt";
  EXPECT_FALSE((*trace)[0].is_session);
  EXPECT_EQ((*trace)[0].priority, "low");
  EXPECT_EQ((*trace)[1].arrival_s, 2.5);
  EXPECT_EQ((*trace)[1].output_tokens, 7u);
  EXPECT_EQ((*trace)[1].prefix_group, "");
  EXPECT_EQ((*trace)[2].prefix_group, "17");
  EXPECT_TRUE((*trace)[2].is_session);
}

TEST(TraceTest, BadLinesAreRefusedByNumberAndField) {
  const std::string good = "{\"arrival\": 1, \"prompt_tokens\": 50, \"output_tokens\": 1}\n";
  const std::pair<const char*, const char*> cases[] = {
      {"{\"prompt_tokens\": 50, \"output_tokens\": 1}", "arrival"},
      {"{\"arrival\": -1, \"prompt_tokens\": 50, \"output_tokens\": 1}", "arrival"},
      {"{\"arrival\": 1e999, \"prompt_tokens\": 50, \"output_tokens\": 1}", "arrival"},
      {"{\"arrival\": 1, \"prompt_tokens\": 0, \"output_tokens\": 1}", "prompt_tokens"},
      {"{\"arrival\": 1, \"prompt_tokens\": 5.5, \"output_tokens\": 1}", "prompt_tokens"},
      {"{\"arrival\": 1, \"prompt_tokens\": 5}", "output_tokens"},
      {"{\"arrival\": 1, \"prompt_tokens\": 5, \"output_tokens\": 99999999999}", "output_tokens"},
      {"{\"arrival\": 1, \"prompt_tokens\": 5, \"output_tokens\": 1, \"priority\": \"x\"}",
       "priority"},
      {"{\"arrival\": 1, \"prompt_tokens\": 5, \"output_tokens\": 1, \"tenant\": []}", "tenant"},
      {"[]", "object"},
      {"{", ""}};
  for (const auto& [line, field] : cases) {
    const absl::Status status = Read(good + line + "\n").status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << line;
    EXPECT_NE(status.message().find("line 2"), absl::string_view::npos) << status;
    EXPECT_NE(status.message().find(field), absl::string_view::npos) << status;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(Read("\n").status())) << "nothing to simulate";
}

}  // namespace
}  // namespace baton::cli
