#include "engine/base/json.h"

#include <string>

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

#include "engine/base/utf8.h"

namespace baton::base {
namespace {

TEST(JsonTest, KeepsMemberOrderAndNumberText) {
  auto value = ParseJson(
      R"( {"b": 1.0, "a": [1e-07, 123456789012345678901234567890, -0], "c": {"d": null}} )");
  ASSERT_TRUE(value.ok()) << value.status();
  ASSERT_EQ(value->members().size(), 3u);
  EXPECT_EQ(value->members()[0].key, "b");
  EXPECT_EQ(value->members()[0].value.text(), "1.0");
  EXPECT_EQ(value->members()[1].value.items()[1].text(), "123456789012345678901234567890");
  EXPECT_TRUE(value->Find("c")->Find("d")->is_null());
  EXPECT_EQ(value->Find("e"), nullptr);
}

TEST(JsonTest, ReadsEveryEscape) {
  auto value = ParseJson(R"("\"\\\/\b\f\n\r\t\u0000\u00e9\ud83e\udee0")");
  ASSERT_TRUE(value.ok()) << value.status();
  EXPECT_EQ(value->text(), std::string("\"\\/\b\f\n\r\t\0\xC3\xA9\xF0\x9F\xAB\xA0", 15));
}

TEST(JsonTest, RefusesWhatIsNotJson) {
  for (const char* text : {"",
                           " ",
                           "{",
                           "[",
                           "[1,]",
                           "{\"a\"}",
                           "{\"a\":}",
                           "{\"a\":1,}",
                           "{a:1}",
                           "01",
                           "-",
                           "1.",
                           ".5",
                           "1e",
                           "+1",
                           "tru",
                           "nul",
                           "NaN",
                           "Infinity",
                           "\"",
                           "\"\\",
                           "\"\\u12",
                           "\"\\u12g4\"",
                           "\"\\x\"",
                           "\"\\ud800\"",
                           "\"\\ud800\\u0041\"",
                           "\"\\udc00\"",
                           "\"\n\"",
                           "1 2",
                           "[1 2]",
                           "\"\xFF\"",
                           "\"\xED\xA0\x80\"",
                           "'a'",
                           "\xEF\xBB\xBF{}"}) {
    EXPECT_EQ(ParseJson(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(JsonTest, RefusesWhatPassesALimit) {
  JsonLimits limits;
  limits.max_depth = 3;
  EXPECT_TRUE(ParseJson("[[[1]]]", limits).ok());
  EXPECT_EQ(ParseJson("[[[[]]]]", limits).status().code(), absl::StatusCode::kResourceExhausted);
  limits.max_values = 3;
  EXPECT_TRUE(ParseJson("[1,2]", limits).ok());
  EXPECT_EQ(ParseJson("[1,2,3]", limits).status().code(), absl::StatusCode::kResourceExhausted);
  limits.max_bytes = 4;
  EXPECT_EQ(ParseJson("[1,2]", limits).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ParseJson(std::string(1000000, '[')).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(JsonTest, TheLastOfEqualKeysWinsInTheFirstPlaceOrIsRefused) {
  auto value = ParseJson(R"({"a":1,"b":2,"a":3})");
  ASSERT_TRUE(value.ok());
  ASSERT_EQ(value->members().size(), 2u);
  EXPECT_EQ(value->members()[0].key, "a");
  EXPECT_EQ(value->members()[0].value.text(), "3");
  JsonLimits limits;
  limits.reject_duplicate_keys = true;
  EXPECT_EQ(ParseJson(R"({"a":1,"a":3})", limits).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(JsonTest, ConvertsOnlyNumbersThatFit) {
  EXPECT_EQ(*ParseJson("9223372036854775807")->AsInt64(), INT64_MAX);
  EXPECT_FALSE(ParseJson("9223372036854775808")->AsInt64().ok());
  EXPECT_FALSE(ParseJson("1.0")->AsInt64().ok());
  EXPECT_FALSE(ParseJson("\"1\"")->AsInt64().ok());
  EXPECT_EQ(*ParseJson("1e-06")->AsDouble(), 1e-06);
  EXPECT_FALSE(ParseJson("1e999")->AsDouble().ok());
  EXPECT_FALSE(ParseJson("null")->AsDouble().ok());
}

TEST(JsonTest, WrittenStringsReadBackEqual) {
  std::string text;
  for (int c = 0; c < 0x80; ++c) text.push_back(static_cast<char>(c));
  text += "\xC3\xA9\xF0\x9F\xAB\xA0";
  std::string json;
  AppendJsonString(text, &json);
  EXPECT_EQ(ParseJson(json)->text(), text);
  EXPECT_NE(json.find("\\u001f"), std::string::npos);
}

TEST(Utf8Test, ReplacesOneMaximalSubpartAtATime) {
  // The example of the Unicode Standard, table 3-8 and its neighbours.
  struct Case {
    std::string bytes;
    uint8_t length;
    Utf8Step::Kind kind;
  };
  const Case cases[] = {
      {"a", 1, Utf8Step::kValid},
      {"\xC3\xA9", 2, Utf8Step::kValid},
      {"\xC3", 1, Utf8Step::kIncomplete},
      {"\xF0\x9F\xAB", 3, Utf8Step::kIncomplete},
      {"\xF0\x80", 1, Utf8Step::kInvalid},
      {"\xE1\x80\xE2", 2, Utf8Step::kInvalid},
      {"\xED\xA0\x80", 1, Utf8Step::kInvalid},
      {"\xF4\x90\x80\x80", 1, Utf8Step::kInvalid},
      {"\xC0\xAF", 1, Utf8Step::kInvalid},
      {"\x80", 1, Utf8Step::kInvalid},
      {"\xF0\x9F\xAB\xA0", 4, Utf8Step::kValid},
      {"\xFF", 1, Utf8Step::kInvalid},
  };
  for (const Case& c : cases) {
    const Utf8Step step = DecodeUtf8(c.bytes);
    EXPECT_EQ(step.length, c.length) << c.bytes;
    EXPECT_EQ(step.kind, c.kind) << c.bytes;
  }
}

TEST(Utf8Test, EveryScalarValueRoundTripsAndNothingElseIsValid) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string bytes;
    AppendUtf8(c, &bytes);
    const Utf8Step step = DecodeUtf8(bytes);
    ASSERT_EQ(step.kind, Utf8Step::kValid) << uint32_t{c};
    ASSERT_EQ(step.code_point, c);
    ASSERT_EQ(step.length, bytes.size());
    ASSERT_EQ(Utf8Length(c), bytes.size());
  }
  EXPECT_TRUE(IsValidUtf8("plain text longer than eight bytes \xE4\xB8\x96"));
  EXPECT_FALSE(IsValidUtf8("plain text longer than eight bytes \xE4\xB8"));
}

}  // namespace
}  // namespace baton::base
