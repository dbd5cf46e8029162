#include "kvtransfer/receiver_table.h"

#include <gtest/gtest.h>

namespace baton::kvtransfer {
namespace {

constexpr SessionId kSession = 7;

kv::KvLayout TwoLayers() {
  return {.num_layers = 2,
          .num_kv_heads = 1,
          .head_dim = 16,
          .num_blocks = 4,
          .format = kv::KvFormat::kFp8};
}

// One layer of the one block of a 64-token prompt.
UnitFrame Layer(const worker::v1::Handoff& handoff, uint32_t layer) {
  UnitFrame unit;
  unit.reservation_id = handoff.reservation_id();
  unit.epoch = handoff.epoch();
  unit.sequence = layer;
  unit.rect = {0, 1, layer, layer + 1, 0, 1};
  unit.bytes = BytesOf(unit.rect, {.prompt_tokens = 64}, TwoLayers());
  return unit;
}

TEST(ReceiverTableTest, LandedTellsHowLongUnitsArrivedAndHowLongDecodeWaited) {
  ReceiverTable table(TwoLayers(), "incarnation");
  ReceiverEffects effects;
  Reservation reservation;
  reservation.prompt_tokens = 64;
  reservation.blocks = {3};
  const worker::v1::Handoff handoff = table.Reserve(reservation, 99);
  ASSERT_TRUE(
      table.Open(kSession, {handoff.reservation_id(), handoff.epoch()}, false, "tcp").status.ok());
  const auto at = [](int seconds) { return absl::Seconds(seconds); };

  ASSERT_TRUE(table.BeginUnit(kSession, Layer(handoff, 0), at(10), &effects).has_value());
  table.EndUnit(Layer(handoff, 0), absl::OkStatus(), at(11), &effects);
  ASSERT_TRUE(table.BeginUnit(kSession, Layer(handoff, 1), at(13), &effects).has_value());
  worker::v1::Commit commit;
  *commit.mutable_handoff() = handoff;
  commit.set_units_sent(2);
  commit.set_bytes(2 * Layer(handoff, 0).bytes);
  table.OnCommit(kSession, commit, at(14), &effects);
  EXPECT_TRUE(effects.events.empty());
  table.EndUnit(Layer(handoff, 1), absl::OkStatus(), at(16), &effects);

  ASSERT_EQ(effects.events.size(), 1u);
  EXPECT_EQ(effects.events[0].kind, ReceiverEvent::Kind::kLanded);
  EXPECT_EQ(effects.events[0].arrival, at(6));
  EXPECT_EQ(effects.events[0].exposed, at(2));
}

TEST(ReceiverTableTest, NothingToSendArrivesInNoTime) {
  ReceiverTable table(TwoLayers(), "incarnation");
  ReceiverEffects effects;
  Reservation reservation;
  reservation.prompt_tokens = 64;
  reservation.first_missing_block = 1;
  reservation.blocks = {3};
  const worker::v1::Handoff handoff = table.Reserve(reservation, 99);
  ASSERT_TRUE(
      table.Open(kSession, {handoff.reservation_id(), handoff.epoch()}, false, "tcp").status.ok());
  worker::v1::Commit commit;
  *commit.mutable_handoff() = handoff;
  table.OnCommit(kSession, commit, absl::Seconds(5), &effects);
  ASSERT_EQ(effects.events.size(), 1u);
  EXPECT_EQ(effects.events[0].kind, ReceiverEvent::Kind::kLanded);
  EXPECT_EQ(effects.events[0].arrival, absl::ZeroDuration());
}

}  // namespace
}  // namespace baton::kvtransfer
