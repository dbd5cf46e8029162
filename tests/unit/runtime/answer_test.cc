#include "engine/runtime/answer.h"

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace baton::runtime {
namespace {

constexpr int kVocab = 26;

// Token `id` is the letter 'a' + id.
class AnswerTest : public ::testing::Test {
 protected:
  AnswerTest() {
    text::VocabularySpec spec;
    for (int id = 0; id < kVocab; ++id)
      spec.tokens.push_back(std::string(1, static_cast<char>('a' + id)));
    spec.pre_tokenizer = "qwen2";
    tokenizer_ = *text::Tokenizer::FromVocabulary(std::move(spec));
    request_.prompt_ids = {0, 1, 2};
    request_.params.max_tokens = 10;
  }
  // Accepts letters until the answer ends; how many it took.
  int Feed(Answer* answer, const std::string& letters) {
    int taken = 0;
    for (const char letter : letters) {
      if (answer->finished()) break;
      answer->Accept(letter - 'a');
      ++taken;
    }
    return taken;
  }

  std::unique_ptr<text::Tokenizer> tokenizer_;
  EngineRequest request_;
};

TEST_F(AnswerTest, StopStringEndsAtTheTokenThatCompletesIt) {
  request_.params.stop = {"zz", "fgh"};
  Answer answer(request_, 0, *tokenizer_, 100);
  EXPECT_EQ(Feed(&answer, "defghij"), 5);
  EXPECT_EQ(answer.finish().reason, FinishReason::kStopString);
  EXPECT_EQ(answer.finish().stop_index, 1);
}

TEST_F(AnswerTest, PromptIsNoPartOfAStopString) {
  request_.params.stop = {"cd"};
  Answer answer(request_, 0, *tokenizer_, 100);
  EXPECT_EQ(Feed(&answer, "dcd"), 3);
  EXPECT_EQ(answer.finish().reason, FinishReason::kStopString);
}

TEST_F(AnswerTest, StopTokenBeatsStopStringBeatsLength) {
  request_.params.stop = {"f"};
  request_.params.max_tokens = 1;
  Answer by_string(request_, 0, *tokenizer_, 100);
  by_string.Accept(5);
  EXPECT_EQ(by_string.finish().reason, FinishReason::kStopString);
  request_.params.stop_token_ids = {5};
  Answer by_token(request_, 0, *tokenizer_, 100);
  by_token.Accept(5);
  EXPECT_EQ(by_token.finish().reason, FinishReason::kStopToken);
  EXPECT_EQ(by_token.finish().stop_token_id, 5u);
}

TEST_F(AnswerTest, LengthIsMaxTokensOrTheContext) {
  Answer answer(request_, 0, *tokenizer_, 100);
  EXPECT_EQ(Feed(&answer, "dddddddddddddd"), 10);
  EXPECT_EQ(answer.finish().reason, FinishReason::kLength);
  Answer short_context(request_, 0, *tokenizer_, 7);
  EXPECT_EQ(Feed(&short_context, "dddddddddddddd"), 4);
  EXPECT_EQ(short_context.finish().reason, FinishReason::kLength);
}

TEST_F(AnswerTest, ResumedTokensCountAndMayBeginAStopString) {
  request_.prompt_ids = {0, 1, 2, 23, 24};  // "abc" asked, "xy" answered
  request_.resumed_tokens = 2;
  request_.params.stop = {"xyz"};
  Answer answer(request_, 0, *tokenizer_, 100);
  EXPECT_EQ(answer.num_output(), 2u);
  EXPECT_EQ(answer.position(), 5u);
  EXPECT_EQ(Feed(&answer, "z"), 1);
  EXPECT_EQ(answer.finish().reason, FinishReason::kStopString);
  request_.params.stop.clear();
  Answer by_length(request_, 0, *tokenizer_, 100);
  EXPECT_EQ(Feed(&by_length, "dddddddddddddd"), 8);
}

TEST(ValidateRequestTest, NamesTheFieldThatIsWrong) {
  RequestLimits limits;
  limits.vocab_size = kVocab;
  limits.max_prompt_tokens = 10;
  const auto check = [&](auto change, const std::string& field) {
    EngineRequest request;
    request.prompt_ids = {1, 2, 3};
    request.params.max_tokens = 5;
    change(&request);
    const absl::Status status = ValidateRequest(request, limits);
    if (field.empty()) {
      EXPECT_TRUE(status.ok()) << status;
      return;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_EQ(status.message().substr(0, field.size()), field);
  };
  check([](EngineRequest*) {}, "");
  check([](EngineRequest* r) { r->prompt_ids.clear(); }, "prompt");
  check([](EngineRequest* r) { r->prompt_ids.assign(11, 1); }, "prompt");
  check([](EngineRequest* r) { r->prompt_ids[1] = kVocab; }, "prompt");
  check([](EngineRequest* r) { r->resumed_tokens = 3; }, "resumed_tokens");
  check([](EngineRequest* r) { r->params.max_tokens = 0; }, "max_tokens");
  check([](EngineRequest* r) { r->params.n = 0; }, "n");
  check([](EngineRequest* r) { r->params.n = 17; }, "n");
  check([](EngineRequest* r) { r->params.first_choice = 16; }, "first_choice");
  check([](EngineRequest* r) { r->params.temperature = -1; }, "temperature");
  check([](EngineRequest* r) { r->params.top_p = NAN; }, "top_p");
  check([](EngineRequest* r) { r->params.repetition_penalty = 0; }, "repetition_penalty");
  check([](EngineRequest* r) { r->params.logprobs = 21; }, "logprobs");
  check([](EngineRequest* r) { r->params.stop = {""}; }, "stop");
  check([](EngineRequest* r) { r->params.stop.assign(17, "x"); }, "stop");
  check([](EngineRequest* r) { r->params.logit_bias = {{kVocab, 1.0f}}; }, "logit_bias");
}

}  // namespace
}  // namespace baton::runtime
