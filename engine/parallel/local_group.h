#pragma once

// Ranks that are threads of one process: they read each other's memory.

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/base/mutex.h"
#include "engine/parallel/tp_group.h"

namespace baton::parallel {

// Owns the ends. Each end belongs to its rank's thread; the group itself is thread-safe.
class LocalGroup {
 public:
  explicit LocalGroup(int size);
  ~LocalGroup();
  LocalGroup(const LocalGroup&) = delete;
  LocalGroup& operator=(const LocalGroup&) = delete;

  int size() const { return static_cast<int>(ends_.size()); }
  TpGroup& end(int rank);

  // A rank that cannot go on lets the others go: what they wait for, or call later, fails with
  // `reason` (the first one counts).
  void Abort(const absl::Status& reason);
  // Makes an aborted group whole again. No rank is in a call.
  void Reset();

 private:
  class End;

  // Returns once all ranks have come.
  absl::Status Meet();
  absl::Status WaitForRound(uint32_t round);
  absl::Status abort_reason();

  std::vector<std::unique_ptr<End>> ends_;
  std::vector<const void*> shown_;  // by rank: what it lets the others read between two meetings
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};  // counts meetings
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> aborted_{false};
  base::Mutex mutex_;
  base::CondVar moved_;  // round_ or aborted_
  absl::Status abort_reason_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace baton::parallel
