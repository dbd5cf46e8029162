#include "engine/kv/prefix_cache.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace baton::kv {
namespace {

using Tokens = std::vector<uint32_t>;

// Tokens of whole blocks, block i filled with values[i].
Tokens Blocks(const std::vector<uint32_t>& values) {
  Tokens tokens;
  for (uint32_t value : values) tokens.insert(tokens.end(), kBlockTokens, value);
  return tokens;
}

class PrefixCacheTest : public ::testing::Test {
 protected:
  explicit PrefixCacheTest(int num_blocks = 8) : pool_(num_blocks), cache_(&pool_) {}
  ~PrefixCacheTest() override { Check(); }

  void Check() {
    pool_.CheckInvariants();
    cache_.CheckInvariants();
  }
  std::vector<BlockId> Match(const Tokens& tokens) {
    return cache_.Match(tokens, hasher_.HashBlocks(tokens),
                        MaxMatchBlocks(static_cast<int>(tokens.size()) + 1));
  }
  // A request computes all of `tokens` in blocks of its own, caches them and keeps them.
  std::vector<BlockId> Compute(const Tokens& tokens) {
    std::vector<BlockId> blocks = *pool_.Allocate(static_cast<int>(tokens.size()) / kBlockTokens);
    cache_.Insert(tokens, hasher_.HashBlocks(tokens), blocks);
    return blocks;
  }
  // ... and ends.
  std::vector<BlockId> Cache(const Tokens& tokens) {
    std::vector<BlockId> blocks = Compute(tokens);
    pool_.Release(blocks);
    return blocks;
  }

  BlockPool pool_;
  PrefixCache cache_;
  BlockHasher hasher_{"model", KvFormat::kFp8, ""};
};

TEST(MaxMatchBlocksTest, NeverCoversTheLastPromptToken) {
  EXPECT_EQ(MaxMatchBlocks(0), 0);
  EXPECT_EQ(MaxMatchBlocks(1), 0);
  EXPECT_EQ(MaxMatchBlocks(64), 0);
  EXPECT_EQ(MaxMatchBlocks(65), 1);
  EXPECT_EQ(MaxMatchBlocks(128), 1);
  EXPECT_EQ(MaxMatchBlocks(129), 2);
}

TEST_F(PrefixCacheTest, MatchIsContiguousFromBlockZeroAndAddsUsers) {
  const std::vector<BlockId> cached = Cache(Blocks({1, 2, 3}));
  EXPECT_EQ(pool_.counts().cached, 3);
  const std::vector<BlockId> found = Match(Blocks({1, 2, 9}));
  EXPECT_EQ(found, std::vector<BlockId>(cached.begin(), cached.begin() + 2));
  for (BlockId block : found) EXPECT_EQ(pool_.users(block), 1);
  EXPECT_TRUE(Match(Blocks({9, 2, 3})).empty()) << "a hit after a miss";
  pool_.Release(found);
}

// What a listener is told adds up to what is held.
TEST_F(PrefixCacheTest, ListenerHearsOfEveryBlockThatComesAndGoes) {
  int held = 0;
  cache_.set_listener([&](const BlockHash&, bool stored) { held += stored ? 1 : -1; });
  const auto first = Compute(Blocks({1, 2, 3, 4, 5}));
  EXPECT_EQ(held, 5);
  pool_.Release(first);
  pool_.Release(Compute(Blocks({1, 2, 9})));
  EXPECT_EQ(held, cache_.num_entries());
  pool_.Release(*pool_.Allocate(8));  // evicts everything
  EXPECT_EQ(held, 0);
  EXPECT_EQ(cache_.num_entries(), 0);
}

TEST_F(PrefixCacheTest, MatchObeysTheLimit) {
  Cache(Blocks({1, 2, 3}));
  const Tokens prompt = Blocks({1, 2, 3});
  const auto hashes = hasher_.HashBlocks(prompt);
  EXPECT_EQ(cache_.MatchLength(prompt, hashes, MaxMatchBlocks(192)), 2);
  const auto found = cache_.Match(prompt, hashes, MaxMatchBlocks(192));
  EXPECT_EQ(found.size(), 2u);
  pool_.Release(found);
}

TEST_F(PrefixCacheTest, CountsTokensAskedForAndFound) {
  Cache(Blocks({1, 2}));
  pool_.Release(Match(Blocks({1, 2, 3})));
  pool_.Release(Match(Blocks({5})));
  EXPECT_EQ(cache_.query_tokens(), 256u);
  EXPECT_EQ(cache_.hit_tokens(), 128u);
}

TEST_F(PrefixCacheTest, SaltsDoNotShare) {
  Cache(Blocks({1}));
  const Tokens prompt = Blocks({1});
  const BlockHasher tenant("model", KvFormat::kFp8, "tenant");
  EXPECT_EQ(cache_.MatchLength(prompt, tenant.HashBlocks(prompt), 1), 0);
}

TEST_F(PrefixCacheTest, FirstOfTwoEqualBlocksStays) {
  const std::vector<BlockId> first = Compute(Blocks({1, 2}));
  const std::vector<BlockId> second = Compute(Blocks({1, 2, 3}));
  EXPECT_EQ(cache_.num_entries(), 3);
  const std::vector<BlockId> found = Match(Blocks({1, 2, 3}));
  EXPECT_EQ(found, (std::vector<BlockId>{first[0], first[1], second[2]}));
  pool_.Release(found);
  pool_.Release(second);
  EXPECT_EQ(pool_.counts().free, 5) << "duplicates are freed, not cached";
  pool_.Release(first);
}

// Case 10.2: evicting block 1 of [1,2,3], then asking for [1,2,3] again.
TEST_F(PrefixCacheTest, EvictedBlockIsNotFoundAndNothingBehindItEither) {
  const std::vector<BlockId> cached = Cache(Blocks({1, 2, 3}));
  const std::vector<BlockId> head = Match(Blocks({1}));
  const std::vector<BlockId> others =
      Compute(Blocks({7, 8, 9, 10, 11, 12, 13}));  // 5 free, 2 unused
  EXPECT_EQ(Match(Blocks({1, 2, 3})), std::vector<BlockId>{cached[0]});
  EXPECT_EQ(cache_.evictions(), 2u);
  Check();
  pool_.Release(cached[0]);
  pool_.Release(head);
  pool_.Release(others);
}

TEST_F(PrefixCacheTest, ReusedIdServesItsNewTextOnly) {
  Cache(Blocks({1, 2, 3, 4, 5, 6, 7, 8}));
  const std::vector<BlockId> reused = Cache(Blocks({11, 12, 13, 14, 15, 16, 17, 18}));
  EXPECT_TRUE(Match(Blocks({1, 2})).empty());
  const std::vector<BlockId> found = Match(Blocks({11, 12}));
  EXPECT_EQ(found, std::vector<BlockId>(reused.begin(), reused.begin() + 2));
  pool_.Release(found);
}

TEST_F(PrefixCacheTest, LeastRecentlyUsedGoesFirstAndChildrenBeforeParents) {
  Cache(Blocks({1, 2}));
  Cache(Blocks({3, 4}));
  pool_.Release(Match(Blocks({1, 2})));   // now the younger one
  const auto taken = *pool_.Allocate(5);  // 4 free ones and one cached
  EXPECT_EQ(cache_.MatchLength(Blocks({3, 4}), hasher_.HashBlocks(Blocks({3, 4})), 2), 1);
  EXPECT_EQ(cache_.MatchLength(Blocks({1, 2}), hasher_.HashBlocks(Blocks({1, 2})), 2), 2);
  pool_.Release(taken);
}

TEST_F(PrefixCacheTest, ParentWithUsedChildIsGivenUpLast) {
  const std::vector<BlockId> first = Compute(Blocks({1}));
  const std::vector<BlockId> second =
      Compute(Blocks({1, 2}));  // its block 0 is a duplicate, its block 1 a child of first[0]
  pool_.Release(first);
  EXPECT_EQ(pool_.counts().cached, 1);
  const auto rest = pool_.Allocate(pool_.num_available());
  ASSERT_TRUE(rest.ok());
  EXPECT_EQ(cache_.num_entries(), 0) << "a child must not outlive its parent's entry";
  EXPECT_EQ(pool_.users(second[1]), 1);
  Check();
  pool_.Release(second);
  pool_.Release(*rest);
  EXPECT_EQ(pool_.counts().free, 8);
}

TEST_F(PrefixCacheTest, ClearForgetsUsedBlocksTooButLeavesThemTheirUsers) {
  Cache(Blocks({1, 2}));
  const std::vector<BlockId> used = Match(Blocks({1}));
  cache_.Clear();
  EXPECT_EQ(cache_.num_entries(), 0);
  EXPECT_EQ(pool_.counts().active, 1);
  Check();
  pool_.Release(used);
  EXPECT_EQ(pool_.counts().free, 8);
}

// What a request would compute for a block: a function of all tokens up to its end, standing in for
// keys and values.
uint64_t ContentOf(const Tokens& tokens, int block) {
  uint64_t content = 1469598103934665603u;
  for (int i = 0; i < (block + 1) * kBlockTokens; ++i)
    content = (content ^ tokens[i]) * 1099511628211u;
  return content;
}

// Case 10.2 (and 10.1 with 8 bits): requests come, match, compute what is missing, fork and leave
// at random, with a shadow map of what each block's memory holds. Every matched block must hold
// exactly what the request would compute.
void RunAgainstShadow(int hash_bits, uint32_t seed) {
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  std::map<BlockId, uint64_t> memory;  // outlives the cache, whose end frees blocks
  BlockPool pool(40);
  PrefixCache cache(&pool);
  const BlockHasher hasher("model", KvFormat::kFp8, "", hash_bits);
  pool.set_on_free([&](BlockId block) { memory.erase(block); });
  std::vector<std::vector<BlockId>> running;
  uint64_t hits = 0;
  for (int step = 0; step < 3000; ++step) {
    if (!running.empty() && random() % 3 == 0) {
      const size_t leaving = random() % running.size();
      pool.Release(running[leaving]);
      running.erase(running.begin() + static_cast<long>(leaving));
      continue;
    }
    std::vector<uint32_t> values(1 + random() % 5);
    for (uint32_t& value : values) value = random() % 3;  // few values: many shared beginnings
    const Tokens tokens = Blocks(values);
    const auto hashes = hasher.HashBlocks(tokens);
    std::vector<BlockId> blocks =
        cache.Match(tokens, hashes, MaxMatchBlocks(static_cast<int>(tokens.size())));
    hits += blocks.size();
    for (size_t i = 0; i < blocks.size(); ++i) {
      ASSERT_EQ(memory.at(blocks[i]), ContentOf(tokens, static_cast<int>(i)))
          << "block " << i << " of a match is a stranger's";
    }
    auto own = pool.Allocate(static_cast<int>(values.size() - blocks.size()));
    if (!own.ok()) {
      ASSERT_EQ(own.status().code(), absl::StatusCode::kResourceExhausted);
      pool.Release(blocks);
      continue;
    }
    for (BlockId block : *own) {
      ASSERT_FALSE(memory.contains(block)) << "an id in use was given away";
      memory[block] = ContentOf(tokens, static_cast<int>(blocks.size()));
      blocks.push_back(block);
    }
    cache.Insert(tokens, hashes, blocks);
    running.push_back(blocks);
    if (step % 50 == 0) {
      pool.CheckInvariants();
      cache.CheckInvariants();
    }
  }
  EXPECT_GT(hits, 500u);
  for (const auto& blocks : running) pool.Release(blocks);
  pool.CheckInvariants();
  cache.CheckInvariants();
  EXPECT_EQ(pool.num_available(), 40);
}

TEST(PrefixCacheModelTest, RandomRequestsAgreeWithTheShadow) {
  for (uint32_t seed = 1; seed <= 6; ++seed) RunAgainstShadow(256, seed);
}

// Case 10.1: with hashes of 8 bits nearly every look-up meets a collision; a match must still never
// be a stranger's.
TEST(PrefixCacheModelTest, CollidingHashesNeverServeAStrangersBlock) {
  for (uint32_t seed = 1; seed <= 6; ++seed) RunAgainstShadow(8, seed);
}

TEST(PrefixCacheModelTest, CollisionIsAMissForTheLaterText) {
  BlockPool pool(4);
  PrefixCache cache(&pool);
  const BlockHasher hasher("model", KvFormat::kFp8, "", 8);
  const Tokens first = Blocks({0});
  Tokens second;
  for (uint32_t value = 1; second.empty(); ++value) {
    if (hasher.HashBlocks(Blocks({value})) == hasher.HashBlocks(first)) second = Blocks({value});
  }
  const auto blocks = *pool.Allocate(2);
  cache.Insert(first, hasher.HashBlocks(first), {blocks[0]});
  cache.Insert(second, hasher.HashBlocks(second), {blocks[1]});
  EXPECT_EQ(cache.MatchLength(first, hasher.HashBlocks(first), 1), 1);
  EXPECT_EQ(cache.MatchLength(second, hasher.HashBlocks(second), 1), 0);
  EXPECT_EQ(cache.num_entries(), 1);
  pool.Release(blocks);
}

}  // namespace
}  // namespace baton::kv
