#include "decode_worker/reservation_table.h"

#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/fake_runner.h"

namespace baton::decode {
namespace {

using kv::kBlockTokens;

class CountingReceiver : public kvtransfer::Receiver {
 public:
  worker::v1::Handoff Reserve(kvtransfer::Reservation reservation) override {
    last = std::move(reservation);
    worker::v1::Handoff handoff;
    handoff.set_reservation_id(next_id++);
    return handoff;
  }
  bool Revoke(uint64_t, absl::string_view) override { return true; }
  absl::StatusOr<worker::v1::Hello> OnPeerHello(const worker::v1::Hello&,
                                                kvtransfer::PeerLink*,
                                                kvtransfer::SessionId*) override {
    return worker::v1::Hello();
  }
  void OnMessage(kvtransfer::SessionId, const worker::v1::PeerMessage&) override {}
  void OnPeerGone(kvtransfer::SessionId) override {}
  std::vector<PeerInfo> peers() const override { return {}; }

  uint64_t next_id = 1;
  kvtransfer::Reservation last;
};

class ReservationTableTest : public ::testing::Test {
 protected:
  runtime::Sequence Prompt(int tokens, uint32_t seed) {
    std::vector<uint32_t> ids;
    for (int i = 0; i < tokens; ++i) ids.push_back(seed * 10000 + i);
    return runtime::Sequence(ids, hasher_, seed);
  }
  static kvtransfer::ReceiverEvent Landed(uint64_t reservation_id,
                                          const std::string& transport = "shm") {
    kvtransfer::ReceiverEvent event;
    event.reservation_id = reservation_id;
    event.transport = transport;
    return event;
  }
  const kv::BlockCounts& counts() const { return memory_.pool().counts(); }

  const kv::BlockHasher hasher_{"model", kv::KvFormat::kF32, ""};
  runtime::KvMemory memory_{40};
  CountingReceiver receiver_;
  base::FakeClock clock_;
  testing::FakeRunner runner_{40};
  ReservationTable table_{&memory_, &runner_, &receiver_, &clock_};
};

TEST_F(ReservationTableTest, LandedBlocksAreThePromptsAndHeadroomGoesBack) {
  runtime::Sequence prompt = Prompt(3 * kBlockTokens + 1, 1);
  const auto handoff = table_.Reserve(7, &prompt, /*headroom=*/2, 0);
  ASSERT_TRUE(handoff.ok());
  EXPECT_EQ(counts().reserved, 6);
  EXPECT_EQ(table_.Find(handoff->reservation_id()), 7u);
  ASSERT_TRUE(table_.Land(Landed(handoff->reservation_id()), &prompt).ok());
  EXPECT_EQ(counts().active, 4);
  EXPECT_EQ(counts().reserved, 0);
  EXPECT_EQ(prompt.num_computed, 3 * kBlockTokens + 1);
  EXPECT_EQ(table_.Find(handoff->reservation_id()), std::nullopt);
  memory_.Release(&prompt);
  EXPECT_EQ(counts().cached, 3);
  memory_.pool().CheckInvariants();
}

TEST_F(ReservationTableTest, CachedBlocksAreSharedUpToTheWholePrompt) {
  runtime::Sequence first = Prompt(3 * kBlockTokens, 1);
  const auto handoff = table_.Reserve(1, &first, 0, 0);
  ASSERT_TRUE(table_.Land(Landed(handoff->reservation_id()), &first).ok());
  runtime::Sequence second = Prompt(3 * kBlockTokens, 1);
  const auto again = table_.Reserve(2, &second, 1, 0);
  ASSERT_TRUE(again.ok());
  // Nothing to send is legal: the prefill worker computes the last token by itself.
  EXPECT_EQ(receiver_.last.first_missing_block, 3);
  EXPECT_EQ(receiver_.last.blocks, first.blocks);
  EXPECT_EQ(counts().reserved, 1);
  ASSERT_TRUE(table_.Land(Landed(again->reservation_id()), &second).ok());
  memory_.Release(&first);
  memory_.Release(&second);
  EXPECT_EQ(counts().active, 0);
}

// A step reads the pool where it computes, which need not be where a peer has written.
TEST_F(ReservationTableTest, WhatLandedOnTheHostIsBroughtToTheDevice) {
  runtime::Sequence first = Prompt(2 * kBlockTokens, 1);
  const auto handoff = table_.Reserve(1, &first, /*headroom=*/1, 0);
  ASSERT_TRUE(table_.Land(Landed(handoff->reservation_id()), &first).ok());
  EXPECT_EQ(runner_.landed, first.blocks);
  // Of a longer prompt, only what was missing.
  std::vector<uint32_t> ids = first.tokens;
  ids.resize(3 * kBlockTokens + 5);
  runtime::Sequence longer(ids, hasher_, 2);
  const auto more = table_.Reserve(2, &longer, 0, 0);
  runner_.landed.clear();
  ASSERT_TRUE(table_.Land(Landed(more->reservation_id(), "tcp"), &longer).ok());
  EXPECT_EQ(runner_.landed,
            std::vector<kv::BlockId>(longer.blocks.begin() + 2, longer.blocks.end()));
  // From device to device there is nothing to do.
  runtime::Sequence direct = Prompt(kBlockTokens, 3);
  const auto between = table_.Reserve(3, &direct, 0, 0);
  runner_.landed.clear();
  ASSERT_TRUE(table_.Land(Landed(between->reservation_id(), "cuda_ipc"), &direct).ok());
  EXPECT_TRUE(runner_.landed.empty());
  for (runtime::Sequence* prompt : {&first, &longer, &direct}) memory_.Release(prompt);
  EXPECT_EQ(counts().active, 0);
}

TEST_F(ReservationTableTest, WhatTheDeviceDoesNotTakeIsFoundByNobody) {
  runtime::Sequence prompt = Prompt(2 * kBlockTokens, 1);
  const uint64_t id = table_.Reserve(1, &prompt, 1, 0)->reservation_id();
  runner_.landed_status = absl::InternalError("device");
  EXPECT_EQ(table_.Land(Landed(id), &prompt), runner_.landed_status);
  EXPECT_EQ(table_.Find(id), std::nullopt);
  memory_.Release(&prompt);
  EXPECT_EQ(counts().free, 40);
  EXPECT_EQ(counts().cached, 0);
}

TEST_F(ReservationTableTest, ReserveTakesNothingWhenShort) {
  runtime::Sequence prompt = Prompt(40 * kBlockTokens, 1);
  const auto short_by_headroom = table_.Reserve(1, &prompt, 1, 0);
  EXPECT_EQ(short_by_headroom.status().code(), absl::StatusCode::kResourceExhausted);
  const auto short_by_others = table_.Reserve(1, &prompt, 0, 1);
  EXPECT_EQ(short_by_others.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(counts().free, 40);
  EXPECT_TRUE(table_.Reserve(1, &prompt, 0, 0).ok());
  table_.Drop(1);
  EXPECT_EQ(counts().free, 40);
}

TEST_F(ReservationTableTest, RevokedBlocksComeBackWhenTheWriterIsQuiet) {
  runtime::Sequence prompt = Prompt(100, 1);
  const uint64_t id = table_.Reserve(1, &prompt, 3, 0)->reservation_id();
  EXPECT_TRUE(table_.Revoke(id, "gone", clock_.Now() - absl::Seconds(3)));
  EXPECT_EQ(counts().quarantined, 2);
  EXPECT_EQ(counts().free, 38);  // headroom is written by nobody
  clock_.Advance(absl::Seconds(2));
  const auto quiet = table_.EndQuarantine(id);
  ASSERT_TRUE(quiet.has_value());
  EXPECT_EQ(quiet->quarantined, absl::Seconds(2));
  EXPECT_EQ(quiet->since_asked, absl::Seconds(5));
  EXPECT_FALSE(table_.EndQuarantine(id).has_value());
  EXPECT_EQ(counts().free, 40);
}

TEST_F(ReservationTableTest, TooMuchQuarantineStopsPromises) {
  // The limit is 5 % of the pool, 2 blocks, but one request may always be there.
  for (uint32_t seed = 1; seed <= 2; ++seed) {
    runtime::Sequence prompt = Prompt(3 * kBlockTokens, seed);
    const auto handoff = table_.Reserve(seed, &prompt, 0, 0);
    ASSERT_TRUE(handoff.ok());
    table_.Revoke(handoff->reservation_id(), "gone", clock_.Now());
  }
  runtime::Sequence prompt = Prompt(10, 3);
  EXPECT_EQ(table_.Reserve(3, &prompt, 0, 0).status().code(), absl::StatusCode::kResourceExhausted);
  table_.EndQuarantine(1);
  EXPECT_TRUE(table_.Reserve(3, &prompt, 0, 0).ok());
}

}  // namespace
}  // namespace baton::decode
