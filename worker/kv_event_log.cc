#include "worker/kv_event_log.h"

#include <cstring>

namespace baton::worker {

void KvEventLog::Add(const kv::BlockHash& hash, bool stored) {
  uint64_t key = 0;
  for (int i = 7; i >= 0; --i) key = key << 8 | hash.bytes[i];
  base::MutexLock lock(&mutex_);
  if (stored) {
    held_.insert(key);
  } else {
    held_.erase(key);
  }
  events_.push_back({key, stored});
  if (events_.size() > max_events_) {
    events_.pop_front();
    ++first_;
  }
}

bool KvEventLog::Read(uint64_t* cursor, v1::KvEvents* out) const {
  out->Clear();
  base::MutexLock lock(&mutex_);
  const uint64_t end = first_ + events_.size();
  if (*cursor == end) return false;
  if (*cursor < first_) {
    out->set_reset(true);
    out->mutable_stored()->Reserve(static_cast<int>(held_.size()));
    for (const uint64_t key : held_) out->add_stored(key);
  } else {
    // A reader applies what was stored before what was removed: of each block only the last word
    // counts.
    absl::flat_hash_set<uint64_t> seen;
    for (uint64_t at = end; at-- > *cursor;) {
      const Event& event = events_[at - first_];
      if (!seen.insert(event.key).second) continue;
      (event.stored ? out->mutable_stored() : out->mutable_removed())->Add(event.key);
    }
  }
  *cursor = end;
  return true;
}

}  // namespace baton::worker
