#pragma once

// The threads that the ranks of a model run on.

#include <cstdint>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "engine/base/mutex.h"

namespace baton::parallel {

// Rank 0 is whoever calls Run; the others have a thread each. One caller at a time.
class RankThreads {
 public:
  explicit RankThreads(int num_ranks);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  int num_ranks() const { return static_cast<int>(threads_.size()) + 1; }
  // job(rank) once on each rank's thread, all at the same time; returns when all have returned.
  void Run(absl::FunctionRef<void(int rank)> job);

 private:
  void Loop(int rank);

  base::Mutex mutex_;
  base::CondVar started_;
  base::CondVar finished_;
  const absl::FunctionRef<void(int)>* job_ ABSL_GUARDED_BY(mutex_) = nullptr;
  uint64_t num_jobs_ ABSL_GUARDED_BY(mutex_) = 0;
  int running_ ABSL_GUARDED_BY(mutex_) = 0;  // of the threads
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace baton::parallel
