#pragma once

// Which transports did not reach which decode worker: what waits for its limit in vain is not
// waited for again each time the two meet.

#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "engine/base/clock.h"
#include "engine/base/mutex.h"

namespace baton::kvtransfer {

// Of one prefill worker. By the decode worker's incarnation, so a restart of either begins anew.
// Thread-safe.
class UnreachableTransports {
 public:
  // From then on it is tried again.
  static constexpr absl::Duration kKeptFor = absl::Minutes(5);

  // Why `transport` is not to be tried with the peer `incarnation` now; OK: it is.
  absl::Status Find(absl::string_view incarnation,
                    absl::string_view transport,
                    const base::Clock& clock) const;
  // Takes note of `why` if it says that nobody answered; others are told at once each time. Call it
  // only of a peer that was reached in another way: else it is the peer that does not answer.
  void Note(absl::string_view incarnation,
            absl::string_view transport,
            const absl::Status& why,
            const base::Clock& clock);

 private:
  struct Entry {
    absl::Status why;
    absl::Duration noted_at;
  };
  using Key = std::pair<std::string, std::string>;

  mutable base::Mutex mutex_;
  std::map<Key, Entry> entries_
      ABSL_GUARDED_BY(mutex_);  // of the last kKeptFor, or a little longer
};

}  // namespace baton::kvtransfer
