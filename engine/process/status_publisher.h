#pragma once

// The Cluster service of a worker: who it is and how it is, to every router that watches.

#include <functional>
#include <memory>

#include "baton/worker/v1/cluster.pb.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace baton::process {

// Thread-safe. Each watcher gets the status at once, after every NotifyChanged, and at its
// interval.
class StatusPublisher {
 public:
  // `fill` writes the present status; it runs on the publisher's thread and must neither block nor
  // take long.
  explicit StatusPublisher(std::function<void(worker::v1::WorkerStatus*)> fill);
  ~StatusPublisher();
  StatusPublisher(const StatusPublisher&) = delete;
  StatusPublisher& operator=(const StatusPublisher&) = delete;

  // What the prefix cache holds: the changes since `*cursor`, 0 at first, which moves on; false
  // when there are none. Any thread. Until it is set, watchers hear nothing.
  using ReadKvEvents = std::function<bool(uint64_t* cursor, worker::v1::KvEvents* out)>;
  void SetKvEvents(ReadKvEvents read);

  // To be registered with the server; owned by the publisher, which outlives the server.
  grpc::Service* service();
  // State, peers or anything else that a router should hear of now has changed. Load travels with
  // the interval.
  void NotifyChanged();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton::process
