#include "worker/send_thread.h"

#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/collecting_sink.h"

namespace baton::worker {
namespace {

using Sink = testing::CollectingSink<int>;

TEST(SendThreadTest, MessagesOfACallArriveInOrderAndFromAnotherThread) {
  class WhoSink : public Sink {
   public:
    bool Send(int value) override {
      sender = std::this_thread::get_id();
      return Sink::Send(value);
    }
    std::thread::id sender;
  };
  const auto who = std::make_shared<WhoSink>();
  const auto other = std::make_shared<Sink>();
  std::vector<int> expected;
  {
    SendThread thread(1000);
    const auto deferred = thread.Wrap<int>(who);
    const auto deferred_other = thread.Wrap<int>(other);
    for (int i = 0; i < 300; ++i) {
      EXPECT_TRUE(deferred->Send(i));
      EXPECT_TRUE(deferred_other->Send(-i));
      expected.push_back(i);
    }
    deferred->Finish(absl::OkStatus());
    deferred_other->Finish(absl::CancelledError("gone"));
  }
  EXPECT_EQ(who->responses(), expected);
  EXPECT_TRUE(who->status().ok());
  EXPECT_NE(who->sender, std::this_thread::get_id());
  EXPECT_EQ(other->responses().size(), 300u);
  EXPECT_EQ(other->status().code(), absl::StatusCode::kCancelled);
}

TEST(SendThreadTest, ARefusalIsTheAnswerToALaterSend) {
  const auto sink = std::make_shared<Sink>();
  sink->Refuse();
  SendThread thread(1000);
  const auto deferred = thread.Wrap<int>(sink);
  deferred->Send(1);
  thread.Stop();  // it has been taken there
  EXPECT_FALSE(deferred->Send(2));
}

TEST(SendThreadTest, AfterStopTheEndStillArrives) {
  const auto sink = std::make_shared<Sink>();
  SendThread thread(10);
  const auto deferred = thread.Wrap<int>(sink);
  thread.Stop();
  EXPECT_FALSE(deferred->Send(1));
  deferred->Finish(absl::UnavailableError("worker stops"));
  EXPECT_EQ(sink->status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace baton::worker
