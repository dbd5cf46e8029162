#pragma once

// Weights in e4m3, in the layout that linear.h multiplies with.

#include <cuda_runtime.h>

#include <memory>

#include "absl/status/statusor.h"
#include "engine/ops/backend.h"
#include "engine/ops/cuda/cuda_tensors.h"

namespace baton::ops::cuda {

// The codes and scales of `source` where its blocks are this matrix's blocks; else its values,
// rounded with the scales of blocks of this matrix. Errors: INVALID_ARGUMENT for a number of rows
// or columns that FP8 products cannot take; RESOURCE_EXHAUSTED.
absl::StatusOr<std::unique_ptr<CudaMatrix>> PackFp8(const MatrixSource& source,
                                                    cudaStream_t stream);

// Writes source.made, one part below the other, to device memory, and waits.
absl::Status FillMade(const MatrixSource& source,
                      Element element,
                      float inverse_scale,
                      void* out,
                      cudaStream_t stream);

}  // namespace baton::ops::cuda
