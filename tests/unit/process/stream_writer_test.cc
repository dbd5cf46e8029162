#include "engine/process/stream_writer.h"

#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace baton::process {
namespace {

// Stands in for a reactor: remembers what was started, and completes it when told.
class StreamWriterTest : public testing::Test {
 protected:
  StreamWriter<int>::Callbacks Callbacks() {
    return {.start_write = [this](const int* message) { started_.push_back(*message); },
            .finish =
                [this](const absl::Status& status) {
                  EXPECT_FALSE(finished_.has_value()) << "finished twice";
                  finished_ = status;
                }};
  }
  std::vector<int> started_;
  std::optional<absl::Status> finished_;
};

TEST_F(StreamWriterTest, WritesOneAtATimeInOrder) {
  StreamWriter<int> writer(Callbacks());
  EXPECT_TRUE(writer.Write(1));
  EXPECT_TRUE(writer.Write(2));
  EXPECT_TRUE(writer.Write(3));
  EXPECT_EQ(started_, (std::vector<int>{1}));
  writer.OnWriteDone(true);
  EXPECT_EQ(started_, (std::vector<int>{1, 2}));
  writer.OnWriteDone(true);
  writer.OnWriteDone(true);
  EXPECT_EQ(started_, (std::vector<int>{1, 2, 3}));
  EXPECT_TRUE(writer.Write(4));
  EXPECT_EQ(started_.back(), 4);
}

TEST_F(StreamWriterTest, RefusesAboveTheLimit) {
  StreamWriter<int> writer(Callbacks(), 2);
  EXPECT_TRUE(writer.Write(1));
  EXPECT_TRUE(writer.Write(2));
  EXPECT_FALSE(writer.Write(3));
  writer.OnWriteDone(true);
  EXPECT_TRUE(writer.Write(3));
}

TEST_F(StreamWriterTest, MessagesThatWaitAreMergedUpToTheLimit) {
  auto callbacks = Callbacks();
  callbacks.merge = [](int* last, int* next) {
    if (*next < 0 || *last < 0) return false;  // an end stays by itself
    *last = *last * 10 + *next;
    return true;
  };
  callbacks.weigh = [](const int& message) { return message == 7 ? size_t{3} : size_t{1}; };
  StreamWriter<int> writer(callbacks, 5);
  for (const int message : {1, 2, 3, 4}) EXPECT_TRUE(writer.Write(message));
  EXPECT_FALSE(writer.Write(7)) << "it weighs three";
  EXPECT_TRUE(writer.Write(-1));
  EXPECT_FALSE(writer.Write(5));
  EXPECT_EQ(writer.num_waiting(), 3u) << "1 is being written, 234 and the end wait";
  writer.OnWriteDone(true);
  EXPECT_TRUE(writer.Write(5));
  writer.OnWriteDone(true);
  writer.OnWriteDone(true);
  EXPECT_EQ(started_, (std::vector<int>{1, 234, -1, 5}));
  writer.OnWriteDone(true);
  EXPECT_TRUE(writer.Write(7));
}

TEST_F(StreamWriterTest, FinishOkWaitsForWhatIsQueued) {
  StreamWriter<int> writer(Callbacks());
  writer.Write(1);
  writer.Write(2);
  writer.Finish(absl::OkStatus());
  EXPECT_FALSE(writer.Write(3));
  writer.OnWriteDone(true);
  EXPECT_FALSE(finished_.has_value());
  writer.OnWriteDone(true);
  EXPECT_EQ(started_, (std::vector<int>{1, 2}));
  ASSERT_TRUE(finished_.has_value());
  EXPECT_TRUE(finished_->ok());
}

TEST_F(StreamWriterTest, FinishWithErrorDropsWhatWaits) {
  StreamWriter<int> writer(Callbacks());
  writer.Write(1);
  writer.Write(2);
  writer.Finish(absl::CancelledError());
  EXPECT_FALSE(finished_.has_value()) << "a write is under way";
  writer.OnWriteDone(true);
  EXPECT_EQ(started_, (std::vector<int>{1}));
  EXPECT_EQ(finished_->code(), absl::StatusCode::kCancelled);
}

TEST_F(StreamWriterTest, FinishWithErrorCanLetTheQueueGoFirst) {
  StreamWriter<int> writer(Callbacks());
  writer.Write(1);
  writer.Write(2);
  writer.Finish(absl::UnavailableError("lost"), /*keep_waiting=*/true);
  writer.OnWriteDone(true);
  EXPECT_EQ(started_, (std::vector<int>{1, 2}));
  EXPECT_FALSE(finished_.has_value());
  writer.OnWriteDone(true);
  EXPECT_EQ(finished_->code(), absl::StatusCode::kUnavailable);
}

TEST_F(StreamWriterTest, FinishOfAnIdleStreamIsImmediate) {
  StreamWriter<int> writer(Callbacks());
  writer.Finish(absl::InternalError("x"));
  EXPECT_EQ(finished_->code(), absl::StatusCode::kInternal);
  writer.Finish(absl::OkStatus());
  EXPECT_EQ(finished_->code(), absl::StatusCode::kInternal) << "the first one counts";
}

TEST_F(StreamWriterTest, BrokenStreamTakesNothingMoreAndStillFinishes) {
  StreamWriter<int> writer(Callbacks());
  writer.Write(1);
  writer.Write(2);
  writer.OnWriteDone(false);
  EXPECT_FALSE(writer.Write(3));
  EXPECT_EQ(started_, (std::vector<int>{1}));
  EXPECT_FALSE(finished_.has_value());
  writer.Finish(absl::OkStatus());
  EXPECT_TRUE(finished_.has_value());
}

}  // namespace
}  // namespace baton::process
