#include "engine/kv/block_pool.h"

#include <random>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/kv/prefix_cache.h"

namespace baton::kv {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

void ExpectCounts(const BlockPool& pool, const BlockCounts& want) {
  pool.CheckInvariants();
  EXPECT_EQ(pool.counts().free, want.free);
  EXPECT_EQ(pool.counts().cached, want.cached);
  EXPECT_EQ(pool.counts().active, want.active);
  EXPECT_EQ(pool.counts().reserved, want.reserved);
  EXPECT_EQ(pool.counts().quarantined, want.quarantined);
}

TEST(BlockPoolTest, AllocateTakesNothingWhenShort) {
  BlockPool pool(4);
  ASSERT_TRUE(pool.Allocate(3).ok());
  const auto refused = pool.Allocate(2);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("need_blocks=2 free_blocks=1"));
  ExpectCounts(pool, {.free = 1, .active = 3});
}

TEST(BlockPoolTest, AllocatedIdsAreDistinctAndStartWithOneUser) {
  BlockPool pool(3);
  const auto blocks = pool.Allocate(3);
  ASSERT_TRUE(blocks.ok());
  EXPECT_THAT(*blocks, UnorderedElementsAre(0, 1, 2));
  for (BlockId block : *blocks) EXPECT_EQ(pool.users(block), 1);
}

TEST(BlockPoolTest, BlockIsFreeOnlyAfterItsLastUser) {
  BlockPool pool(1);
  std::vector<BlockId> freed;
  pool.set_on_free([&](BlockId block) { freed.push_back(block); });
  const BlockId block = pool.Allocate(1)->front();
  pool.AddUser(block);
  pool.Release(block);
  EXPECT_TRUE(freed.empty());
  EXPECT_EQ(pool.state(block), BlockState::kActive);
  pool.Release(block);
  EXPECT_EQ(freed, std::vector<BlockId>{block});
  ExpectCounts(pool, {.free = 1});
}

TEST(BlockPoolTest, ReservedBlocksLandOrGoThroughQuarantine) {
  BlockPool pool(4);
  const std::vector<BlockId> landed = *pool.Allocate(2, BlockState::kReserved);
  const std::vector<BlockId> revoked = *pool.Allocate(2, BlockState::kReserved);
  ExpectCounts(pool, {.reserved = 4});
  pool.Activate(landed);
  pool.Quarantine(revoked);
  ExpectCounts(pool, {.active = 2, .quarantined = 2});
  EXPECT_FALSE(pool.Allocate(1).ok()) << "a quarantined block was given away";
  pool.EndQuarantine(revoked);
  pool.Release(landed);
  ExpectCounts(pool, {.free = 4});
}

TEST(BlockPoolTest, UnwrittenReservationIsReleasedAtOnce) {
  BlockPool pool(2);
  const std::vector<BlockId> blocks = *pool.Allocate(2, BlockState::kReserved);
  pool.Release(blocks);
  ExpectCounts(pool, {.free = 2});
}

TEST(BlockPoolDeathTest, MisuseEndsTheProcess) {
  BlockPool pool(2);
  const BlockId block = pool.Allocate(1)->front();
  pool.Release(block);
  EXPECT_DEATH(pool.Release(block), "block=");
  EXPECT_DEATH(pool.AddUser(block), "block=");
  EXPECT_DEATH(pool.EndQuarantine({block}), "block=");
  EXPECT_DEATH(pool.Release(7), "block=7");
}

// Case 3.1: whatever the order of admissions, cancels and hand-overs, an idle pool is a free pool.
TEST(BlockPoolTest, RandomLivesLeaveNothingBehind) {
  BlockPool pool(64);
  std::mt19937 random(7);
  struct Life {
    std::vector<BlockId> blocks;
    BlockState state;
  };
  std::vector<Life> lives;
  for (int step = 0; step < 5000; ++step) {
    if (random() % 2 == 0 || lives.empty()) {
      const BlockState state = random() % 2 == 0 ? BlockState::kActive : BlockState::kReserved;
      auto blocks = pool.Allocate(static_cast<int>(random() % 9), state);
      if (blocks.ok()) lives.push_back({*std::move(blocks), state});
    } else {
      const size_t index = random() % lives.size();
      Life& life = lives[index];
      if (life.state == BlockState::kReserved && random() % 2 == 0) {
        pool.Activate(life.blocks);
        life.state = BlockState::kActive;
        continue;
      }
      if (life.state == BlockState::kReserved && random() % 2 == 0) {
        pool.Quarantine(life.blocks);
        life.state = BlockState::kQuarantined;
        continue;
      }
      if (life.state == BlockState::kQuarantined) {
        pool.EndQuarantine(life.blocks);
      } else {
        pool.Release(life.blocks);
      }
      lives.erase(lives.begin() + static_cast<long>(index));
    }
    if (step % 64 == 0) pool.CheckInvariants();
  }
  for (const Life& life : lives) {
    if (life.state == BlockState::kQuarantined) {
      pool.EndQuarantine(life.blocks);
    } else {
      pool.Release(life.blocks);
    }
  }
  ExpectCounts(pool, {.free = 64});
}

}  // namespace
}  // namespace baton::kv
