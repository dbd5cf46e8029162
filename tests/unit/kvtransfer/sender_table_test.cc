#include "kvtransfer/sender_table.h"

#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/kvtransfer/handoff_pair.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kMs = absl::Milliseconds(1);

class SenderTableTest : public ::testing::Test {
 protected:
  explicit SenderTableTest(SenderLimits limits = {}) : table_(layout_, layout_, "decode", limits) {}

  TransferId Begin(uint64_t reservation, int prompt_tokens) {
    TransferSpec spec;
    spec.handoff.set_decode_incarnation("decode");
    spec.handoff.set_reservation_id(reservation);
    spec.handoff.set_epoch(reservation);
    spec.prompt_tokens = prompt_tokens;
    spec.peer_blocks.assign(static_cast<size_t>(kv::BlocksFor(prompt_tokens)), 1);
    spec.on_done = [this](TransferResult result) { results_.push_back(std::move(result)); };
    return table_.Begin(std::move(spec), now_);
  }
  void Grant(uint64_t reservation, int prompt_tokens) {
    GrantFrame grant;
    grant.reservation_id = reservation;
    grant.prompt_tokens = static_cast<uint32_t>(prompt_tokens);
    grant.blocks.assign(static_cast<size_t>(kv::BlocksFor(prompt_tokens)), 1);
    table_.OnGrant(grant, now_);
  }
  void Push(TransferId id, int blocks) {
    table_.Push(id, 0, blocks, 0, layout_.num_layers,
                std::vector<kv::BlockId>(static_cast<size_t>(blocks), 0));
  }
  // Runs callbacks; returns the control messages.
  std::vector<worker::v1::PeerMessage> Effects() {
    SenderEffects effects = table_.TakeEffects();
    for (auto& [on_done, result] : effects.done) on_done(std::move(result));
    return effects.messages;
  }

  const kv::KvLayout layout_ = TestLayout(kv::KvFormat::kFp8, 16);
  absl::Duration now_ = absl::Seconds(100);
  SenderTable table_;
  std::vector<TransferResult> results_;
};

TEST_F(SenderTableTest, NothingIsWrittenBeforeTheGrant) {
  const TransferId id = Begin(1, 64);
  Push(id, 1);
  EXPECT_FALSE(table_.NextUnit(now_).has_value());
  Grant(1, 64);
  EXPECT_TRUE(table_.NextUnit(now_).has_value());
}

TEST_F(SenderTableTest, CommitFollowsTheLastWriteNotTheLastAck) {
  const TransferId id = Begin(1, 64);
  Grant(1, 64);
  Push(id, 1);
  table_.Commit(id, {}, now_);
  const auto unit = table_.NextUnit(now_);
  EXPECT_TRUE(Effects().empty());
  table_.UnitWritten(now_);
  const auto messages = Effects();
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_EQ(messages[0].commit().units_sent(), 1u);
  EXPECT_EQ(messages[0].commit().bytes(), unit->frame.bytes);
}

TEST_F(SenderTableTest, TransfersTakeTurns) {
  const TransferId a = Begin(1, 128), b = Begin(2, 128);
  Grant(1, 128);
  Grant(2, 128);
  for (int block = 0; block < 2; ++block) {
    for (TransferId id : {a, b}) table_.Push(id, block, block + 1, 0, 1, {0, 0});
  }
  std::vector<uint64_t> order;
  while (auto unit = table_.NextUnit(now_)) {
    order.push_back(unit->frame.reservation_id);
    table_.UnitWritten(now_);
  }
  EXPECT_EQ(order, (std::vector<uint64_t>{1, 2, 1, 2}));
}

class SmallWindowTest : public SenderTableTest {
 protected:
  static SenderLimits Limits() {
    SenderLimits limits;
    limits.unit_bytes = 1;  // a block of a layer each
    limits.window_units = 2;
    return limits;
  }
  SmallWindowTest() : SenderTableTest(Limits()) {}
};

TEST_F(SmallWindowTest, UnacknowledgedUnitsFillTheWindow) {
  const TransferId id = Begin(1, 64);
  Grant(1, 64);
  Push(id, 1);
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(table_.NextUnit(now_).has_value());
    table_.UnitWritten(now_);
  }
  EXPECT_FALSE(table_.NextUnit(now_).has_value());
  EXPECT_TRUE(table_.OnAck({1, 0}, now_).ok());
  EXPECT_TRUE(table_.NextUnit(now_).has_value());
  EXPECT_EQ(table_.OnAck({1, 2}, now_).code(), absl::StatusCode::kInvalidArgument)
      << "not the oldest";
}

TEST_F(SenderTableTest, UnitWithoutProgressIsAStall) {
  const TransferId id = Begin(1, 64);
  Grant(1, 64);
  Push(id, 1);
  ASSERT_TRUE(table_.NextUnit(now_).has_value());
  table_.UnitWritten(now_);
  EXPECT_LE(table_.NextTimer(), now_ + 251 * kMs);
  now_ += 249 * kMs;
  EXPECT_TRUE(table_.CheckTimers(now_).ok());
  EXPECT_EQ(table_.size(), 1u);
  now_ += 2 * kMs;
  EXPECT_TRUE(table_.CheckTimers(now_).ok());
  const auto messages = Effects();
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_TRUE(messages[0].has_abort());
  ASSERT_EQ(results_.size(), 1u);
  EXPECT_EQ(results_[0].status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(results_[0].status.message()), HasSubstr("stalled"));
}

TEST_F(SenderTableTest, StallInTheMiddleOfAUnitGivesUpTheConnection) {
  const TransferId id = Begin(1, 64);
  Grant(1, 64);
  Push(id, 1);
  ASSERT_TRUE(table_.NextUnit(now_).has_value());
  now_ += 200 * kMs;
  table_.OnProgress(now_);
  now_ += 200 * kMs;
  EXPECT_TRUE(table_.CheckTimers(now_).ok()) << "bytes moved meanwhile";
  now_ += 100 * kMs;
  EXPECT_EQ(table_.CheckTimers(now_).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Effects().empty()) << "its source is still being read";
  table_.FailAll(absl::UnavailableError("closed"));
  Effects();
  EXPECT_EQ(results_.size(), 1u);
}

TEST_F(SenderTableTest, WaitingForComputeIsNoStall) {
  Begin(1, 64);
  Grant(1, 64);
  now_ += absl::Hours(1);
  EXPECT_TRUE(table_.CheckTimers(now_).ok());
  EXPECT_EQ(table_.size(), 1u);
  EXPECT_EQ(table_.NextTimer(), absl::InfiniteDuration());
}

TEST_F(SenderTableTest, MissingAnswersEndInTime) {
  Begin(1, 64);  // no grant
  const TransferId id = Begin(2, 64);
  Grant(2, 64);
  Push(id, 1);
  table_.Commit(id, {}, now_);
  ASSERT_TRUE(table_.NextUnit(now_).has_value());
  table_.UnitWritten(now_);
  EXPECT_TRUE(table_.OnAck({2, 0}, now_).ok());  // no Landed
  now_ += absl::Seconds(6);
  EXPECT_TRUE(table_.CheckTimers(now_).ok());
  Effects();
  ASSERT_EQ(results_.size(), 2u);
  for (const TransferResult& result : results_)
    EXPECT_EQ(result.status.code(), absl::StatusCode::kUnavailable);
}

TEST_F(SenderTableTest, RevokeDuringAWriteIsAnsweredAfterIt) {
  const TransferId id = Begin(1, 64);
  Grant(1, 64);
  Push(id, 1);
  ASSERT_TRUE(table_.NextUnit(now_).has_value());
  worker::v1::Revoke revoke;
  revoke.mutable_handoff()->set_decode_incarnation("decode");
  revoke.mutable_handoff()->set_reservation_id(1);
  revoke.mutable_handoff()->set_epoch(1);
  table_.OnRevoke(revoke);
  EXPECT_TRUE(Effects().empty());
  EXPECT_TRUE(results_.empty());
  table_.UnitWritten(now_);
  const auto messages = Effects();
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_TRUE(messages[0].has_quiesced());
  ASSERT_EQ(results_.size(), 1u);
  table_.OnRevoke(revoke);  // a second one: unknown by now, answered all the same
  EXPECT_TRUE(Effects()[0].has_quiesced());
}

TEST_F(SenderTableTest, RevokeAfterAnAbortIsStillAnswered) {
  const TransferId id = Begin(1, 64);
  Grant(1, 64);
  Push(id, 1);
  ASSERT_TRUE(table_.NextUnit(now_).has_value());
  table_.Abort(id, "ours");
  worker::v1::Revoke revoke;
  revoke.mutable_handoff()->set_decode_incarnation("decode");
  revoke.mutable_handoff()->set_reservation_id(1);
  revoke.mutable_handoff()->set_epoch(1);
  table_.OnRevoke(revoke);
  table_.UnitWritten(now_);
  EXPECT_TRUE(Effects()[0].has_quiesced());
  EXPECT_EQ(results_.size(), 1u);
}

TEST_F(SenderTableTest, AnswersForTheUnknownChangeNothing) {
  worker::v1::Landed landed;
  landed.mutable_handoff()->set_reservation_id(9);
  table_.OnLanded(landed);
  Grant(9, 64);
  table_.Push(77, 0, 1, 0, 1, {0});
  table_.Commit(77, {}, now_);
  table_.Abort(77, "x");
  EXPECT_TRUE(table_.TakeEffects().empty());
}

TEST_F(SenderTableTest, LandedOfAnotherEpochIsIgnored) {
  const TransferId id = Begin(1, 64);
  Grant(1, 64);
  Push(id, 1);
  table_.Commit(id, {}, now_);
  ASSERT_TRUE(table_.NextUnit(now_).has_value());
  table_.UnitWritten(now_);
  worker::v1::Landed landed;
  landed.mutable_handoff()->set_decode_incarnation("decode");
  landed.mutable_handoff()->set_reservation_id(1);
  landed.mutable_handoff()->set_epoch(2);
  table_.OnLanded(landed);
  EXPECT_EQ(table_.size(), 1u);
  landed.mutable_handoff()->set_epoch(1);
  table_.OnLanded(landed);
  Effects();
  ASSERT_EQ(results_.size(), 1u);
  EXPECT_TRUE(results_[0].status.ok());
}

TEST_F(SenderTableTest, PushOutsideOfThePromptIsRefused) {
  const TransferId id = Begin(1, 64);
  Grant(1, 64);
  table_.Push(id, 0, 2, 0, 1, {0, 0});
  Effects();
  ASSERT_EQ(results_.size(), 1u);
  EXPECT_EQ(results_[0].status.code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(SenderTableTest, BlockOutsideOfThePeersPoolIsRefused) {
  TransferSpec spec;
  spec.handoff.set_decode_incarnation("decode");
  spec.handoff.set_reservation_id(1);
  spec.prompt_tokens = 64;
  spec.peer_blocks = {16};
  spec.on_done = [this](TransferResult result) { results_.push_back(std::move(result)); };
  const TransferId id = table_.Begin(std::move(spec), now_);
  Push(id, 1);
  GrantFrame grant;
  grant.reservation_id = 1;
  grant.prompt_tokens = 64;
  grant.blocks = {16};
  table_.OnGrant(grant, now_);
  EXPECT_FALSE(table_.NextUnit(now_).has_value());
  Effects();
  ASSERT_EQ(results_.size(), 1u);
  EXPECT_EQ(results_[0].status.code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace baton::kvtransfer
