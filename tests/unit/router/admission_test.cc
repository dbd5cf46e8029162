#include "router/admission.h"

#include <string>
#include <vector>

#include "engine/base/metrics.h"
#include "gtest/gtest.h"
#include "tests/unit/router/router_fakes.h"

namespace baton::router {
namespace {

class AdmissionTest : public testing::Test {
 protected:
  absl::StatusOr<Admission::Id> Enter(const std::string& name,
                                      absl::Duration timeout = absl::Seconds(10)) {
    return admission_.Enter(clock_.Now() + timeout, [this, name](absl::Status status) {
      events_.push_back(name + (status.ok() ? "+" : absl::IsDeadlineExceeded(status) ? "!" : "?"));
    });
  }
  base::FakeClock clock_;
  ManualTimers timers_{&clock_};
  std::unique_ptr<base::Metrics> metrics_ = base::Metrics::Create(base::Role::kRouter, "m");
  base::Gauge depth_ = metrics_->gauge(base::GaugeId::kRouterQueueDepth, "normal");
  Admission admission_{
      {.max_running = 1, .max_queue = 2, .queue_depth = depth_}, &timers_, &clock_};
  std::vector<std::string> events_;
};

TEST_F(AdmissionTest, PlacesGoInOrderOfArrival) {
  ASSERT_TRUE(Enter("a").ok());
  ASSERT_TRUE(Enter("b").ok());
  ASSERT_TRUE(Enter("c").ok());
  EXPECT_EQ(events_, (std::vector<std::string>{"a+"}));
  EXPECT_EQ(depth_.value(), 2);
  admission_.Leave();
  admission_.Leave();
  EXPECT_EQ(events_, (std::vector<std::string>{"a+", "b+", "c+"}));
  EXPECT_EQ(admission_.num_running(), 1);
  admission_.Leave();
  EXPECT_EQ(admission_.num_running(), 0);
  EXPECT_EQ(depth_.value(), 0);
  EXPECT_EQ(timers_.num_waiting(), 0u);
}

TEST_F(AdmissionTest, FullQueueRefuses) {
  for (const char* name : {"a", "b", "c"}) ASSERT_TRUE(Enter(name).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(Enter("d").status()));
  EXPECT_EQ(events_, (std::vector<std::string>{"a+"}));
}

// Case 3.2
TEST_F(AdmissionTest, DeadlinePassesInTheQueue) {
  ASSERT_TRUE(Enter("a").ok());
  ASSERT_TRUE(Enter("b", absl::Seconds(1)).ok());
  ASSERT_TRUE(Enter("c", absl::Seconds(2)).ok());
  timers_.Advance(absl::Seconds(1));
  EXPECT_EQ(events_, (std::vector<std::string>{"a+", "b!"}));
  admission_.Leave();
  EXPECT_EQ(events_, (std::vector<std::string>{"a+", "b!", "c+"}));
}

TEST_F(AdmissionTest, CancelledRequestIsNeverCalled) {
  ASSERT_TRUE(Enter("a").ok());
  const auto b = Enter("b");
  EXPECT_TRUE(admission_.Cancel(*b));
  EXPECT_FALSE(admission_.Cancel(*b));
  admission_.Leave();
  EXPECT_EQ(events_, (std::vector<std::string>{"a+"}));
  EXPECT_EQ(admission_.num_running(), 0);
}

}  // namespace
}  // namespace baton::router
