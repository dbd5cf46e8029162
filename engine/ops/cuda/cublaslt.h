#pragma once

// The part of cuBLASLt that the backend calls. The library (half a gigabyte) is loaded at run time,
// so that the programs start without it and are built without its headers; the values are those of
// its ABI, stable since version 11.

#include <cuda_runtime.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"

namespace baton::ops::cuda {

struct CublasLtHandle;
struct CublasLtMatmulDesc;
struct CublasLtMatrixLayout;
struct CublasLtPreference;

struct CublasLtAlgo {
  uint64_t data[8];
};
struct CublasLtHeuristic {
  CublasLtAlgo algo;
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

inline constexpr int kCublasSuccess = 0;
inline constexpr int kCublasCompute32F = 68;
inline constexpr int kCublasOpTranspose = 1;
enum CublasLtDescAttribute {
  kDescTransposeA = 3,
  kDescEpilogue = 7,
  kDescBiasPointer = 8,
  kDescScalePointerA = 17,
  kDescScalePointerB = 18,
  kDescScaleModeA = 31,
  kDescScaleModeB = 32
};
// Of e4m3: an f32 for 128 neighbours along k, for 128 x 128 elements.
enum CublasLtScaleMode { kScaleVector128 = 4, kScaleBlock128 = 5 };
enum CublasLtEpilogue { kEpilogueBias = 4 };
enum CublasLtPreferenceAttribute { kPreferenceMaxWorkspaceBytes = 1 };

struct CublasLtApi {
  int (*create)(CublasLtHandle** handle);
  int (*destroy)(CublasLtHandle* handle);
  size_t (*version)();
  int (*desc_create)(CublasLtMatmulDesc** desc, int compute_type, cudaDataType scale_type);
  int (*desc_destroy)(CublasLtMatmulDesc* desc);
  int (*desc_set)(CublasLtMatmulDesc* desc, int attribute, const void* value, size_t size);
  int (*layout_create)(
      CublasLtMatrixLayout** layout, cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld);
  int (*layout_destroy)(CublasLtMatrixLayout* layout);
  int (*preference_create)(CublasLtPreference** preference);
  int (*preference_destroy)(CublasLtPreference* preference);
  int (*preference_set)(CublasLtPreference* preference,
                        int attribute,
                        const void* value,
                        size_t size);
  int (*heuristic)(CublasLtHandle* handle,
                   CublasLtMatmulDesc* desc,
                   CublasLtMatrixLayout* a,
                   CublasLtMatrixLayout* b,
                   CublasLtMatrixLayout* c,
                   CublasLtMatrixLayout* d,
                   CublasLtPreference* preference,
                   int wanted,
                   CublasLtHeuristic* results,
                   int* found);
  int (*algo_check)(CublasLtHandle* handle,
                    CublasLtMatmulDesc* desc,
                    CublasLtMatrixLayout* a,
                    CublasLtMatrixLayout* b,
                    CublasLtMatrixLayout* c,
                    CublasLtMatrixLayout* d,
                    const CublasLtAlgo* algo,
                    CublasLtHeuristic* result);
  int (*matmul)(CublasLtHandle* handle,
                CublasLtMatmulDesc* desc,
                const void* alpha,
                const void* a,
                CublasLtMatrixLayout* a_layout,
                const void* b,
                CublasLtMatrixLayout* b_layout,
                const void* beta,
                const void* c,
                CublasLtMatrixLayout* c_layout,
                void* d,
                CublasLtMatrixLayout* d_layout,
                const CublasLtAlgo* algo,
                void* workspace,
                size_t workspace_bytes,
                cudaStream_t stream);
};

// Errors: UNAVAILABLE naming the library when it or one of its functions is missing.
absl::StatusOr<const CublasLtApi*> LoadCublasLt();

}  // namespace baton::ops::cuda
