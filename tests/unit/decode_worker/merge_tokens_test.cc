#include "decode_worker/merge_tokens.h"

#include "gtest/gtest.h"

namespace baton::decode {
namespace {

using worker::v1::DecodeResponse;

DecodeResponse Tokens(uint32_t choice, uint32_t position, bool last) {
  DecodeResponse response;
  auto* token = response.mutable_tokens()->add_tokens();
  token->set_choice(choice);
  token->set_position(position);
  if (last) response.mutable_tokens()->add_finished()->set_choice(choice);
  return response;
}

TEST(MergeTokensTest, TokensStayInOrderAndEndsAreKept) {
  DecodeResponse last = Tokens(0, 7, false);
  for (DecodeResponse next : {Tokens(1, 7, true), Tokens(0, 8, false), Tokens(0, 9, true)})
    ASSERT_TRUE(MergeTokens(&last, &next));
  ASSERT_EQ(last.tokens().tokens_size(), 4);
  ASSERT_EQ(last.tokens().finished_size(), 2);
  const uint32_t positions[] = {7, 7, 8, 9};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(last.tokens().tokens(i).position(), positions[i]);
  EXPECT_EQ(last.tokens().finished(0).choice(), 1u);
}

TEST(MergeTokensTest, OtherMessagesStayApart) {
  DecodeResponse reserved, done, tokens = Tokens(0, 1, false);
  reserved.mutable_reserved()->set_first_missing_block(2);
  done.mutable_done()->set_generated_tokens(3);
  EXPECT_FALSE(MergeTokens(&reserved, &tokens));
  EXPECT_FALSE(MergeTokens(&tokens, &done));
  EXPECT_EQ(tokens.tokens().tokens_size(), 1);
  EXPECT_TRUE(reserved.has_reserved() && done.has_done());
}

}  // namespace
}  // namespace baton::decode
