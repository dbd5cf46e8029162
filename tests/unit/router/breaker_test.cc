#include "router/breaker.h"

#include "gtest/gtest.h"

namespace baton::router {
namespace {

constexpr absl::Duration At(int seconds) { return absl::Seconds(seconds); }

TEST(BreakerTest, OpensAfterFailuresInARowOnly) {
  Breaker breaker({.failures = 3});
  breaker.OnFailure(At(0));
  breaker.OnFailure(At(0));
  breaker.OnSuccess();
  breaker.OnFailure(At(0));
  breaker.OnFailure(At(0));
  EXPECT_EQ(breaker.state(At(0)), BreakerState::kClosed);
  breaker.OnFailure(At(0));
  EXPECT_EQ(breaker.state(At(0)), BreakerState::kOpen);
  EXPECT_FALSE(breaker.Allows(At(0)));
}

TEST(BreakerTest, HalfOpenLetsOneThrough) {
  Breaker breaker({.failures = 1, .open_min = At(1)});
  breaker.OnFailure(At(0));
  EXPECT_EQ(breaker.state(At(1)), BreakerState::kHalfOpen);
  EXPECT_TRUE(breaker.Allows(At(1)));
  breaker.OnSent(At(1));
  EXPECT_FALSE(breaker.Allows(At(1)));
  breaker.OnSuccess();
  EXPECT_EQ(breaker.state(At(1)), BreakerState::kClosed);
  EXPECT_TRUE(breaker.Allows(At(1)));
}

TEST(BreakerTest, EachFailedTrialDoublesThePause) {
  Breaker breaker({.failures = 1, .open_min = At(1), .open_max = At(5)});
  breaker.OnFailure(At(0));
  int now = 1;
  for (const int pause : {2, 4, 5, 5}) {
    breaker.OnSent(At(now));
    breaker.OnFailure(At(now));
    EXPECT_FALSE(breaker.Allows(At(now + pause - 1)));
    EXPECT_TRUE(breaker.Allows(At(now + pause)));
    now += pause;
  }
}

TEST(BreakerTest, WithoutOthersItIsTriedAgainSooner) {
  Breaker breaker({.failures = 1, .open_min = At(8), .open_max = At(30), .open_alone = At(2)});
  EXPECT_TRUE(breaker.AllowsAlone(At(0)));
  breaker.OnFailure(At(0));
  EXPECT_FALSE(breaker.AllowsAlone(At(1)));
  EXPECT_TRUE(breaker.AllowsAlone(At(2)));
  EXPECT_FALSE(breaker.Allows(At(2)));
  breaker.OnSent(At(2));
  EXPECT_FALSE(breaker.AllowsAlone(At(3))) << "one at a time";
  breaker.OnFailure(At(3));
  EXPECT_FALSE(breaker.AllowsAlone(At(4)));
  EXPECT_TRUE(breaker.AllowsAlone(At(5)));
  EXPECT_FALSE(breaker.Allows(At(18))) << "for the others it is as sick as ever";
  breaker.OnSent(At(5));
  breaker.OnSuccess();
  EXPECT_TRUE(breaker.Allows(At(5)));
  // A short pause is not made longer.
  Breaker brief({.failures = 1, .open_min = At(1), .open_alone = At(2)});
  brief.OnFailure(At(0));
  EXPECT_TRUE(brief.AllowsAlone(At(1)));
}

TEST(BreakerTest, LateFailuresOfOldCallsDoNotProlongIt) {
  Breaker breaker({.failures = 1, .open_min = At(1)});
  breaker.OnFailure(At(0));
  breaker.OnFailure(At(0));
  EXPECT_TRUE(breaker.Allows(At(1)));
}

TEST(BreakerTest, TrialWithoutAVerdictIsRepeated) {
  Breaker breaker({.failures = 1, .open_min = At(1), .open_max = At(5)});
  breaker.OnFailure(At(0));
  breaker.OnSent(At(1));
  breaker.OnNoVerdict();
  EXPECT_TRUE(breaker.Allows(At(1)));
  breaker.OnSent(At(1));
  EXPECT_FALSE(breaker.Allows(At(5)));
  EXPECT_TRUE(breaker.Allows(At(6))) << "one that never ends does not close it for ever";
}

}  // namespace
}  // namespace baton::router
