#pragma once

// Ordered, bounded writes for the reactors of gRPC's callback API, which allow one write at a time.

#include <deque>
#include <functional>
#include <utility>

#include "absl/status/status.h"

#include "engine/base/mutex.h"

namespace baton::process {

enum class WriteResult {
  kQueued,
  kFull,    // the limit of waiting messages is reached
  kClosed,  // finished, or the peer is gone
};

// Owned by a reactor (server or client side), which forwards OnWriteDone. Thread-safe; its
// callbacks run on whatever thread made them due, outside the lock, and one at a time per kind.
//
//   class MyReactor : public grpc::ServerWriteReactor<M> {
//     StreamWriter<M> writer_{{.start_write = [this](const M* m) { StartWrite(m); },
//                              .finish = [this](const absl::Status& s) { Finish(ToGrpcStatus(s));
//                              }}};
//     void OnWriteDone(bool ok) override { writer_.OnWriteDone(ok); }
//     void OnCancel() override { writer_.Finish(absl::CancelledError()); }
//     void OnDone() override { delete this; }   // release with care: other threads may still hold
//     the writer
template <typename Message>
class StreamWriter {
 public:
  struct Callbacks {
    std::function<void(const Message*)> start_write;
    // Called exactly once, after Finish(status), when no write is under way. On the client side:
    // StartWritesDone.
    std::function<void(const absl::Status&)> finish;
    // May be null. A message that has to wait: true when it has been taken into `last`, the newest
    // of those that wait. A reader that lags so gets fewer, larger messages.
    std::function<bool(Message* last, Message* next)> merge = nullptr;
    // May be null: 1 each. What a message counts against the limit.
    std::function<size_t(const Message&)> weigh = nullptr;
  };
  static constexpr size_t kDefaultLimit = 8192;

  // Messages of at most `limit` together wait.
  explicit StreamWriter(Callbacks callbacks, size_t limit = kDefaultLimit)
      : callbacks_(std::move(callbacks)), limit_(limit) {}

  // Queues a message; never blocks. Unless kQueued, the message is dropped.
  WriteResult TryWrite(Message message) {
    const Message* start = nullptr;
    {
      base::MutexLock lock(&mutex_);
      if (finishing_ || broken_) return WriteResult::kClosed;
      const size_t weight = callbacks_.weigh ? callbacks_.weigh(message) : 1;
      if (waiting_weight_ + weight > limit_ && !queue_.empty()) return WriteResult::kFull;
      waiting_weight_ += weight;
      // The first one belongs to gRPC.
      if (queue_.size() > 1 && callbacks_.merge &&
          callbacks_.merge(&queue_.back().message, &message)) {
        queue_.back().weight += weight;
        return WriteResult::kQueued;
      }
      queue_.push_back({std::move(message), weight});
      if (writing_) return WriteResult::kQueued;
      writing_ = true;
      start = &queue_.front().message;
    }
    callbacks_.start_write(start);
    return WriteResult::kQueued;
  }
  // The same, for those who do not care why: true when queued.
  bool Write(Message message) { return TryWrite(std::move(message)) == WriteResult::kQueued; }

  // What is queued is still written, unless `status` is an error and `keep_waiting` is not set:
  // then it is dropped. Only the first call counts.
  void Finish(absl::Status status, bool keep_waiting = false) {
    {
      base::MutexLock lock(&mutex_);
      if (finishing_) return;
      finishing_ = true;
      final_status_ = std::move(status);
      if (!final_status_.ok() && !keep_waiting) DropWaitingLocked();
      if (writing_) return;
    }
    callbacks_.finish(final_status_);
  }

  // From the reactor. `ok` false: the peer is gone, nothing more can be written.
  void OnWriteDone(bool ok) {
    const Message* start = nullptr;
    {
      base::MutexLock lock(&mutex_);
      PopLocked(/*front=*/true);
      if (!ok) {
        broken_ = true;
        while (!queue_.empty()) PopLocked(/*front=*/true);
      }
      if (!queue_.empty()) {
        start = &queue_.front().message;
      } else {
        writing_ = false;
        if (!finishing_) return;
      }
    }
    if (start != nullptr) {
      callbacks_.start_write(start);
    } else {
      callbacks_.finish(final_status_);
    }
  }

  size_t num_waiting() const {
    base::MutexLock lock(&mutex_);
    return queue_.size();
  }

 private:
  // Keeps the message being written: gRPC holds a pointer to it.
  void DropWaitingLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    while (queue_.size() > (writing_ ? 1u : 0u)) PopLocked(/*front=*/false);
  }
  void PopLocked(bool front) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    waiting_weight_ -= (front ? queue_.front() : queue_.back()).weight;
    front ? queue_.pop_front() : queue_.pop_back();
  }

  const Callbacks callbacks_;
  const size_t limit_;
  mutable base::Mutex mutex_;
  struct Waiting {
    Message message;
    size_t weight;
  };
  std::deque<Waiting> queue_ ABSL_GUARDED_BY(mutex_);
  size_t waiting_weight_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finishing_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status final_status_;  // written once, before `finish` may be called
};

}  // namespace baton::process
