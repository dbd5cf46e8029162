#include "router/blame.h"

#include "engine/process/grpc_status.h"

namespace baton::router {

bool AccusesPeer(const absl::Status& status) {
  const auto info = process::GetErrorInfo(status);
  return info.has_value() && info->reason == process::kPeerFailed;
}

Blame BlameFor(Leg reporter, const absl::Status& status, bool reporter_accused_before) {
  Blame blame;
  // CANCELLED comes from a worker that goes away: what the router cancels it does not look at. What
  // one worker finds wrong with the other is never the request's fault, whatever its code: that a
  // reservation is not found, say, as the decode worker has let go of it a moment before.
  blame.retry = absl::IsUnavailable(status) || absl::IsDataLoss(status) ||
                absl::IsCancelled(status) || absl::IsAborted(status) ||
                absl::IsFailedPrecondition(status) || AccusesPeer(status);
  if (!blame.retry) return blame;
  // Two workers that do not fit together are each as good as before.
  blame.counts = !absl::IsFailedPrecondition(status);
  const bool other = AccusesPeer(status) && !reporter_accused_before && blame.counts;
  const bool prefill = (reporter == Leg::kPrefill) != other;
  blame.prefill = prefill;
  blame.decode = !prefill;
  return blame;
}

}  // namespace baton::router
