#pragma once

// Keeps work away from a worker whose calls fail, and finds out when they work again.

#include <algorithm>

#include "absl/time/time.h"

namespace baton::router {

enum class BreakerState { kClosed, kHalfOpen, kOpen };

struct BreakerOptions {
  int failures = 3;  // in a row, that open it
  // How long it stays open: doubled each time the trial fails.
  absl::Duration open_min = absl::Seconds(1);
  absl::Duration open_max = absl::Seconds(30);
  // No longer than this where no other worker could take the work: what is wrong may not be the
  // worker, and a request that waits is better off with a trial.
  absl::Duration open_alone = absl::Seconds(2);
};

// closed -> open after `failures` failures in a row; open -> half-open when its time is over; one
// request is then let through, and closes it or opens it again. Times are of the owner's clock.
// Thread-compatible.
class Breaker {
 public:
  Breaker() = default;
  explicit Breaker(const BreakerOptions& options) : options_(options) {}

  BreakerState state(absl::Duration now) const {
    if (!open_) return BreakerState::kClosed;
    return now < until_ ? BreakerState::kOpen : BreakerState::kHalfOpen;
  }
  // A request may be sent there now.
  bool Allows(absl::Duration now) const {
    return !open_ || (now >= until_ && (!trial_ || now >= trial_until_));
  }
  // The same where all other workers of its role are kept away from, too.
  bool AllowsAlone(absl::Duration now) const {
    return Allows(now) ||
           (now >= opened_at_ + options_.open_alone && (!trial_ || now >= trial_until_));
  }
  // A request is being sent there.
  void OnSent(absl::Duration now) {
    if (!open_) return;
    trial_ = true;
    trial_until_ = now + options_.open_max;  // a trial that tells nothing does not close it forever
  }
  void OnSuccess() {
    failures_ = 0;
    open_ = trial_ = false;
    pause_ = absl::ZeroDuration();
  }
  void OnFailure(absl::Duration now) {
    ++failures_;
    if (open_ ? !trial_ : failures_ < options_.failures) return;
    open_ = true;
    trial_ = false;
    pause_ = std::min(options_.open_max, std::max(options_.open_min, pause_ * 2));
    opened_at_ = now;
    until_ = now + pause_;
  }
  // The trial has ended without saying anything of the worker: the client left.
  void OnNoVerdict() { trial_ = false; }
  // Another process answers on the address.
  void Reset() { OnSuccess(); }

 private:
  BreakerOptions options_;
  int failures_ = 0;
  bool open_ = false;
  bool trial_ = false;
  absl::Duration opened_at_;
  absl::Duration until_;
  absl::Duration trial_until_;
  absl::Duration pause_;
};

}  // namespace baton::router
