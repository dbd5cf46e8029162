#pragma once

#include <utility>

#include "engine/base/mutex.h"
#include "kvtransfer/peer_link.h"

namespace baton::kvtransfer {

// A PeerLink that may be gone: its owner takes it back with Drop(), after which nobody here uses
// it. Thread-safe.
class LinkSlot {
 public:
  explicit LinkSlot(PeerLink* link) : link_(link) {}

  void Send(worker::v1::PeerMessage message) {
    base::MutexLock lock(&mutex_);
    if (link_ != nullptr) link_->Send(std::move(message));
  }
  void Close() {
    base::MutexLock lock(&mutex_);
    if (link_ != nullptr) link_->Close();
  }
  void Drop() {
    base::MutexLock lock(&mutex_);
    link_ = nullptr;
  }

 private:
  base::Mutex mutex_;
  PeerLink* link_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace baton::kvtransfer
