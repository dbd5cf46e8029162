#include "decode_worker/draft_intake.h"

#include <numeric>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/fake_receiver.h"
#include "tests/support/fake_runner.h"

namespace baton::decode {
namespace {

using kvtransfer::ReceiverEvent;

constexpr CallId kCall = 7;

class DraftIntakeTest : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(memory_.pool().counts().active, 0);
    memory_.pool().CheckInvariants();
    memory_.cache().CheckInvariants();
  }
  runtime::Sequence Prompt(int tokens) {
    std::vector<uint32_t> ids(tokens);
    std::iota(ids.begin(), ids.end(), 0);
    return runtime::Sequence(ids, hasher_, kCall * runtime::kMaxChoices);
  }
  void Send(ReceiverEvent::Kind kind, uint64_t reservation_id) {
    ReceiverEvent event;
    event.transport = "tcp";
    event.kind = kind;
    event.reservation_id = reservation_id;
    intake_.OnReceiverEvent(event);
  }

  const kv::BlockHasher hasher_{"model", kv::KvFormat::kF32, ""};
  base::FakeClock clock_;
  runtime::KvMemory memory_{8};
  testing::FakeReceiver receiver_;
  testing::FakeRunner runner_{8};
  DraftIntake intake_{&memory_, &runner_, &receiver_, &clock_};
};

TEST_F(DraftIntakeTest, FullBlocksHaveAPlaceAndAreInTheCacheWhenTheyLand) {
  const auto draft = intake_.Reserve(kCall, Prompt(200));
  ASSERT_TRUE(draft.has_value());
  EXPECT_EQ(draft->block_table_size(), 3);
  EXPECT_EQ(draft->first_missing_block(), 0u);
  EXPECT_EQ(memory_.pool().counts().reserved, 3);
  Send(ReceiverEvent::Kind::kLanded, draft->handoff().reservation_id());
  EXPECT_EQ(memory_.pool().counts().cached, 3);
  EXPECT_EQ(intake_.num_landed(), 1);
  EXPECT_EQ(intake_.landed_tokens(), 192);
  EXPECT_FALSE(intake_.IsComing(kCall));
  // Whoever has this prompt next finds it, and asks for nothing.
  EXPECT_FALSE(intake_.Reserve(kCall + 1, Prompt(200)).has_value());
  const auto longer = intake_.Reserve(kCall + 1, Prompt(320));
  ASSERT_TRUE(longer.has_value());
  EXPECT_EQ(longer->first_missing_block(), 3u);
  Send(ReceiverEvent::Kind::kFailed, longer->handoff().reservation_id());
  EXPECT_EQ(memory_.pool().counts().cached, 3);
}

TEST_F(DraftIntakeTest, BlocksComeToTheDeviceThatDraftsOrAreForgotten) {
  const auto draft = intake_.Reserve(kCall, Prompt(200));
  Send(ReceiverEvent::Kind::kLanded, draft->handoff().reservation_id());
  EXPECT_EQ(runner_.landed,
            std::vector<kv::BlockId>(draft->block_table().begin(), draft->block_table().end()));
  const auto longer = intake_.Reserve(kCall, Prompt(320));
  runner_.landed_status = absl::InternalError("device");
  Send(ReceiverEvent::Kind::kLanded, longer->handoff().reservation_id());
  EXPECT_EQ(memory_.pool().counts().cached, 3);
  EXPECT_EQ(intake_.num_landed(), 1);
  EXPECT_EQ(intake_.landed_tokens(), 192);
  EXPECT_FALSE(intake_.IsComing(kCall));
}

TEST_F(DraftIntakeTest, WhatDoesNotFitIsLeft) {
  EXPECT_FALSE(intake_.Reserve(kCall, Prompt(63)).has_value());
  EXPECT_FALSE(intake_.Reserve(kCall, Prompt(9 * 64)).has_value());
  EXPECT_EQ(memory_.pool().counts().free, 8);
}

TEST_F(DraftIntakeTest, ACancelledPlaceIsQuarantinedUntilTheWriterIsQuiet) {
  const auto draft = intake_.Reserve(kCall, Prompt(128));
  intake_.Cancel(kCall);
  intake_.Cancel(kCall);
  intake_.Cancel(kCall + 1);
  EXPECT_EQ(memory_.pool().counts().quarantined, 2);
  Send(ReceiverEvent::Kind::kQuiesced, draft->handoff().reservation_id());
  EXPECT_EQ(memory_.pool().counts().free, 8);
}

TEST_F(DraftIntakeTest, WaitingHasAnEnd) {
  const auto draft = intake_.Reserve(kCall, Prompt(128));
  clock_.Advance(absl::Seconds(100));  // the prompt itself is being computed
  EXPECT_TRUE(intake_.IsComing(kCall));
  clock_.Advance(absl::Milliseconds(450));
  EXPECT_TRUE(intake_.IsComing(kCall));
  clock_.Advance(absl::Milliseconds(200));
  EXPECT_FALSE(intake_.IsComing(kCall));
  // Late is better than never.
  Send(ReceiverEvent::Kind::kLanded, draft->handoff().reservation_id());
  EXPECT_EQ(memory_.pool().counts().cached, 2);
}

}  // namespace
}  // namespace baton::decode
