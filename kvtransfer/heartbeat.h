#pragma once

// How both sides of a session notice that the other says nothing.

#include "absl/time/time.h"

namespace baton::kvtransfer {

inline constexpr absl::Duration kHeartbeatInterval = absl::Seconds(1);
inline constexpr absl::Duration kSuspectAfter = absl::Seconds(3);
// Of our own: a process that was stopped, or whose clock jumped, does not blame its peers for it.
inline constexpr int kMissedHeartbeatsMax = 10;

}  // namespace baton::kvtransfer
