#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "engine/ops/backend.h"

namespace baton::ops::cuda {

// The backend on the first CUDA device. Weights f32, bf16 or fp8.
// Errors: UNAVAILABLE without a device, a driver or cuBLASLt, or without FlashInfer's kernel where
// it is asked for, saying which; INVALID_ARGUMENT for other weights or prefill attention.
absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(WeightDtype dtype,
                                                           const BackendOptions& options);

}  // namespace baton::ops::cuda
