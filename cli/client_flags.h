#pragma once

// What `generate` and `chat` share: where the router is, how to sample, how to print.

#include "absl/status/statusor.h"

#include "baton/v1/generation.pb.h"

namespace baton::cli {

// Fills request->sampling from the flags that were given; others stay unset, so the server's
// defaults hold. Errors: INVALID_ARGUMENT on a malformed --logit-bias or --stop-token-id.
absl::Status FillSampling(v1::GenerateRequest* request);

}  // namespace baton::cli
