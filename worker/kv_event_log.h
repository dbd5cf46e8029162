#pragma once

// What a worker's prefix cache holds, for routers that watch: the engine thread writes, gRPC reads.

#include <cstdint>
#include <deque>

#include "absl/container/flat_hash_set.h"

#include "baton/worker/v1/cluster.pb.h"

#include "engine/base/mutex.h"
#include "engine/kv/block_hash.h"

namespace baton::worker {

// Thread-safe; neither side waits for the other.
class KvEventLog {
 public:
  // A reader that is further behind than this gets everything anew.
  explicit KvEventLog(size_t max_events = 1 << 16) : max_events_(max_events) {}

  void Add(const kv::BlockHash& hash, bool stored);

  // What has changed since `*cursor`, 0 at the start, which moves on. False: nothing.
  bool Read(uint64_t* cursor, v1::KvEvents* out) const;

 private:
  struct Event {
    uint64_t key;
    bool stored;
  };
  const size_t max_events_;
  mutable base::Mutex mutex_;
  absl::flat_hash_set<uint64_t> held_ ABSL_GUARDED_BY(mutex_);
  std::deque<Event> events_ ABSL_GUARDED_BY(mutex_);
  // Number of the first of events_. From 1: a reader at 0 has not read anything.
  uint64_t first_ ABSL_GUARDED_BY(mutex_) = 1;
};

}  // namespace baton::worker
