#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "engine/ops/backend.h"

namespace baton::ops::cpu {

// The default backend: packed weights, worker threads, the best instruction set of the machine or
// the one asked for. Bit-equal to ref. Errors: INVALID_ARGUMENT for an unknown isa or a bad thread
// count; UNAVAILABLE when the machine lacks the isa asked for; RESOURCE_EXHAUSTED.
absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(WeightDtype dtype,
                                                          const BackendOptions& options);

}  // namespace baton::ops::cpu
