#pragma once

// Takes the engine thread's messages to their calls, so that serialising and gRPC cost no step
// time.

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "engine/base/bounded_queue.h"
#include "worker/call_sink.h"

namespace baton::worker {

// One thread and one queue for all calls: what is sent to a call arrives in order. Thread-safe.
class SendThread {
 public:
  // Most messages that wait; a call whose message finds the queue full counts as not being read.
  explicit SendThread(size_t capacity) : queue_(capacity), thread_([this] { Run(); }) {}
  ~SendThread() { Stop(); }
  SendThread(const SendThread&) = delete;
  SendThread& operator=(const SendThread&) = delete;

  // A sink that hands on to `sink` from this thread. A refusal by `sink` is the answer to a later
  // Send. Outlived by the thread.
  template <typename Response>
  std::shared_ptr<CallSink<Response>> Wrap(std::shared_ptr<CallSink<Response>> sink) {
    return std::make_shared<Deferred<Response>>(std::move(sink), this);
  }

  // Takes what is queued to its calls and joins. What comes later goes there at once, from the
  // caller's thread. Idempotent; not to be called from two threads.
  void Stop() {
    queue_.Close();
    if (thread_.joinable()) thread_.join();
  }

 private:
  using Delivery = std::function<void()>;

  template <typename Response>
  class Deferred : public CallSink<Response> {
   public:
    Deferred(std::shared_ptr<CallSink<Response>> sink, SendThread* thread)
        : target_(std::make_shared<Target>()), thread_(thread) {
      target_->sink = std::move(sink);
    }
    bool Send(Response response) override {
      if (target_->refused.load()) return false;
      return thread_->queue_.TryPush([target = target_, response = std::move(response)]() mutable {
        if (!target->sink->Send(std::move(response))) target->refused.store(true);
      });
    }
    void Finish(absl::Status status) override {
      Delivery delivery = [target = target_, status = std::move(status)] {
        target->sink->Finish(status);
      };
      // The end must not get lost: with a full queue it overtakes what nobody reads anyway.
      if (!thread_->queue_.TryPush(std::move(delivery))) delivery();
    }

   private:
    struct Target {
      std::shared_ptr<CallSink<Response>> sink;  // shared with gRPC
      std::atomic<bool> refused{false};
    };
    const std::shared_ptr<Target> target_;  // shared with deliveries on their way
    SendThread* const thread_;
  };

  void Run() {
    while (std::optional<Delivery> delivery = queue_.Pop()) (*delivery)();
  }

  base::BoundedQueue<Delivery> queue_;
  std::thread thread_;
};

}  // namespace baton::worker
