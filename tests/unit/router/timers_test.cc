#include "router/timers.h"

#include <future>
#include <string>

#include "gtest/gtest.h"

namespace baton::router {
namespace {

TEST(ThreadTimersTest, CallbacksRunInOrderOfTime) {
  ThreadTimers timers;
  std::promise<void> done;
  std::string order;  // touched by the timers' thread only, until done
  const absl::Duration now = base::Clock::Real().Now();
  timers.At(now + absl::Milliseconds(20), [&] {
    order += 'c';
    done.set_value();
  });
  timers.At(now + absl::Milliseconds(10), [&] { order += 'b'; });
  timers.At(now - absl::Seconds(1), [&] { order += 'a'; });
  done.get_future().wait();
  EXPECT_EQ(order, "abc");
}

TEST(ThreadTimersTest, CancelledCallbackDoesNotRun) {
  std::promise<void> done;
  bool ran = false;
  {
    ThreadTimers timers;
    const absl::Duration now = base::Clock::Real().Now();
    const Timers::Id id = timers.At(now + absl::Milliseconds(10), [&] { ran = true; });
    EXPECT_TRUE(timers.Cancel(id));
    EXPECT_FALSE(timers.Cancel(id));
    timers.At(now + absl::Milliseconds(20), [&] { done.set_value(); });
    done.get_future().wait();
    timers.At(now + absl::Hours(1), [&] { ran = true; });
  }
  EXPECT_FALSE(ran) << "what waits when the timers end is dropped";
}

TEST(ThreadTimersTest, CallbackMaySetAndCancelTimers) {
  ThreadTimers timers;
  std::promise<void> done;
  const absl::Duration now = base::Clock::Real().Now();
  timers.At(now, [&] {
    const Timers::Id id = timers.At(now + absl::Hours(1), [] {});
    EXPECT_TRUE(timers.Cancel(id));
    timers.At(now, [&] { done.set_value(); });
  });
  done.get_future().wait();
}

}  // namespace
}  // namespace baton::router
