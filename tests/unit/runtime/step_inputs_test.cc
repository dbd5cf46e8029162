#include "engine/runtime/step_inputs.h"

#include <vector>

#include "gtest/gtest.h"

namespace baton::runtime {
namespace {

constexpr StepLimits kLimits = {.max_tokens = 100,
                                .max_logit_rows = 4,
                                .max_model_len = 200,
                                .vocab_size = 50,
                                .num_blocks = 8};

class StepInputsTest : public ::testing::Test {
 protected:
  // One valid sequence to be damaged: tokens 60..69 of a sequence over blocks 5 and 2.
  StepSequence Sequence() const { return {tokens_, 60, blocks_, rows_}; }

  void ExpectInvalid(const StepSequence& sequence, absl::string_view fact) {
    ASSERT_TRUE(inputs_.Fill({Sequence()}).ok());
    const absl::Status status = inputs_.Fill({Sequence(), sequence});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(fact), absl::string_view::npos) << status;
    EXPECT_EQ(inputs_.ids().size(), 10u) << "nothing is filled on an error";
  }

  std::vector<uint32_t> tokens_ = std::vector<uint32_t>(10, 7);
  std::vector<kv::BlockId> blocks_ = {5, 2};
  std::vector<int> rows_ = {0, 9};
  StepInputs inputs_{kLimits};
};

TEST_F(StepInputsTest, FlattensSequencesInOrder) {
  const std::vector<uint32_t> other_tokens = {1, 2};
  const std::vector<kv::BlockId> other_blocks = {0, 1};
  const std::vector<int> other_rows = {1};
  const StepSequence other = {other_tokens, 0, other_blocks, other_rows};
  ASSERT_TRUE(inputs_.Fill({Sequence(), other}).ok());
  ASSERT_EQ(inputs_.ids().size(), 12u);
  EXPECT_EQ(inputs_.ids()[11], 2);
  EXPECT_EQ(inputs_.positions()[0], 60);
  EXPECT_EQ(inputs_.positions()[9], 69);
  EXPECT_EQ(inputs_.positions()[10], 0);
  EXPECT_EQ(inputs_.slots()[3], 5 * 64 + 63);
  EXPECT_EQ(inputs_.slots()[4], 2 * 64);
  EXPECT_EQ(inputs_.slots()[11], 1);
  ASSERT_EQ(inputs_.sequences().size(), 2u);
  EXPECT_EQ(inputs_.sequences()[0].context_len, 70);
  EXPECT_EQ(inputs_.sequences()[1].query_start, 10);
  EXPECT_EQ(inputs_.sequences()[1].query_len, 2);
  EXPECT_EQ(inputs_.sequences()[1].block_table.size(), 1u);
  EXPECT_EQ(std::vector<int32_t>(inputs_.logit_rows().begin(), inputs_.logit_rows().end()),
            (std::vector<int32_t>{0, 9, 11}));
}

class NoDraws : public ops::DrawChain {
 public:
  int size() const override { return 0; }
  absl::StatusOr<double> Finish() override { return 0.0; }
};

TEST_F(StepInputsTest, DrawnTokensAreMarkedWhereAnySequenceHasThem) {
  NoDraws chain, other_chain;
  std::vector<int32_t> drawn(10, -1);
  drawn[9] = 4;
  StepSequence with = Sequence();
  with.drawn = drawn;
  with.chain = &chain;
  ASSERT_TRUE(inputs_.Fill({Sequence(), with}).ok());
  std::vector<int32_t> want(20, -1);
  want[19] = 4;
  EXPECT_EQ(std::vector<int32_t>(inputs_.drawn().begin(), inputs_.drawn().end()), want);
  EXPECT_EQ(inputs_.chain(), &chain);
  ASSERT_TRUE(inputs_.Fill({Sequence()}).ok());
  EXPECT_TRUE(inputs_.drawn().empty());
  EXPECT_EQ(inputs_.chain(), nullptr);

  StepSequence bad = with;
  bad.chain = &other_chain;
  EXPECT_EQ(inputs_.Fill({with, bad}).message(),
            "step: sequence=1 drawn: not the chain of the step");
  bad.chain = nullptr;
  ExpectInvalid(bad, "drawn: not the chain of the step");
  bad = with;
  bad.drawn = absl::MakeConstSpan(drawn).first(9);
  ExpectInvalid(bad, "drawn=9 tokens=10");
}

TEST_F(StepInputsTest, RefusesWhatIsOutOfRange) {
  StepSequence bad = Sequence();
  bad.tokens = {};
  ExpectInvalid(bad, "sequence=1 tokens=0");

  bad = Sequence();
  bad.start = -1;
  ExpectInvalid(bad, "start=-1");
  bad.start = 191;
  ExpectInvalid(bad, "max_model_len=200");
  bad.start = INT32_MAX;
  ExpectInvalid(bad, "max_model_len=200");

  const std::vector<uint32_t> unknown_token = {3, 50};
  bad = Sequence();
  bad.tokens = unknown_token;
  bad.logit_rows = {};
  ExpectInvalid(bad, "token_id=50 vocabulary=50");

  bad = Sequence();
  bad.block_table = bad.block_table.first(1);
  ExpectInvalid(bad, "need_blocks=2 block_table=1");
  for (const kv::BlockId block : {-1, 8}) {
    const std::vector<kv::BlockId> outside = {5, block};
    bad = Sequence();
    bad.block_table = outside;
    ExpectInvalid(bad, "num_blocks=8");
  }

  for (const std::vector<int>& rows : {std::vector<int>{10}, {-1}, {3, 3}, {4, 2}}) {
    bad = Sequence();
    bad.logit_rows = rows;
    ExpectInvalid(bad, "logit_row=");
  }
}

TEST_F(StepInputsTest, RefusesMoreThanTheLimits) {
  const std::vector<uint32_t> many(91, 1);
  StepSequence bad = {many, 0, blocks_, {}};
  ExpectInvalid(bad, "tokens=101 max_step_tokens=100");
  const std::vector<int> rows = {0, 1, 2};
  bad = Sequence();
  bad.logit_rows = rows;
  ExpectInvalid(bad, "logit_rows=5 max_logit_rows=4");
  EXPECT_EQ(inputs_.Fill({}).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace baton::runtime
