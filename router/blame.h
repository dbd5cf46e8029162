#pragma once

// Whose fault a failed leg is.

#include "absl/status/status.h"

namespace baton::router {

enum class Leg { kPrefill, kDecode };

// What a leg's end with an error says of the two workers.
struct Blame {
  bool retry = false;    // another worker may do better
  bool prefill = false;  // the prefill worker is avoided for this request
  bool decode = false;   // the decode worker is
  bool counts = false;   // and its breaker hears of it
};

// A worker that says its peer has failed (ErrorInfo PEER_FAILED: no session, a transfer that broke,
// bytes that are not those that were promised) accuses the other one; but one that accused another
// peer before, in the same request, is the common factor of both and is blamed itself. Without such
// a word it is the worker whose leg ended.
Blame BlameFor(Leg reporter, const absl::Status& status, bool reporter_accused_before);

// The error says that the peer has failed.
bool AccusesPeer(const absl::Status& status);

}  // namespace baton::router
