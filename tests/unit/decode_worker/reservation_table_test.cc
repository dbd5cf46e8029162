#include "decode_worker/reservation_table.h"

#include <memory>
#include <vector>

#include "gtest/gtest.h"

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
  const kv::BlockCounts& counts() const { return memory_.pool().counts(); }

  const kv::BlockHasher hasher_{"model", kv::KvFormat::kF32, ""};
  runtime::KvMemory memory_{40};
  CountingReceiver receiver_;
  base::FakeClock clock_;
  ReservationTable table_{&memory_, &receiver_, &clock_};
};

TEST_F(ReservationTableTest, LandedBlocksAreThePromptsAndHeadroomGoesBack) {
  runtime::Sequence prompt = Prompt(3 * kBlockTokens + 1, 1);
  const auto handoff = table_.Reserve(7, &prompt, /*headroom=*/2, 0);
  ASSERT_TRUE(handoff.ok());
  EXPECT_EQ(counts().reserved, 6);
  EXPECT_EQ(table_.Find(handoff->reservation_id()), 7u);
  table_.Land(handoff->reservation_id(), &prompt);
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
  table_.Land(handoff->reservation_id(), &first);
  runtime::Sequence second = Prompt(3 * kBlockTokens, 1);
  const auto again = table_.Reserve(2, &second, 1, 0);
  ASSERT_TRUE(again.ok());
  // Nothing to send is legal: the prefill worker computes the last token by itself.
  EXPECT_EQ(receiver_.last.first_missing_block, 3);
  EXPECT_EQ(receiver_.last.blocks, first.blocks);
  EXPECT_EQ(counts().reserved, 1);
  table_.Land(again->reservation_id(), &second);
  memory_.Release(&first);
  memory_.Release(&second);
  EXPECT_EQ(counts().active, 0);
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
