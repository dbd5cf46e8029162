#pragma once

#include "absl/status/status.h"
#include "engine/ops/backend.h"

namespace baton::ops {

// Runs one small layer (every operation, five tokens, then one) on `backend` and on ref and
// compares all results bit for bit; about a millisecond. A compiler fault, an emulator or a broken
// CPU must stop the start, not change answers. Errors: INTERNAL naming the operation that differs.
absl::Status CompareWithRef(Backend* backend);

}  // namespace baton::ops
