#include "router/admission.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::router {

absl::StatusOr<Admission::Id> Admission::Enter(absl::Duration deadline,
                                               std::function<void(absl::Status)> done) {
  Id id = 0;
  {
    base::MutexLock lock(&mutex_);
    id = next_id_++;
    if (running_ >= options_.max_running || !waiting_.empty()) {
      if (static_cast<int>(waiting_.size()) >= options_.max_queue) {
        return absl::ResourceExhaustedError(
            absl::StrCat("queue full: waiting=", waiting_.size(), " running=", running_));
      }
      waiting_[id] = {std::move(done), timers_->At(deadline, [this, id] { Expire(id); })};
      PublishDepth();
      return id;
    }
    ++running_;
  }
  done(absl::OkStatus());
  return id;
}

bool Admission::Cancel(Id id) {
  Waiting gone;
  base::MutexLock lock(&mutex_);
  const auto found = waiting_.find(id);
  if (found == waiting_.end()) return false;
  gone = std::move(found->second);
  waiting_.erase(found);
  timers_->Cancel(gone.timer);
  PublishDepth();
  return true;
}

void Admission::Leave() {
  Waiting next;
  {
    base::MutexLock lock(&mutex_);
    if (waiting_.empty()) {
      --running_;
      return;
    }
    next = std::move(waiting_.begin()->second);
    waiting_.erase(waiting_.begin());
    timers_->Cancel(next.timer);
    PublishDepth();
  }
  next.done(absl::OkStatus());
}

void Admission::Expire(Id id) {
  Waiting expired;
  {
    base::MutexLock lock(&mutex_);
    const auto found = waiting_.find(id);
    if (found == waiting_.end()) return;
    expired = std::move(found->second);
    waiting_.erase(found);
    PublishDepth();
  }
  expired.done(absl::DeadlineExceededError("the deadline passed in the router's queue"));
}

int Admission::num_running() const {
  base::MutexLock lock(&mutex_);
  return running_;
}

int Admission::num_waiting() const {
  base::MutexLock lock(&mutex_);
  return static_cast<int>(waiting_.size());
}

void Admission::PublishDepth() { options_.queue_depth.Set(static_cast<double>(waiting_.size())); }

}  // namespace baton::router
