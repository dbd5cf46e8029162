#include "router/token_table.h"

#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/process/grpc_status.h"
#include "gtest/gtest.h"

namespace baton::router {
namespace {

constexpr char kSecret[] = "a-secret-of-some-length";

absl::Time At(absl::string_view text) {
  absl::Time time;
  std::string error;
  EXPECT_TRUE(absl::ParseTime(absl::RFC3339_full, text, &time, &error)) << error;
  return time;
}

TEST(TokenFileTest, LinesBecomeTokens) {
  const auto tokens = ParseTokens(
      "# who may call\n"
      "\n"
      "  alice\tsecret:a-secret-of-some-length rate=2.5 burst=7 concurrent=3 # the first\r\n"
      "alice-2 sha256:2BB80D537B1DA3E38BD30361AA855686BDE0EACD7162FEF6A25FE97BF527A25B "
      "tenant=alice expires=2030-01-31T12:00:00Z\n");
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  ASSERT_EQ(tokens->size(), 2u);
  EXPECT_EQ((*tokens)[0].name, "alice");
  EXPECT_EQ((*tokens)[0].tenant, "alice");
  EXPECT_TRUE(SameDigest((*tokens)[0].digest, DigestOf(kSecret)));
  EXPECT_EQ((*tokens)[0].rate, 2.5);
  EXPECT_EQ((*tokens)[0].burst, 7);
  EXPECT_EQ((*tokens)[0].concurrent, 3);
  EXPECT_EQ((*tokens)[0].expires, absl::InfiniteFuture());
  EXPECT_EQ((*tokens)[1].tenant, "alice");
  EXPECT_TRUE(SameDigest((*tokens)[1].digest, DigestOf("secret"))) << "sha256sum of it";
  EXPECT_EQ((*tokens)[1].rate, 0);
  EXPECT_EQ((*tokens)[1].expires, At("2030-01-31T12:00:00Z"));
  EXPECT_TRUE(ParseTokens("")->empty());
  EXPECT_TRUE(ParseTokens("# nobody")->empty());
}

TEST(TokenFileTest, BurstIsAtLeastOneRequestAndASecondsWorth) {
  EXPECT_EQ((*ParseTokens("a secret:0123456789abcdef rate=0.1"))[0].burst, 1);
  EXPECT_EQ((*ParseTokens("a secret:0123456789abcdef rate=9"))[0].burst, 9);
}

TEST(TokenFileTest, BadLinesAreNamedByNumberAndKeepTheirSecrets) {
  const std::string secret = "0123456789abcdef";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"want sha256:HEX", "alice"},
      {"want sha256:HEX", absl::StrCat("alice ", secret)},
      {"want a name", absl::StrCat("al/ice secret:", secret)},
      {"want a name", absl::StrCat(std::string(65, 'a'), " secret:", secret)},
      {"64 hex digits", absl::StrCat("alice sha256:", secret)},
      {"64 hex digits", absl::StrCat("alice sha256:", std::string(64, 'g'))},
      {"16 to 1024", "alice secret:short"},
      {"16 to 1024", absl::StrCat("alice secret:", std::string(1025, 'x'))},
      {"rate", absl::StrCat("alice secret:", secret, " rate=0")},
      {"rate", absl::StrCat("alice secret:", secret, " rate=nan")},
      {"rate", absl::StrCat("alice secret:", secret, " rate=inf")},
      {"rate", absl::StrCat("alice secret:", secret, " rate=1e9")},
      {"burst: needs", absl::StrCat("alice secret:", secret, " burst=3")},
      {"concurrent", absl::StrCat("alice secret:", secret, " concurrent=-1")},
      {"concurrent", absl::StrCat("alice secret:", secret, " concurrent=99999999999")},
      {"expires", absl::StrCat("alice secret:", secret, " expires=tomorrow")},
      {"tenant", absl::StrCat("alice secret:", secret, " tenant=")},
      {"want tenant=", absl::StrCat("alice secret:", secret, " ", secret)},
      {"twice", absl::StrCat("alice secret:other-", secret)},
      {"twice", absl::StrCat("carol secret:first-", secret)},
  };
  for (const auto& [words, line] : cases) {
    const std::string text =
        absl::StrCat(absl::StartsWith(words, "twice") ? "alice secret:first-0123456789abcdef\n"
                                                      : "# a comment\n",
                     line, "\n");
    const absl::Status status = ParseTokens(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << line;
    EXPECT_TRUE(absl::StrContains(status.message(), words)) << line << ": " << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "line 2")) << status;
    EXPECT_FALSE(absl::StrContains(status.message(), secret)) << status;
  }
}

TEST(TokenFileTest, NumberOfTokensIsBounded) {
  std::string text;
  for (size_t i = 0; i < kMaxTokens; ++i)
    absl::StrAppend(&text, "t", i, " secret:0123456789-", i, "-abcdef\n");
  EXPECT_EQ(ParseTokens(text)->size(), kMaxTokens);
  text += "one-more secret:0123456789abcdef\n";
  EXPECT_TRUE(absl::StrContains(ParseTokens(text).status().message(), "more than"));
}

TEST(TokenDigestTest, AllBytesCount) {
  const TokenDigest digest = DigestOf(kSecret);
  EXPECT_TRUE(SameDigest(digest, DigestOf(kSecret)));
  for (size_t i = 0; i < digest.size(); ++i) {
    TokenDigest other = digest;
    other[i] ^= 0x80;
    EXPECT_FALSE(SameDigest(digest, other)) << i;
  }
}

TEST(RateBucketTest, FillsWithTimeUpToItsBurst) {
  RateBucket bucket;
  absl::Duration now = absl::Seconds(1000);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(bucket.Take(2, 3, now), absl::ZeroDuration()) << i;
  EXPECT_EQ(bucket.Take(2, 3, now), absl::Milliseconds(500));
  now += absl::Milliseconds(499);
  EXPECT_EQ(bucket.Take(2, 3, now), absl::Milliseconds(1)) << "a refusal costs nothing";
  now += absl::Milliseconds(1);
  EXPECT_EQ(bucket.Take(2, 3, now), absl::ZeroDuration());
  now += absl::Hours(5);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(bucket.Take(2, 3, now), absl::ZeroDuration()) << i;
  EXPECT_GT(bucket.Take(2, 3, now), absl::ZeroDuration()) << "no more than the burst";
}

// Over a long time exactly the rate passes, however the calls come.
TEST(RateBucketTest, LetsTheRatePassInTheLongRun) {
  RateBucket bucket;
  int passed = 0;
  for (int tick = 0; tick <= 100'000; ++tick)
    passed += bucket.Take(5, 5, absl::Milliseconds(tick)) == absl::ZeroDuration();
  EXPECT_NEAR(passed, 5 * 100 + 5, 1);
}

class TokenTableTest : public testing::Test {
 protected:
  void Load(absl::string_view text) {
    auto tokens = ParseTokens(text);
    ASSERT_TRUE(tokens.ok()) << tokens.status();
    table_.Replace(*std::move(tokens));
  }
  absl::StatusOr<TokenTable::Entry> Enter(absl::string_view secret, CallCost cost) {
    return table_.Enter(absl::StrCat("Bearer ", secret), cost, wall_, now_);
  }
  absl::StatusCode Code(absl::string_view authorization) {
    return table_.Enter(authorization, CallCost::kNothing, wall_, now_).status().code();
  }

  TokenTable table_;
  absl::Time wall_ = At("2029-01-01T00:00:00Z");
  absl::Duration now_ = absl::Seconds(50);
};

TEST_F(TokenTableTest, OnlyKnownTokensPass) {
  Load("alice secret:0123456789abcdef\nbob secret:abcdef0123456789 tenant=team\n");
  EXPECT_EQ(Code("Bearer 0123456789abcdef"), absl::StatusCode::kOk);
  EXPECT_EQ(Code("bearer 0123456789abcdef"), absl::StatusCode::kOk) << "schemes have no case";
  EXPECT_EQ(Enter("abcdef0123456789", CallCost::kNothing)->token->tenant, "team");
  for (const std::string& wrong :
       {std::string(), std::string("Bearer"), std::string("Bearer "),
        std::string("0123456789abcdef"), std::string("Basic 0123456789abcdef"),
        std::string("Bearer 0123456789abcde"), std::string("Bearer 0123456789abcdef "),
        std::string("Bearer 0123456789abcdeF"),
        absl::StrCat("Bearer ", absl::BytesToHexString("0123456789abcdef")),
        absl::StrCat("Bearer ", std::string(1 << 20, 'x'))})
    EXPECT_EQ(Code(wrong), absl::StatusCode::kUnauthenticated) << wrong.substr(0, 60);
}

TEST_F(TokenTableTest, AnEmptyTableLetsNobodyIn) {
  EXPECT_EQ(Code("Bearer 0123456789abcdef"), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(Code(""), absl::StatusCode::kUnauthenticated);
}

TEST_F(TokenTableTest, TokensExpire) {
  Load("alice secret:0123456789abcdef expires=2029-06-01T00:00:00+02:00\n");
  wall_ = At("2029-05-31T21:59:59Z");
  EXPECT_TRUE(Enter("0123456789abcdef", CallCost::kAnswer).ok());
  wall_ = At("2029-05-31T22:00:00Z");
  const absl::Status status = Enter("0123456789abcdef", CallCost::kAnswer).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_TRUE(absl::StrContains(status.message(), "alice has expired")) << status;
}

TEST_F(TokenTableTest, RatesAreEachTokensOwnAndSayWhenToComeBack) {
  Load("a secret:0123456789abcdef rate=1 burst=2\nb secret:abcdef0123456789 rate=1\n");
  EXPECT_TRUE(Enter("0123456789abcdef", CallCost::kRequest).ok());
  EXPECT_TRUE(Enter("0123456789abcdef", CallCost::kAnswer).ok());
  const absl::Status refused = Enter("0123456789abcdef", CallCost::kRequest).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(process::RetryDelay(refused), absl::Seconds(1));
  EXPECT_TRUE(Enter("0123456789abcdef", CallCost::kNothing).ok()) << "looking costs nothing";
  EXPECT_TRUE(Enter("abcdef0123456789", CallCost::kRequest).ok()) << "another's";
  now_ += absl::Seconds(1);
  EXPECT_TRUE(Enter("0123456789abcdef", CallCost::kRequest).ok());
}

TEST_F(TokenTableTest, AnswersAtATimeAreBounded) {
  Load("a secret:0123456789abcdef concurrent=2 rate=3\n");
  const auto first = Enter("0123456789abcdef", CallCost::kAnswer);
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(Enter("0123456789abcdef", CallCost::kAnswer).ok());
  for (int i = 0; i < 5; ++i) {
    const absl::Status refused = Enter("0123456789abcdef", CallCost::kAnswer).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_TRUE(absl::StrContains(refused.message(), "concurrent=2")) << refused;
    EXPECT_TRUE(process::RetryDelay(refused).has_value());
  }
  --first->use->answers;
  EXPECT_TRUE(Enter("0123456789abcdef", CallCost::kAnswer).ok()) << "refusals cost no rate";
  EXPECT_EQ(Enter("0123456789abcdef", CallCost::kRequest).status().code(),
            absl::StatusCode::kResourceExhausted)
      << "now the rate";
}

TEST_F(TokenTableTest, ATokenKeepsItsUseWhenTheFileChanges) {
  Load("a secret:0123456789abcdef concurrent=1 rate=1\nb secret:bbbbbbbbbbbbbbbb\n");
  const auto open = Enter("0123456789abcdef", CallCost::kAnswer);
  ASSERT_TRUE(open.ok());
  Load("# a new secret, the same token\na secret:new-0123456789abcdef concurrent=1 rate=1\n");
  EXPECT_EQ(Code("Bearer 0123456789abcdef"), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(Code("Bearer bbbbbbbbbbbbbbbb"), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(Enter("new-0123456789abcdef", CallCost::kAnswer).status().code(),
            absl::StatusCode::kResourceExhausted);
  --open->use->answers;
  now_ += absl::Seconds(1);
  EXPECT_TRUE(Enter("new-0123456789abcdef", CallCost::kAnswer).ok());
}

TEST(TenantSaltTest, NoTwoTenantsHaveASaltInCommon) {
  EXPECT_NE(TenantSalt("a", "x"), TenantSalt("b", "x"));
  EXPECT_NE(TenantSalt("a", ""), TenantSalt("b", ""));
  EXPECT_NE(TenantSalt("a", "b"), TenantSalt("ab", ""));
  EXPECT_NE(TenantSalt("a", "\nb"), TenantSalt("a", "b"));
  EXPECT_EQ(TenantSalt("a", "x"), TenantSalt("a", "x"));
}

}  // namespace
}  // namespace baton::router
