#include "engine/parallel/local_group.h"

#include <algorithm>

#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::parallel {
namespace {

// About 20 us: ranks do equal work, so what is missing comes soon, unless its core is taken.
constexpr int kSpins = 500;

}  // namespace

class LocalGroup::End : public TpGroup {
 public:
  End(LocalGroup* group, int rank) : group_(*group), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_.size(); }

  absl::Status AllReduceSum(const float* in, float* out, size_t count) override {
    BATON_RETURN_IF_ERROR(Show(in));
    std::copy_n(ShownBy<float>(0), count, out);
    for (int rank = 1; rank < size(); ++rank) {
      const float* part = ShownBy<float>(rank);
      for (size_t i = 0; i < count; ++i) out[i] = out[i] + part[i];
    }
    return group_.Meet();  // nobody reads `in` any more
  }

  absl::Status AllGather(const uint32_t* in, uint32_t* out, size_t count) override {
    BATON_RETURN_IF_ERROR(Show(in));
    for (int rank = 0; rank < size(); ++rank)
      std::copy_n(ShownBy<uint32_t>(rank), count, out + rank * count);
    return group_.Meet();
  }

  absl::Status Barrier() override { return group_.Meet(); }

 private:
  absl::Status Show(const void* data) {
    group_.shown_[rank_] = data;
    return group_.Meet();
  }
  template <typename T>
  const T* ShownBy(int rank) const {
    return static_cast<const T*>(group_.shown_[rank]);
  }

  LocalGroup& group_;
  const int rank_;
};

LocalGroup::LocalGroup(int size) : shown_(size) {
  BATON_CHECK(size >= 1, "size=", size);
  for (int rank = 0; rank < size; ++rank) ends_.push_back(std::make_unique<End>(this, rank));
}

LocalGroup::~LocalGroup() = default;

TpGroup& LocalGroup::end(int rank) { return *ends_[rank]; }

void LocalGroup::Abort(const absl::Status& reason) {
  BATON_CHECK(!reason.ok());
  base::MutexLock lock(&mutex_);
  if (aborted_.load()) return;
  abort_reason_ = reason;
  aborted_.store(true);
  moved_.NotifyAll();
}

void LocalGroup::Reset() {
  base::MutexLock lock(&mutex_);
  arrived_.store(0);
  aborted_.store(false);
  abort_reason_ = absl::OkStatus();
}

absl::Status LocalGroup::Meet() {
  const uint32_t round = round_.load(std::memory_order_acquire);
  if (aborted_.load(std::memory_order_relaxed)) return abort_reason();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < ends_.size())
    return WaitForRound(round);
  arrived_.store(0, std::memory_order_relaxed);
  // Sequentially consistent: a sleeper either sees it or is counted in sleepers_.
  round_.store(round + 1);
  if (sleepers_.load() > 0) {
    base::MutexLock lock(&mutex_);
    moved_.NotifyAll();
  }
  return absl::OkStatus();
}

absl::Status LocalGroup::WaitForRound(uint32_t round) {
  const auto waiting = [&] { return round_.load() == round && !aborted_.load(); };
  for (int spin = 0; spin < kSpins && waiting(); ++spin) __builtin_ia32_pause();
  if (waiting()) {
    base::MutexLock lock(&mutex_);
    sleepers_.fetch_add(1);
    while (waiting()) moved_.Wait(&mutex_);
    sleepers_.fetch_sub(1);
  }
  return round_.load() == round ? abort_reason() : absl::OkStatus();
}

absl::Status LocalGroup::abort_reason() {
  base::MutexLock lock(&mutex_);
  return abort_reason_;
}

}  // namespace baton::parallel
