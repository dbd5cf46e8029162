#pragma once

// Matrix products through cuBLASLt.

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/ops/cuda/cublaslt.h"
#include "engine/ops/cuda/device_buffer.h"
#include "engine/ops/cuda/gemm_cache.h"
#include "engine/ops/cuda/kernels.h"

namespace baton::ops::cuda {

// out [T][N] (+)= x [T][K] * w [N][K]^T, summed in f32. In e4m3 x has a scale for 128 neighbours,
// [K / 128][T], and w one for 128 x 128 elements, [N / 128 rounded up][Fp8ScalePitch(K)]; K is a
// multiple of 128, T and N of kFp8Multiple.
struct LinearShape {
  int tokens = 0, rows = 0, cols = 0;  // T, N, K
  Element in = Element::kBf16;         // of x and w: bf16, f32 or e4m3
  Element out = Element::kF32;
  bool accumulate = false;
  bool bias = false;  // a vector [N] in out's element is added

  bool operator==(const LinearShape&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const LinearShape& s) {
    return H::combine(std::move(h), s.tokens, s.rows, s.cols, s.in, s.out, s.accumulate, s.bias);
  }
};

// What FP8 products want of T and N: the step's tokens are rounded up to it, and what lies behind
// the last token is computed and never read.
inline constexpr int kFp8Multiple = 16;
inline constexpr int RoundUp(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
// cuBLASLt reads the scales of w in rows of a multiple of four.
inline constexpr int Fp8ScalePitch(int cols) { return RoundUp(cols / 128, 4); }

// One operand of a product, in device memory; rows contiguous.
struct LinearOperand {
  const void* data = nullptr;
  const float* scales = nullptr;  // e4m3
};

// Owns the handle, its workspace and one plan for every shape met so far. Engine thread only.
class Linear {
 public:
  // `cache`: a file; empty: nothing is kept. Algorithms in it count for one device and version.
  // Errors: those of LoadCublasLt; RESOURCE_EXHAUSTED.
  struct Options {
    std::string device;
    std::string cache;
  };
  static absl::StatusOr<std::unique_ptr<Linear>> Create(const Options& options);
  ~Linear();

  // Device pointers, rows contiguous. The first time for a shape whose result is small (that of a
  // decode step) the algorithms cuBLASLt suggests are timed, with these operands and a result of
  // their own, and the fastest is kept; larger ones take the first suggestion. That waits for the
  // stream and allocates, so a shape is to be met once before steps are timed or captured.
  // Errors: INTERNAL with cuBLASLt's status.
  absl::Status Run(const LinearShape& shape,
                   const LinearOperand& x,
                   const LinearOperand& w,
                   const void* bias,
                   void* out,
                   cudaStream_t stream);

 private:
  struct Plan {
    CublasLtMatmulDesc* desc = nullptr;
    CublasLtMatrixLayout *w = nullptr, *x = nullptr, *out = nullptr;
    CublasLtAlgo algo = {};
  };

  // What a product is called with.
  struct Call {
    LinearOperand x, w;
    const void* bias = nullptr;
    void* out = nullptr;
    cudaStream_t stream = nullptr;
  };

  Linear(const CublasLtApi* api, const Options& options)
      : api_(*api), device_(options.device), cache_(options.cache) {}
  absl::StatusOr<Plan> MakePlan(const LinearShape& shape, const Call& call);
  absl::Status Describe(const LinearShape& shape, Plan* plan);
  absl::Status ChooseAlgo(const LinearShape& shape, const Call& call, Plan* plan);
  // The fastest of several, which all have been suggested for the plan.
  absl::StatusOr<CublasLtAlgo> Fastest(const LinearShape& shape,
                                       Call call,
                                       const Plan& plan,
                                       absl::Span<const CublasLtHeuristic> suggested);
  absl::Status SetPointers(const LinearShape& shape, const Call& call, const Plan& plan);
  absl::Status Multiply(const LinearShape& shape,
                        const Call& call,
                        const Plan& plan,
                        const CublasLtAlgo& algo);
  std::string KeyOf(const LinearShape& shape) const;
  void Destroy(const Plan& plan);

  const CublasLtApi& api_;
  const std::string device_;
  GemmCache cache_;
  CublasLtHandle* handle_ = nullptr;
  DeviceBuffer workspace_;
  absl::flat_hash_map<LinearShape, Plan> plans_;
};

}  // namespace baton::ops::cuda
