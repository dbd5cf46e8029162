#include "engine/process/status_publisher.h"

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"

#include "baton/worker/v1/cluster.grpc.pb.h"

#include "engine/base/mutex.h"

namespace baton::process {
namespace {

constexpr uint32_t kIntervalMsDefault = 100;
constexpr uint32_t kIntervalMsMin = 10;
constexpr uint32_t kIntervalMsMax = 10'000;

// One watching router. Sends the newest status when the last write is done; never queues old ones.
class Watcher : public grpc::ServerWriteReactor<worker::v1::WorkerStatus> {
 public:
  Watcher(absl::Duration interval, std::function<void(Watcher*)> on_done)
      : interval_(interval), on_done_(std::move(on_done)) {}

  // From the publisher's thread only.
  void Send(const worker::v1::WorkerStatus& status, absl::Time now) {
    next_ = now + interval_;
    {
      base::MutexLock lock(&mutex_);
      if (finished_) return;
      if (writing_) {
        waiting_ = status;
        has_waiting_ = true;
        return;
      }
      writing_ = true;
      message_ = status;
    }
    StartWrite(&message_);
  }
  absl::Time next() const { return next_; }

  void OnWriteDone(bool ok) override {
    bool finish = false;
    {
      base::MutexLock lock(&mutex_);
      writing_ = false;
      finish = !ok || finished_;
      finished_ |= finish;
      if (!finish && !has_waiting_) return;
      if (!finish) {
        writing_ = true;
        has_waiting_ = false;
        std::swap(message_, waiting_);
      }
    }
    if (finish) {
      Finish(grpc::Status::CANCELLED);
    } else {
      StartWrite(&message_);
    }
  }

  void OnCancel() override {
    {
      base::MutexLock lock(&mutex_);
      if (finished_) return;
      finished_ = true;
      if (writing_) return;  // OnWriteDone finishes
    }
    Finish(grpc::Status::CANCELLED);
  }

  void OnDone() override {
    on_done_(this);
    delete this;
  }

 private:
  const absl::Duration interval_;
  const std::function<void(Watcher*)> on_done_;
  absl::Time next_ = absl::InfinitePast();
  worker::v1::WorkerStatus message_;  // belongs to gRPC while writing_
  base::Mutex mutex_;
  worker::v1::WorkerStatus waiting_ ABSL_GUARDED_BY(mutex_);
  bool has_waiting_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

struct StatusPublisher::Impl : public worker::v1::Cluster::CallbackService {
  std::function<void(worker::v1::WorkerStatus*)> fill;
  base::Mutex mutex;  // held while statuses are sent, so that no watcher goes away meanwhile
  base::CondVar wake;
  std::set<Watcher*> watchers ABSL_GUARDED_BY(mutex);
  bool changed ABSL_GUARDED_BY(mutex) = false;
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  std::thread thread;

  grpc::ServerWriteReactor<worker::v1::WorkerStatus>* WatchStatus(
      grpc::CallbackServerContext*, const worker::v1::WatchStatusRequest* request) override {
    const uint32_t asked =
        request->interval_ms() == 0 ? kIntervalMsDefault : request->interval_ms();
    const absl::Duration interval =
        absl::Milliseconds(std::clamp(asked, kIntervalMsMin, kIntervalMsMax));
    auto* watcher = new Watcher(interval, [this](Watcher* done) {  // deletes itself in OnDone
      base::MutexLock lock(&mutex);
      watchers.erase(done);
    });
    base::MutexLock lock(&mutex);
    watchers.insert(watcher);  // due at once
    wake.NotifyAll();
    return watcher;
  }

  void Run() {
    base::MutexLock lock(&mutex);
    while (!stopping) {
      const absl::Time now = absl::Now();
      absl::Time next = now + absl::Seconds(1);
      worker::v1::WorkerStatus status;
      bool filled = false;
      for (Watcher* watcher : watchers) {
        if (changed || watcher->next() <= now) {
          if (!std::exchange(filled, true)) fill(&status);
          watcher->Send(status, now);
        }
        next = std::min(next, watcher->next());
      }
      changed = false;
      wake.WaitFor(&mutex, next - now);
    }
  }
};

StatusPublisher::StatusPublisher(std::function<void(worker::v1::WorkerStatus*)> fill)
    : impl_(std::make_unique<Impl>()) {
  impl_->fill = std::move(fill);
  impl_->thread = std::thread([impl = impl_.get()] { impl->Run(); });
}

StatusPublisher::~StatusPublisher() {
  {
    base::MutexLock lock(&impl_->mutex);
    impl_->stopping = true;
    impl_->wake.NotifyAll();
  }
  impl_->thread.join();
}

grpc::Service* StatusPublisher::service() { return impl_.get(); }

void StatusPublisher::NotifyChanged() {
  base::MutexLock lock(&impl_->mutex);
  impl_->changed = true;
  impl_->wake.NotifyAll();
}

}  // namespace baton::process
