#pragma once

#include <optional>
#include <vector>

#include "engine/base/log.h"
#include "engine/base/mutex.h"
#include "worker/call_sink.h"

namespace baton::testing {

// Keeps what a loop sends, and checks that the end comes once and last. Thread-safe.
template <typename Response>
class CollectingSink : public worker::CallSink<Response> {
 public:
  bool Send(Response response) override {
    base::MutexLock lock(&mutex_);
    BATON_CHECK(!status_, "a message after the end");
    if (refuse_) return false;
    responses_.push_back(std::move(response));
    return true;
  }
  void Finish(absl::Status status) override {
    base::MutexLock lock(&mutex_);
    BATON_CHECK(!status_, "a second end");
    status_ = std::move(status);
  }

  // The reader does not read any more.
  void Refuse() {
    base::MutexLock lock(&mutex_);
    refuse_ = true;
  }
  std::vector<Response> responses() const {
    base::MutexLock lock(&mutex_);
    return responses_;
  }
  bool finished() const {
    base::MutexLock lock(&mutex_);
    return status_.has_value();
  }
  // UNKNOWN when it has not ended.
  absl::Status status() const {
    base::MutexLock lock(&mutex_);
    return status_.value_or(absl::UnknownError("not finished"));
  }

 private:
  mutable base::Mutex mutex_;
  std::vector<Response> responses_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> status_ ABSL_GUARDED_BY(mutex_);
  bool refuse_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace baton::testing
