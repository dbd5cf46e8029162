#pragma once

// Matrix products through cuBLASLt.

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/ops/cuda/cublaslt.h"
#include "engine/ops/cuda/device_buffer.h"
#include "engine/ops/cuda/kernels.h"

namespace baton::ops::cuda {

// out [T][N] (+)= x [T][K] * w [N][K]^T, summed in f32.
struct LinearShape {
  int tokens = 0, rows = 0, cols = 0;  // T, N, K
  Element in = Element::kBf16;         // of x and w: bf16 or f32
  Element out = Element::kF32;
  bool accumulate = false;
  bool bias = false;  // a vector [N] in out's element is added

  bool operator==(const LinearShape&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const LinearShape& s) {
    return H::combine(std::move(h), s.tokens, s.rows, s.cols, s.in, s.out, s.accumulate, s.bias);
  }
};

// Owns the handle, its workspace and one plan for every shape met so far. Engine thread only.
class Linear {
 public:
  // Errors: those of LoadCublasLt; RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<Linear>> Create();
  ~Linear();

  // Device pointers, rows contiguous. Errors: INTERNAL with cuBLASLt's status.
  absl::Status Run(const LinearShape& shape,
                   const void* x,
                   const void* w,
                   const void* bias,
                   void* out,
                   cudaStream_t stream);

 private:
  struct Plan {
    CublasLtMatmulDesc* desc = nullptr;
    CublasLtMatrixLayout *w = nullptr, *x = nullptr, *out = nullptr;
    CublasLtAlgo algo = {};
  };

  explicit Linear(const CublasLtApi* api) : api_(*api) {}
  absl::StatusOr<Plan> MakePlan(const LinearShape& shape);
  absl::Status ChooseAlgo(const LinearShape& shape, Plan* plan);
  void Destroy(const Plan& plan);

  const CublasLtApi& api_;
  CublasLtHandle* handle_ = nullptr;
  DeviceBuffer workspace_;
  absl::flat_hash_map<LinearShape, Plan> plans_;
};

}  // namespace baton::ops::cuda
