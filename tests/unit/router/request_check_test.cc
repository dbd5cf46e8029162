#include "router/request_check.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "engine/process/grpc_status.h"
#include "gtest/gtest.h"

namespace baton::router {
namespace {

constexpr uint32_t kVocab = 1000;

v1::GenerateRequest Request() {
  v1::GenerateRequest request;
  request.mutable_token_ids()->add_ids(1);
  return request;
}

using Change = std::function<void(v1::SamplingParams*)>;

TEST(RequestCheckTest, PrioritiesAreTheNamedClasses) {
  v1::GenerateRequest request = Request();
  for (const v1::Priority priority :
       {v1::PRIORITY_UNSPECIFIED, v1::PRIORITY_LOW, v1::PRIORITY_NORMAL, v1::PRIORITY_HIGH}) {
    request.set_priority(priority);
    EXPECT_TRUE(CheckRequest(request, kVocab).ok()) << priority;
  }
  for (const int priority : {-1, 4}) {
    request.set_priority(static_cast<v1::Priority>(priority));
    const absl::Status status = CheckRequest(request, kVocab);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << priority;
    EXPECT_NE(status.message().find("priority"), absl::string_view::npos);
  }
}

// Cases 5.2 and 4.1: out of range is refused by name.
TEST(RequestCheckTest, ValuesOutOfRangeAreRefusedByName) {
  const float nan = std::nanf(""), inf = std::numeric_limits<float>::infinity();
  const std::vector<std::pair<std::string, Change>> cases = {
      {"temperature", [](auto* s) { s->set_temperature(-1); }},
      {"temperature", [=](auto* s) { s->set_temperature(nan); }},
      {"temperature", [=](auto* s) { s->set_temperature(inf); }},
      {"top_p", [](auto* s) { s->set_top_p(-0.1f); }},
      {"top_p", [](auto* s) { s->set_top_p(1.01f); }},
      {"top_p", [=](auto* s) { s->set_top_p(nan); }},
      {"top_k", [](auto* s) { s->set_top_k(-2); }},
      {"min_p", [](auto* s) { s->set_min_p(1.5f); }},
      {"min_p", [](auto* s) { s->set_min_p(-0.5f); }},
      {"repetition_penalty", [](auto* s) { s->set_repetition_penalty(0); }},
      {"repetition_penalty", [](auto* s) { s->set_repetition_penalty(-1); }},
      {"repetition_penalty", [=](auto* s) { s->set_repetition_penalty(inf); }},
      {"presence_penalty", [](auto* s) { s->set_presence_penalty(2.1f); }},
      {"frequency_penalty", [](auto* s) { s->set_frequency_penalty(-2.1f); }},
      {"logit_bias", [](auto* s) { (*s->mutable_logit_bias())[5] = 101; }},
      {"logit_bias", [=](auto* s) { (*s->mutable_logit_bias())[5] = nan; }},
      {"logit_bias", [](auto* s) { (*s->mutable_logit_bias())[kVocab] = 1; }},
      {"stop", [](auto* s) { s->add_stop(""); }},
      {"stop",
       [](auto* s) {
         for (int i = 0; i < 17; ++i) s->add_stop("x");
       }},
      {"stop", [](auto* s) { s->add_stop(std::string(257, 'x')); }},
      {"stop_token_ids", [](auto* s) { s->add_stop_token_ids(kVocab); }},
      {"max_tokens", [](auto* s) { s->set_max_tokens(0); }},
      {"min_tokens",
       [](auto* s) {
         s->set_max_tokens(3);
         s->set_min_tokens(4);
       }},
      {"logprobs", [](auto* s) { s->set_logprobs(21); }},
      {"n", [](auto* s) { s->set_n(0); }},
      {"n", [](auto* s) { s->set_n(17); }},
  };
  for (const auto& [field, change] : cases) {
    v1::GenerateRequest request = Request();
    change(request.mutable_sampling());
    const absl::Status status = CheckRequest(request, kVocab);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
    ASSERT_EQ(process::FieldViolations(status).size(), 1u) << field;
    EXPECT_EQ(process::FieldViolations(status)[0].field, "sampling." + field);
  }
}

TEST(RequestCheckTest, ValuesAtTheEdgesAreTaken) {
  const std::vector<Change> cases = {
      [](auto* s) { s->set_temperature(0); },
      [](auto* s) { s->set_top_p(0); },
      [](auto* s) { s->set_top_p(1); },
      [](auto* s) { s->set_top_k(0); },
      [](auto* s) { s->set_top_k(-1); },
      [](auto* s) { s->set_top_k(kVocab + 5); },
      [](auto* s) { s->set_presence_penalty(2); },
      [](auto* s) { s->set_frequency_penalty(-2); },
      [](auto* s) { s->set_logprobs(20); },
      [](auto* s) { s->set_logprobs(0); },
      [](auto* s) { s->set_n(16); },
      [](auto* s) { s->set_max_tokens(1); },
      [](auto* s) { s->set_seed(0); },
      [](auto* s) { (*s->mutable_logit_bias())[kVocab - 1] = -100; },
      [](auto* s) {
        for (int i = 0; i < 16; ++i) s->add_stop(std::string(256, 'x'));
      },
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    v1::GenerateRequest request = Request();
    cases[i](request.mutable_sampling());
    EXPECT_TRUE(CheckRequest(request, kVocab).ok()) << i << " " << CheckRequest(request, kVocab);
  }
}

// Case 4.3: zero tokens.
TEST(RequestCheckTest, EmptyPromptsAreRefused) {
  v1::GenerateRequest none;
  EXPECT_TRUE(absl::IsInvalidArgument(CheckRequest(none, kVocab)));
  v1::GenerateRequest text;
  text.set_text("");
  EXPECT_TRUE(absl::IsInvalidArgument(CheckRequest(text, kVocab)));
  v1::GenerateRequest ids;
  ids.mutable_token_ids();
  EXPECT_TRUE(absl::IsInvalidArgument(CheckRequest(ids, kVocab)));
  v1::GenerateRequest chat;
  chat.mutable_chat();
  EXPECT_TRUE(absl::IsInvalidArgument(CheckRequest(chat, kVocab)));
  chat.mutable_chat()->add_messages()->set_role("user");
  EXPECT_TRUE(CheckRequest(chat, kVocab).ok()) << "the template adds tokens";
}

TEST(RequestCheckTest, IdsOutsideTheVocabularyAreRefused) {
  v1::GenerateRequest request = Request();
  request.mutable_token_ids()->add_ids(kVocab);
  EXPECT_EQ(process::FieldViolations(CheckRequest(request, kVocab)).at(0).field, "token_ids");
}

text::ModelTextConfig Config() {
  text::ModelTextConfig config;
  config.eos_ids = {7, 8};
  config.temperature = 0.6f;
  config.top_k = 20;
  config.top_p = 0.95f;
  return config;
}

// Case 6.3: an explicit zero is obeyed, an absent field gets the model's default.
TEST(RequestCheckTest, ExplicitZeroIsNotAbsent) {
  v1::GenerateRequest absent = Request();
  auto sampling = ResolveSampling(absent, Config(), 10, 100, 99);
  ASSERT_TRUE(sampling.ok());
  EXPECT_EQ(sampling->temperature(), 0.6f);
  EXPECT_EQ(sampling->top_k(), 20);
  EXPECT_EQ(sampling->top_p(), 0.95f);
  EXPECT_EQ(sampling->seed(), 99u);
  EXPECT_EQ(sampling->repetition_penalty(), 1);
  EXPECT_EQ(sampling->n(), 1u);

  v1::GenerateRequest zeros = Request();
  zeros.mutable_sampling()->set_temperature(0);
  zeros.mutable_sampling()->set_top_k(0);
  zeros.mutable_sampling()->set_top_p(0);
  zeros.mutable_sampling()->set_seed(0);
  zeros.mutable_sampling()->set_logprobs(0);
  sampling = ResolveSampling(zeros, Config(), 10, 100, 99);
  ASSERT_TRUE(sampling.ok());
  EXPECT_EQ(sampling->temperature(), 0);
  EXPECT_EQ(sampling->top_k(), 0);
  EXPECT_EQ(sampling->top_p(), 0);
  EXPECT_EQ(sampling->seed(), 0u);
  EXPECT_EQ(sampling->logprobs(), 0);
}

// Case 4.1
TEST(RequestCheckTest, MaxTokensIsTheRestOfTheContextAtMost) {
  v1::GenerateRequest request = Request();
  EXPECT_EQ(ResolveSampling(request, Config(), 10, 100, 0)->max_tokens(), 90u);
  request.mutable_sampling()->set_max_tokens(1);
  EXPECT_EQ(ResolveSampling(request, Config(), 10, 100, 0)->max_tokens(), 1u);
  request.mutable_sampling()->set_max_tokens(2147483647);
  EXPECT_EQ(ResolveSampling(request, Config(), 10, 100, 0)->max_tokens(), 90u);
}

// Case 4.2
TEST(RequestCheckTest, PromptThatFillsTheContextIsRefusedWithBothNumbers) {
  for (uint32_t tokens : {100u, 101u, 1000u}) {
    const absl::Status status = ResolveSampling(Request(), Config(), tokens, 100, 0).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_NE(std::string(status.message()).find(std::to_string(tokens)), std::string::npos);
    EXPECT_NE(std::string(status.message()).find("100"), std::string::npos);
  }
  EXPECT_EQ(ResolveSampling(Request(), Config(), 99, 100, 0)->max_tokens(), 1u);
  EXPECT_TRUE(absl::IsInvalidArgument(ResolveSampling(Request(), Config(), 0, 100, 0).status()));
}

TEST(RequestCheckTest, MinTokensAboveTheRestOfTheContextIsRefused) {
  v1::GenerateRequest request = Request();
  request.mutable_sampling()->set_min_tokens(50);
  EXPECT_TRUE(ResolveSampling(request, Config(), 50, 100, 0).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(ResolveSampling(request, Config(), 51, 100, 0).status()));
}

// Case 2.3: ignore_eos takes away the model's end ids and not the user's.
TEST(RequestCheckTest, IgnoreEosLeavesTheUsersStopIds) {
  v1::GenerateRequest request = Request();
  request.mutable_sampling()->add_stop_token_ids(5);
  auto sampling = ResolveSampling(request, Config(), 10, 100, 0);
  EXPECT_EQ(
      std::vector<uint32_t>(sampling->stop_token_ids().begin(), sampling->stop_token_ids().end()),
      (std::vector<uint32_t>{5, 7, 8}));
  request.mutable_sampling()->set_ignore_eos(true);
  sampling = ResolveSampling(request, Config(), 10, 100, 0);
  EXPECT_EQ(
      std::vector<uint32_t>(sampling->stop_token_ids().begin(), sampling->stop_token_ids().end()),
      (std::vector<uint32_t>{5}));
}

}  // namespace
}  // namespace baton::router
