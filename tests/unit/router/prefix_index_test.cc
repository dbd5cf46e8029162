#include "router/prefix_index.h"

#include <map>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace baton::router {
namespace {

using Keys = std::vector<BlockKey>;
using Depths = std::vector<uint32_t>;
constexpr absl::Duration kNow = absl::Seconds(10);

TEST(PrefixIndexTest, CountsBlocksFromTheFirstOnOnly) {
  PrefixIndex index;
  index.Add(0, Keys{1, 2, 3});
  index.Add(1, Keys{1, 3});
  index.Add(2, Keys{2, 3});
  EXPECT_EQ(index.Match(Keys{1, 2, 3, 4}, 4, kNow), (Depths{3, 1, 0, 0}));
  EXPECT_EQ(index.Match(Keys{}, 2, kNow), (Depths{0, 0}));
}

TEST(PrefixIndexTest, EvictedBlocksAreForgotten) {
  PrefixIndex index;
  index.Add(0, Keys{1, 2, 3});
  index.Remove(0, Keys{2, 9});
  index.Remove(7, Keys{1});
  EXPECT_EQ(index.Match(Keys{1, 2, 3}, 1, kNow), (Depths{1}));
  index.Clear(0);
  EXPECT_EQ(index.num_keys(), 0u);
  EXPECT_EQ(index.num_keys_of(0), 0u);
}

TEST(PrefixIndexTest, AssumptionsHoldForAWhileUnlessTheyComeTrue) {
  PrefixIndex index;
  index.Assume(0, Keys{1, 2}, absl::Seconds(20));
  EXPECT_EQ(index.Match(Keys{1, 2}, 1, kNow), (Depths{2}));
  EXPECT_EQ(index.Match(Keys{1, 2}, 1, absl::Seconds(20)), (Depths{0}));
  index.Add(0, Keys{1});
  index.Expire(absl::Seconds(20));
  EXPECT_EQ(index.Match(Keys{1, 2}, 1, absl::Seconds(100)), (Depths{1}));
  EXPECT_EQ(index.num_keys(), 1u);
}

TEST(PrefixIndexTest, AnAssumptionDoesNotShortenWhatIsKnown) {
  PrefixIndex index;
  index.Add(0, Keys{1});
  index.Assume(0, Keys{1}, absl::Seconds(20));
  index.Expire(absl::Seconds(30));
  EXPECT_EQ(index.Match(Keys{1}, 1, absl::Seconds(30)), (Depths{1}));
}

// Property: equal to a set per worker under any events.
TEST(PrefixIndexTest, EqualsPlainSets) {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    PrefixIndex index;
    std::map<uint32_t, std::set<BlockKey>> model;
    for (int step = 0; step < 400; ++step) {
      const uint32_t worker = random() % 4;
      Keys keys;
      for (uint32_t i = random() % 5; i > 0; --i) keys.push_back(random() % 12);
      switch (random() % 8) {
        case 0:
          index.Clear(worker);
          model[worker].clear();
          break;
        case 1:
        case 2:
        case 3:
          index.Remove(worker, keys);
          for (const BlockKey key : keys) model[worker].erase(key);
          break;
        default:
          index.Add(worker, keys);
          model[worker].insert(keys.begin(), keys.end());
      }
      const Keys chain = {0, 1, 2, 3, 4, 5};
      const Depths depths = index.Match(chain, 4, kNow);
      for (uint32_t w = 0; w < 4; ++w) {
        uint32_t depth = 0;
        while (depth < chain.size() && model[w].contains(chain[depth])) ++depth;
        ASSERT_EQ(depths[w], depth) << "seed " << seed << " step " << step;
        ASSERT_EQ(index.num_keys_of(w), model[w].size());
      }
    }
  }
}

}  // namespace
}  // namespace baton::router
