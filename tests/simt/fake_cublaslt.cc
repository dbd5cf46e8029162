// cuBLASLt of the emulated device: the calls that engine/ops/cuda makes, with the library's own
// rules of what a descriptor must hold, and one plain product in f32. The product is put into the
// stream.

#include <cstring>
#include <memory>
#include <vector>

#include "engine/base/bf16.h"
#include "engine/ops/cuda/cublaslt.h"
#include "tests/simt/fake_cudart.h"

namespace baton::ops::cuda {

struct CublasLtHandle {};
struct CublasLtMatmulDesc {
  bool transpose_a = false;
  bool has_bias = false;
  const void* bias = nullptr;
};
struct CublasLtMatrixLayout {
  cudaDataType type;
  uint64_t rows, cols;
  int64_t ld;
};
struct CublasLtPreference {
  uint64_t workspace_bytes = 0;
};

namespace {

constexpr int kInvalidValue = 7, kNotSupported = 15;
constexpr uint64_t kAlgoMark = 0xb470ull;

float At(const void* data, cudaDataType type, int64_t index) {
  if (type == CUDA_R_32F) return static_cast<const float*>(data)[index];
  return base::FloatFromBf16(static_cast<const uint16_t*>(data)[index]);
}

void Put(void* data, cudaDataType type, int64_t index, float value) {
  if (type == CUDA_R_32F) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<uint16_t*>(data)[index] = base::Bf16FromFloat(value);
  }
}

struct Product {
  CublasLtMatmulDesc desc;
  CublasLtMatrixLayout a_layout, b_layout, d_layout;
  const void *a, *b, *c;
  void* d;
  float beta;

  // op(A) = A^T: d(m, n) = sum over k of a(k, m) b(k, n), columns first.
  cudaError_t Run() const {
    const int64_t depth = static_cast<int64_t>(a_layout.rows);
    std::vector<float> column(depth);
    for (int64_t n = 0; n < static_cast<int64_t>(d_layout.cols); ++n) {
      for (int64_t k = 0; k < depth; ++k) column[k] = At(b, b_layout.type, n * b_layout.ld + k);
      for (int64_t m = 0; m < static_cast<int64_t>(d_layout.rows); ++m) {
        float sum = 0;
        for (int64_t k = 0; k < depth; ++k)
          sum += At(a, a_layout.type, m * a_layout.ld + k) * column[k];
        const int64_t at = n * d_layout.ld + m;
        if (beta != 0) sum += beta * At(c, d_layout.type, at);
        if (desc.has_bias) sum += At(desc.bias, d_layout.type, m);
        Put(d, d_layout.type, at, sum);
      }
    }
    return cudaSuccess;
  }
};

int DescSet(CublasLtMatmulDesc* desc, int attribute, const void* value, size_t size) {
  int number = 0;
  if (attribute == kDescBiasPointer && size == sizeof(void*)) {
    std::memcpy(&desc->bias, value, size);
    return kCublasSuccess;
  }
  if (size != sizeof(number)) return kInvalidValue;
  std::memcpy(&number, value, size);
  if (attribute == kDescTransposeA) {
    desc->transpose_a = number == kCublasOpTranspose;
    return kCublasSuccess;
  }
  if (attribute == kDescEpilogue && number == kEpilogueBias) {
    desc->has_bias = true;
    return kCublasSuccess;
  }
  return kInvalidValue;
}

bool ShapesFit(const CublasLtMatmulDesc& desc,
               const CublasLtMatrixLayout& a,
               const CublasLtMatrixLayout& b,
               const CublasLtMatrixLayout& d) {
  return desc.transpose_a && a.rows == b.rows && a.cols == d.rows && b.cols == d.cols &&
         a.type == b.type && a.ld >= static_cast<int64_t>(a.rows) &&
         b.ld >= static_cast<int64_t>(b.rows) && d.ld >= static_cast<int64_t>(d.rows);
}

int Heuristic(CublasLtHandle*,
              CublasLtMatmulDesc* desc,
              CublasLtMatrixLayout* a,
              CublasLtMatrixLayout* b,
              CublasLtMatrixLayout*,
              CublasLtMatrixLayout* d,
              CublasLtPreference* preference,
              int wanted,
              CublasLtHeuristic* results,
              int* found) {
  *found = 0;
  if (!ShapesFit(*desc, *a, *b, *d) || wanted < 1) return kInvalidValue;
  if (preference->workspace_bytes == 0) return kNotSupported;
  results[0] = {};
  results[0].algo.data[0] = kAlgoMark;
  *found = 1;
  return kCublasSuccess;
}

int Matmul(CublasLtHandle*,
           CublasLtMatmulDesc* desc,
           const void* alpha,
           const void* a,
           CublasLtMatrixLayout* a_layout,
           const void* b,
           CublasLtMatrixLayout* b_layout,
           const void* beta,
           const void* c,
           CublasLtMatrixLayout*,
           void* d,
           CublasLtMatrixLayout* d_layout,
           const CublasLtAlgo* algo,
           void* workspace,
           size_t workspace_bytes,
           cudaStream_t stream) {
  const bool valid = ShapesFit(*desc, *a_layout, *b_layout, *d_layout) &&
                     algo->data[0] == kAlgoMark && *static_cast<const float*>(alpha) == 1.0f &&
                     workspace != nullptr && workspace_bytes > 0 &&
                     (!desc->has_bias || desc->bias != nullptr);
  if (!valid) return kInvalidValue;
  for (const void* pointer : {a, b, static_cast<const void*>(d)}) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) return kNotSupported;
  }
  const Product product = {
      *desc, *a_layout, *b_layout, *d_layout, a, b, c, d, *static_cast<const float*>(beta)};
  return simt::EnqueueHostWork(stream, [product] { return product.Run(); }) == cudaSuccess
             ? kCublasSuccess
             : kInvalidValue;
}

template <typename T>
int Create(T** object) {
  *object = new T();
  return kCublasSuccess;
}
template <typename T>
int Destroy(T* object) {
  delete object;
  return kCublasSuccess;
}

int DescCreate(CublasLtMatmulDesc** desc, int compute_type, cudaDataType scale_type) {
  if (compute_type != kCublasCompute32F || scale_type != CUDA_R_32F) return kInvalidValue;
  return Create(desc);
}

int LayoutCreate(
    CublasLtMatrixLayout** layout, cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld) {
  if (type != CUDA_R_32F && type != CUDA_R_16BF) return kNotSupported;
  *layout = new CublasLtMatrixLayout{type, rows, cols, ld};
  return kCublasSuccess;
}

int PreferenceSet(CublasLtPreference* preference, int attribute, const void* value, size_t size) {
  if (attribute != kPreferenceMaxWorkspaceBytes || size != sizeof(uint64_t)) return kInvalidValue;
  std::memcpy(&preference->workspace_bytes, value, size);
  return kCublasSuccess;
}

size_t Version() { return 130100; }

}  // namespace

absl::StatusOr<const CublasLtApi*> LoadCublasLt() {
  static const CublasLtApi api = {.create = Create<CublasLtHandle>,
                                  .destroy = Destroy<CublasLtHandle>,
                                  .version = Version,
                                  .desc_create = DescCreate,
                                  .desc_destroy = Destroy<CublasLtMatmulDesc>,
                                  .desc_set = DescSet,
                                  .layout_create = LayoutCreate,
                                  .layout_destroy = Destroy<CublasLtMatrixLayout>,
                                  .preference_create = Create<CublasLtPreference>,
                                  .preference_destroy = Destroy<CublasLtPreference>,
                                  .preference_set = PreferenceSet,
                                  .heuristic = Heuristic,
                                  .matmul = Matmul};
  return &api;
}

}  // namespace baton::ops::cuda
