#include "router/worker_ledger.h"

#include "gtest/gtest.h"

namespace baton::router {
namespace {

absl::Duration At(double seconds) { return absl::Milliseconds(1000 * seconds); }

TEST(WorkerLedgerTest, PromptsAreComputedOneAfterTheOther) {
  WorkerLedger ledger;
  EXPECT_EQ(ledger.wait_s(At(0)), 0);
  ledger.Add(1, {.tokens = 100, .compute_s = 2}, At(0));
  ledger.Add(2, {.tokens = 50, .compute_s = 1, .is_long = true}, At(0));
  EXPECT_DOUBLE_EQ(ledger.wait_s(At(0)), 3);
  EXPECT_DOUBLE_EQ(ledger.wait_s(At(1.5)), 1.5);
  EXPECT_DOUBLE_EQ(ledger.wait_s(At(10)), 1) << "the first is late; the second has not begun";
  ledger.OnComputed(1, At(10));
  EXPECT_DOUBLE_EQ(ledger.wait_s(At(10.25)), 0.75);
  EXPECT_EQ(ledger.num_long(), 1u);
  EXPECT_TRUE(ledger.Remove(2, At(11)));
  EXPECT_EQ(ledger.num_long(), 0u);
  EXPECT_EQ(ledger.tokens(), 100u);
  EXPECT_TRUE(ledger.Remove(1, At(11)));
  EXPECT_FALSE(ledger.Remove(1, At(11)));
  EXPECT_TRUE(ledger.empty());
  EXPECT_EQ(ledger.wait_s(At(11)), 0);
}

TEST(WorkerLedgerTest, BlocksCountUntilTheReportThatHasThem) {
  WorkerLedger ledger;
  ledger.Add(1, {.tokens = 100, .blocks = 3}, At(0));
  ledger.Add(2, {.tokens = 100, .blocks = 4}, At(0));
  ledger.OnReport();
  EXPECT_EQ(ledger.unreported_blocks(), 7u) << "not reserved yet";
  ledger.OnReserved(1);
  ledger.OnReport();
  EXPECT_EQ(ledger.unreported_blocks(), 4u);
  ledger.Remove(1, At(1));
  EXPECT_EQ(ledger.unreported_blocks(), 4u);
  ledger.Remove(2, At(1));
  EXPECT_EQ(ledger.unreported_blocks(), 0u);
  EXPECT_EQ(ledger.tokens(), 0u);
}

}  // namespace
}  // namespace baton::router
