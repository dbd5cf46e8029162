#include "worker/kv_event_log.h"

#include <random>
#include <set>

#include "gtest/gtest.h"

namespace baton::worker {
namespace {

kv::BlockHash Hash(uint8_t n) {
  kv::BlockHash hash;
  hash.bytes[0] = n;
  hash.bytes[8] = 77;  // not part of the name
  return hash;
}

std::set<uint64_t> Apply(std::set<uint64_t> held, const v1::KvEvents& events) {
  if (events.reset()) held.clear();
  for (const uint64_t key : events.stored()) held.insert(key);
  for (const uint64_t key : events.removed()) held.erase(key);
  return held;
}

TEST(KvEventLogTest, FirstReadIsEverythingLaterOnesAreChanges) {
  KvEventLog log;
  uint64_t cursor = 0;
  v1::KvEvents events;
  ASSERT_TRUE(log.Read(&cursor, &events)) << "nothing held is something to know";
  EXPECT_TRUE(events.reset());
  EXPECT_FALSE(log.Read(&cursor, &events));
  log.Add(Hash(1), true);
  log.Add(Hash(2), true);
  log.Add(Hash(1), false);
  ASSERT_TRUE(log.Read(&cursor, &events));
  EXPECT_FALSE(events.reset());
  EXPECT_EQ(Apply({}, events), (std::set<uint64_t>{2}));
  uint64_t other = 0;
  ASSERT_TRUE(log.Read(&other, &events));
  EXPECT_TRUE(events.reset());
  EXPECT_EQ(events.stored_size(), 1);
}

TEST(KvEventLogTest, ReaderThatIsTooFarBehindGetsEverything) {
  KvEventLog log(/*max_events=*/4);
  uint64_t cursor = 0;
  v1::KvEvents events;
  log.Read(&cursor, &events);
  for (uint8_t i = 0; i < 5; ++i) log.Add(Hash(i), true);
  ASSERT_TRUE(log.Read(&cursor, &events));
  EXPECT_TRUE(events.reset());
  EXPECT_EQ(events.stored_size(), 5);
}

// Property: whenever a reader reads, it knows what is held.
TEST(KvEventLogTest, ReadersAlwaysEndUpWithWhatIsHeld) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    KvEventLog log(16);
    std::set<uint64_t> held, known[2];
    uint64_t cursors[2] = {0, 0};
    for (int step = 0; step < 500; ++step) {
      const auto key = static_cast<uint8_t>(random() % 20);
      const bool stored = random() % 2 == 0;
      log.Add(Hash(key), stored);
      stored ? held.insert(key).second : held.erase(key) > 0;
      const size_t reader = random() % 8;
      v1::KvEvents events;
      if (reader > 1 || !log.Read(&cursors[reader], &events)) continue;
      known[reader] = Apply(known[reader], events);
      ASSERT_EQ(known[reader], held) << "seed " << seed << " step " << step;
    }
  }
}

}  // namespace
}  // namespace baton::worker
