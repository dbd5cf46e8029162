#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "engine/base/bounded_queue.h"
#include "engine/base/mutex.h"
#include "kvtransfer/peer_link.h"

namespace baton::testing {

// One direction of a control channel in memory: messages arrive in order, on a thread of their own,
// as over gRPC.
class MemoryLink : public kvtransfer::PeerLink {
 public:
  MemoryLink() : thread_([this] { Run(); }) {}
  ~MemoryLink() override { Stop(); }

  // Delivers nothing any more. Idempotent.
  void Stop() {
    queue_.Close();
    {
      base::MutexLock lock(&mutex_);
      stopped_ = true;
      changed_.NotifyAll();
    }
    if (thread_.joinable()) thread_.join();
  }

  // Where messages go, from now on; those sent before wait for it.
  void SetReceiver(std::function<void(const worker::v1::PeerMessage&)> on_message,
                   std::function<void()> on_close) {
    base::MutexLock lock(&mutex_);
    on_message_ = std::move(on_message);
    on_close_ = std::move(on_close);
    changed_.NotifyAll();
  }

  bool Send(worker::v1::PeerMessage message) override {
    return queue_.TryPush([this, message = std::move(message)] { on_message_(message); });
  }
  void Close() override {
    queue_.TryPush([this] { on_close_(); });
  }

 private:
  void Run() {
    while (std::optional<std::function<void()>> deliver = queue_.Pop()) {
      {
        base::MutexLock lock(&mutex_);
        while (!on_message_ && !stopped_) changed_.Wait(&mutex_);
        if (stopped_) return;
      }
      (*deliver)();
    }
  }

  base::BoundedQueue<std::function<void()>> queue_{4096};
  base::Mutex mutex_;
  base::CondVar changed_;
  std::function<void(const worker::v1::PeerMessage&)>
      on_message_;  // set once, before the first delivery
  std::function<void()> on_close_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace baton::testing
