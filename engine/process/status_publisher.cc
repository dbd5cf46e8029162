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

// Changes of a prefix cache are gathered for this long.
constexpr absl::Duration kKvInterval = absl::Milliseconds(20);

// One watching router. The next message is asked for when the last write is done: nothing is
// queued.
template <typename Message>
class Watcher : public grpc::ServerWriteReactor<Message> {
 public:
  Watcher(absl::Duration interval, std::function<void(Watcher*)> on_done)
      : interval_(interval), on_done_(std::move(on_done)) {}

  // The rest from the publisher's thread only.
  absl::Time next() const { return next_; }
  // Called when a message is due, or has changed. `fill` writes it, or returns false when there is
  // none. A message that cannot be written yet is filled as soon as the last one is gone.
  void MaybeSend(absl::Time now, const std::function<bool(Message*)>& fill) {
    next_ = now + interval_;
    {
      base::MutexLock lock(&mutex_);
      if (finished_) return;
      if (writing_) {
        next_ = now + std::min(interval_, kBusyInterval);
        return;
      }
    }
    if (!fill(&message_)) return;
    {
      base::MutexLock lock(&mutex_);
      if (finished_) return;
      writing_ = true;
    }
    this->StartWrite(&message_);
  }

  void OnWriteDone(bool ok) override {
    {
      base::MutexLock lock(&mutex_);
      writing_ = false;
      if (ok && !finished_) return;
      finished_ = true;
    }
    this->Finish(grpc::Status::CANCELLED);
  }

  void OnCancel() override {
    {
      base::MutexLock lock(&mutex_);
      if (finished_) return;
      finished_ = true;
      if (writing_) return;  // OnWriteDone finishes
    }
    this->Finish(grpc::Status::CANCELLED);
  }

  void OnDone() override {
    on_done_(this);
    delete this;
  }

  uint64_t cursor = 0;  // of events

 private:
  static constexpr absl::Duration kBusyInterval = absl::Milliseconds(10);

  const absl::Duration interval_;
  const std::function<void(Watcher*)> on_done_;
  absl::Time next_ = absl::InfinitePast();
  Message message_;  // belongs to gRPC while writing_
  base::Mutex mutex_;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};
using StatusWatcher = Watcher<worker::v1::WorkerStatus>;
using KvWatcher = Watcher<worker::v1::KvEvents>;

}  // namespace

struct StatusPublisher::Impl : public worker::v1::Cluster::CallbackService {
  std::function<void(worker::v1::WorkerStatus*)> fill;
  base::Mutex mutex;  // held while statuses are sent, so that no watcher goes away meanwhile
  base::CondVar wake;
  std::set<StatusWatcher*> watchers ABSL_GUARDED_BY(mutex);
  std::set<KvWatcher*> kv_watchers ABSL_GUARDED_BY(mutex);
  ReadKvEvents read_kv_events ABSL_GUARDED_BY(mutex);
  bool changed ABSL_GUARDED_BY(mutex) = false;
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  std::thread thread;

  grpc::ServerWriteReactor<worker::v1::WorkerStatus>* WatchStatus(
      grpc::CallbackServerContext*, const worker::v1::WatchStatusRequest* request) override {
    const uint32_t asked =
        request->interval_ms() == 0 ? kIntervalMsDefault : request->interval_ms();
    const absl::Duration interval =
        absl::Milliseconds(std::clamp(asked, kIntervalMsMin, kIntervalMsMax));
    auto* watcher =
        new StatusWatcher(interval, [this](StatusWatcher* done) {  // deletes itself in OnDone
          base::MutexLock lock(&mutex);
          watchers.erase(done);
        });
    base::MutexLock lock(&mutex);
    watchers.insert(watcher);  // due at once
    wake.NotifyAll();
    return watcher;
  }

  grpc::ServerWriteReactor<worker::v1::KvEvents>* WatchKvEvents(
      grpc::CallbackServerContext*, const worker::v1::WatchKvEventsRequest*) override {
    auto* watcher =
        new KvWatcher(kKvInterval, [this](KvWatcher* done) {  // deletes itself in OnDone
          base::MutexLock lock(&mutex);
          kv_watchers.erase(done);
        });
    base::MutexLock lock(&mutex);
    kv_watchers.insert(watcher);
    wake.NotifyAll();
    return watcher;
  }

  // The time of the next message.
  absl::Time SendStatuses(absl::Time now, absl::Time next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    worker::v1::WorkerStatus status;
    bool filled = false;
    for (StatusWatcher* watcher : watchers) {
      if (changed || watcher->next() <= now) {
        if (!std::exchange(filled, true)) fill(&status);
        watcher->MaybeSend(now, [&status](worker::v1::WorkerStatus* out) {
          *out = status;
          return true;
        });
      }
      next = std::min(next, watcher->next());
    }
    changed = false;
    return next;
  }

  absl::Time SendKvEvents(absl::Time now, absl::Time next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    const ReadKvEvents& read = read_kv_events;
    if (read == nullptr) return next;
    for (KvWatcher* watcher : kv_watchers) {
      if (watcher->next() <= now) {
        watcher->MaybeSend(now, [&read, watcher](worker::v1::KvEvents* out) {
          return read(&watcher->cursor, out);
        });
      }
      next = std::min(next, watcher->next());
    }
    return next;
  }

  void Run() {
    base::MutexLock lock(&mutex);
    while (!stopping) {
      const absl::Time now = absl::Now();
      const absl::Time next = SendKvEvents(now, SendStatuses(now, now + absl::Seconds(1)));
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

void StatusPublisher::SetKvEvents(ReadKvEvents read) {
  base::MutexLock lock(&impl_->mutex);
  impl_->read_kv_events = std::move(read);
  impl_->wake.NotifyAll();
}

void StatusPublisher::NotifyChanged() {
  base::MutexLock lock(&impl_->mutex);
  impl_->changed = true;
  impl_->wake.NotifyAll();
}

}  // namespace baton::process
