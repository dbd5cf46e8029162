#pragma once

// Passes that follow one another on a device while the host looks at nothing in between: rounds of
// a draft model, and the step that verifies them.

#include "absl/status/statusor.h"

namespace baton::ops {

// A pass of a chain (Draws::chain) leaves its results on the device, where passes after it read the
// tokens (PassInputs::drawn). Draws are numbered from 0, pass after pass and row after row. Made by
// the backend that draws (Backend::NewDrawChain), which outlives it. Engine thread only.
class DrawChain {
 public:
  virtual ~DrawChain() = default;
  // Draws issued so far.
  virtual int size() const = 0;
  // Waits for the passes issued. Their results are there, and the chain begins anew. The seconds
  // that the device took for them. Errors: INTERNAL; the results say nothing then.
  virtual absl::StatusOr<double> Finish() = 0;
};

}  // namespace baton::ops
