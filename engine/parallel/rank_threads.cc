#include "engine/parallel/rank_threads.h"

namespace baton::parallel {

RankThreads::RankThreads(int num_ranks) {
  for (int rank = 1; rank < num_ranks; ++rank) threads_.emplace_back([this, rank] { Loop(rank); });
}

RankThreads::~RankThreads() {
  {
    base::MutexLock lock(&mutex_);
    stop_ = true;
    started_.NotifyAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

void RankThreads::Run(absl::FunctionRef<void(int rank)> job) {
  if (threads_.empty()) return job(0);
  {
    base::MutexLock lock(&mutex_);
    job_ = &job;
    ++num_jobs_;
    running_ = static_cast<int>(threads_.size());
    started_.NotifyAll();
  }
  job(0);
  base::MutexLock lock(&mutex_);
  while (running_ > 0) finished_.Wait(&mutex_);
  job_ = nullptr;
}

void RankThreads::Loop(int rank) {
  uint64_t seen = 0;
  while (true) {
    const absl::FunctionRef<void(int)>* job = nullptr;
    {
      base::MutexLock lock(&mutex_);
      while (num_jobs_ == seen && !stop_) started_.Wait(&mutex_);
      if (stop_) return;
      seen = num_jobs_;
      job = job_;
    }
    (*job)(rank);
    base::MutexLock lock(&mutex_);
    if (--running_ == 0) finished_.NotifyOne();
  }
}

}  // namespace baton::parallel
