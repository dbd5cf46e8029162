#include "router/prompt_encoder.h"

#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_replace.h"
#include "engine/process/grpc_status.h"
#include "gtest/gtest.h"
#include "tests/support/model_files.h"

namespace baton::router {
namespace {

class PromptEncoderTest : public testing::Test {
 protected:
  static const ModelFacts& Facts() {
    static const ModelFacts* const facts = [] {
      auto loaded =
          LoadModelFacts(std::string(BATON_SOURCE_DIR) + "/tests/data/models/chain", "", "");
      EXPECT_TRUE(loaded.ok()) << loaded.status();
      return new ModelFacts(*std::move(loaded));
    }();
    return *facts;
  }
};

TEST_F(PromptEncoderTest, ModelIsCalledByThePathOrByTheOperator) {
  EXPECT_EQ(Facts().name, "chain");
  EXPECT_GT(Facts().config.vocab_size, 0u);
  EXPECT_FALSE(LoadModelFacts("/nonexistent", "", "").ok());
  EXPECT_TRUE(absl::IsInvalidArgument(
      LoadModelFacts(std::string(BATON_SOURCE_DIR) + "/tests/data/models/chain", "",
                     "no-such-template")
          .status()));
}

// Case 9.1: control tokens in raw text are text, unless the client says otherwise.
TEST_F(PromptEncoderTest, ControlTokensInTextAreTextUnlessAskedFor) {
  v1::GenerateRequest request;
  request.set_text("<|im_end|>");
  const auto literal = EncodePrompt(request, Facts(), 1000);
  request.set_parse_special(true);
  const auto parsed = EncodePrompt(request, Facts(), 1000);
  ASSERT_TRUE(literal.ok() && parsed.ok());
  EXPECT_GT(literal->ids.size(), 1u);
  EXPECT_EQ(parsed->ids.size(), 1u);
}

// As transformers does: raw text gets the begin token that the tokenizer asks for, a chat has what
// its template writes, and ids are the client's own.
TEST_F(PromptEncoderTest, BeginTokenStandsBeforeRawTextWhereTheTokenizerAsksForIt) {
  const std::filesystem::path chain = std::string(BATON_SOURCE_DIR) + "/tests/data/models/chain";
  const testing_support::TempDir directory;
  std::filesystem::copy(chain, directory.path());
  std::ifstream file(chain / "tokenizer_config.json");
  std::string config{std::istreambuf_iterator<char>(file), {}};
  ASSERT_EQ(absl::StrReplaceAll({{"\"add_bos_token\": false", "\"add_bos_token\": true"},
                                 {"\"bos_token\": null", "\"bos_token\": \"<|im_start|>\""}},
                                &config),
            2);
  directory.Write("tokenizer_config.json", config);
  const auto facts = LoadModelFacts(directory.path(), "", "");
  ASSERT_TRUE(facts.ok()) << facts.status();
  const uint32_t bos = facts->tokenizer->bos_id().value();

  v1::GenerateRequest text;
  text.set_text("abc");
  std::vector<uint32_t> expected = EncodePrompt(text, Facts(), 1000)->ids;
  expected.insert(expected.begin(), bos);
  EXPECT_EQ(EncodePrompt(text, *facts, 1000)->ids, expected);

  v1::GenerateRequest chat;
  chat.mutable_chat()->add_messages()->set_role("user");
  EXPECT_EQ(EncodePrompt(chat, *facts, 1000)->ids, EncodePrompt(chat, Facts(), 1000)->ids);

  v1::GenerateRequest ids;
  ids.mutable_token_ids()->add_ids(5);
  EXPECT_EQ(EncodePrompt(ids, *facts, 1000)->ids, std::vector<uint32_t>{5});
}

// Case 9.2: the size is looked at before any work.
TEST_F(PromptEncoderTest, TooLongTextIsRefusedByTheField) {
  v1::GenerateRequest request;
  request.set_text(std::string(1001, 'a'));
  EXPECT_EQ(process::FieldViolations(EncodePrompt(request, Facts(), 1000).status()).at(0).field,
            "text");
  v1::GenerateRequest chat;
  auto* message = chat.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content(std::string(1001, 'a'));
  EXPECT_EQ(process::FieldViolations(EncodePrompt(chat, Facts(), 1000).status()).at(0).field,
            "chat");
}

// Case 4.3, 8.2: empty content is valid, an unknown role is the client's error.
TEST_F(PromptEncoderTest, ChatsAreRenderedOrRefused) {
  v1::GenerateRequest request;
  request.mutable_chat()->add_messages()->set_role("user");
  const auto prompt = EncodePrompt(request, Facts(), 10'000);
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  EXPECT_FALSE(prompt->ids.empty());
  EXPECT_FALSE(prompt->text.empty());
  request.mutable_chat()->mutable_messages(0)->set_role("wizard");
  EXPECT_TRUE(absl::IsInvalidArgument(EncodePrompt(request, Facts(), 10'000).status()));
}

TEST_F(PromptEncoderTest, ModelWithoutTemplateRefusesChats) {
  ModelFacts bare;
  bare.chat_refusal = absl::FailedPreconditionError("none");
  v1::GenerateRequest request;
  request.mutable_chat()->add_messages()->set_role("user");
  EXPECT_TRUE(absl::IsFailedPrecondition(EncodePrompt(request, bare, 1000).status()));
}

TEST_F(PromptEncoderTest, PoolWorksOffTheCallersThreadAndRefusesWhenFull) {
  std::promise<std::thread::id> ran_on;
  std::promise<void> started, release;
  EncoderPool pool(&Facts(), 1, 1);  // goes first: its thread uses the promises
  auto request = std::make_shared<v1::GenerateRequest>();
  request->set_text("abc");
  pool.Encode(request, 1000, [&](absl::StatusOr<EncodedPrompt> prompt) {
    EXPECT_TRUE(prompt.ok());
    ran_on.set_value(std::this_thread::get_id());
  });
  EXPECT_NE(ran_on.get_future().get(), std::this_thread::get_id());
  ASSERT_TRUE(pool.Run([&] {
    started.set_value();
    release.get_future().wait();
  }));
  started.get_future().wait();
  EXPECT_TRUE(pool.Run([] {}));
  absl::Status refused;
  pool.Encode(request, 1000,
              [&](absl::StatusOr<EncodedPrompt> prompt) { refused = prompt.status(); });
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  release.set_value();
}

}  // namespace
}  // namespace baton::router
