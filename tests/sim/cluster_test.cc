// A cluster in one thread: every seed is a story of requests and misfortunes. A seed that breaks a
// rule prints itself and its story; BATON_SIM_SEED=n tells it again, byte for byte.

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include <gtest/gtest.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "tests/sim/cluster.h"

namespace baton::sim {
namespace {

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  uint64_t value = otherwise;
  if (text != nullptr && !absl::SimpleAtoi(text, &value))
    BATON_CHECK(false, "not a number: ", name);
  return value;
}

std::string Story(const SimOptions& options) {
  SimOptions again = options;
  again.trace = true;
  return RunSimulation(again).trace;
}

// Most seeds that are named when many fail; the first of them tells its story.
constexpr uint64_t kMaxNamed = 20;

uint64_t running_seed = 0;

// A check of the project's own code has failed: which seed did it, and how.
void OnAbort(int signal) {
  std::fprintf(stderr, "seed %llu died; again with make sim SEEDS=1 SEED_BASE=%llu\n%s",
               static_cast<unsigned long long>(running_seed),
               static_cast<unsigned long long>(running_seed), StoryOfTheRunning().c_str());
}

TEST(ClusterTest, NothingIsLostWhateverHappens) {
  const uint64_t one = FromEnvironment("BATON_SIM_SEED", 0);
  const uint64_t base = one > 0 ? one : FromEnvironment("BATON_SIM_SEED_BASE", 1);
  const uint64_t seeds = one > 0 ? 1 : FromEnvironment("BATON_SIM_SEEDS", 1000);
  std::signal(SIGABRT, OnAbort);
  SimResult sum;
  uint64_t failures = 0;
  const uint64_t failures_max = FromEnvironment("BATON_SIM_FAILURES", kMaxNamed);
  for (uint64_t seed = base; seed < base + seeds && failures < failures_max; ++seed) {
    running_seed = seed;
    // A single seed is told while it runs, so that one that dies is explained too.
    const SimResult result = RunSimulation({.seed = seed, .trace = seeds == 1});
    if (seeds == 1) std::printf("%s", result.trace.c_str());
    if (!result.violation.empty()) {
      ADD_FAILURE() << "seed " << seed << ": " << result.violation
                    << "\nagain with make sim SEEDS=1 SEED_BASE=" << seed << "\n"
                    << (++failures == 1 && seeds > 1 ? Story({.seed = seed}) : "");
    }
    sum.requests += result.requests;
    sum.completed += result.completed;
    sum.cancelled += result.cancelled;
    sum.failed += result.failed;
    sum.faults += result.faults;
    sum.num_events += result.num_events;
  }
  std::printf("seeds=%llu requests=%d completed=%d cancelled=%d failed=%d faults=%d events=%llu\n",
              static_cast<unsigned long long>(seeds), sum.requests, sum.completed, sum.cancelled,
              sum.failed, sum.faults, static_cast<unsigned long long>(sum.num_events));
}

TEST(ClusterTest, ASeedTellsTheSameStoryTwice) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    const std::string first = Story({.seed = seed});
    EXPECT_GT(first.size(), 1000u);
    EXPECT_EQ(first, Story({.seed = seed}));
  }
}

// The same with a transformer on the CPU backend instead of the hash.
TEST(ClusterTest, ARealModelKeepsItsAnswersToo) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const SimResult result = RunSimulation({.seed = seed, .real_model = true});
    ASSERT_EQ(result.violation, "") << "seed " << seed;
  }
}

// The simulator bites: each of these faults, planted in the simulated data plane or in a simulated
// worker, is found within so many seeds. tests/sim/mutate.py does the same to the project's code.
struct Planted {
  const char* name;
  Plant plant;
  uint64_t seeds;
};

class PlantedFaultTest : public testing::TestWithParam<Planted> {};

TEST_P(PlantedFaultTest, IsFound) {
  std::signal(SIGABRT, SIG_DFL);
  for (uint64_t seed = 1; seed <= GetParam().seeds; ++seed) {
    const SimResult result = RunSimulation({.seed = seed, .plant = GetParam().plant});
    if (result.violation.empty()) continue;
    std::printf("found by seed %llu: %s\n", static_cast<unsigned long long>(seed),
                result.violation.c_str());
    return;
  }
  FAIL() << GetParam().name << " is not found in " << GetParam().seeds << " seeds";
}

INSTANTIATE_TEST_SUITE_P(All,
                         PlantedFaultTest,
                         testing::Values(Planted{"AnnounceBeforeCopy", Plant::kAnnounceBeforeCopy,
                                                 50},
                                         Planted{"FreeAtRevoke", Plant::kFreeAtRevoke, 400},
                                         Planted{"WriteAfterQuiet", Plant::kWriteAfterQuiet, 50},
                                         Planted{"SkipUnit", Plant::kSkipUnit, 50},
                                         Planted{"WrongBlock", Plant::kWrongBlock, 50},
                                         Planted{"LoseFinish", Plant::kLoseFinish, 400},
                                         Planted{"LoseBlocks", Plant::kLoseBlocks, 400}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace baton::sim

int main(int argc, char** argv) {
  baton::InitLogging("sim", baton::LogLevel::kError);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
