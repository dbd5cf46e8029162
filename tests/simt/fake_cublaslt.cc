// cuBLASLt of the emulated device: the calls that engine/ops/cuda makes, with the library's own
// rules of what a descriptor must hold, and one plain product in f32. The product is put into the
// stream.

#include <cstring>
#include <memory>
#include <vector>

#include "engine/base/bf16.h"
#include "engine/base/fp8.h"
#include "engine/ops/cuda/cublaslt.h"
#include "tests/simt/fake_cudart.h"

namespace baton::ops::cuda {

struct CublasLtHandle {};
struct CublasLtMatmulDesc {
  bool transpose_a = false;
  bool has_bias = false;
  const void* bias = nullptr;
  int scale_mode_a = 0, scale_mode_b = 0;  // 0: a scalar
  const float *scales_a = nullptr, *scales_b = nullptr;
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
constexpr uint64_t kAlgoMark = 0xb470ull, kDoesNotRun = 99;
constexpr int64_t kGroup = 128;

float At(const void* data, cudaDataType type, int64_t index) {
  if (type == CUDA_R_32F) return static_cast<const float*>(data)[index];
  if (type == CUDA_R_8F_E4M3) return base::FloatFromFp8(static_cast<const uint8_t*>(data)[index]);
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

  // Of the product of a group of k. A has a scale for kGroup x kGroup elements, in rows of a
  // multiple of four; B one for kGroup elements, all columns of a group behind one another.
  float ScaleOf(int64_t m, int64_t n, int64_t group) const {
    if (desc.scale_mode_a == 0) return 1;
    const int64_t groups = (static_cast<int64_t>(a_layout.rows) / kGroup + 3) / 4 * 4;
    return desc.scales_a[m / kGroup * groups + group] *
           desc.scales_b[group * static_cast<int64_t>(b_layout.cols) + n];
  }

  // op(A) = A^T: d(m, n) = sum over k of a(k, m) b(k, n), columns first.
  cudaError_t Run() const {
    const int64_t depth = static_cast<int64_t>(a_layout.rows);
    std::vector<float> column(depth);
    for (int64_t n = 0; n < static_cast<int64_t>(d_layout.cols); ++n) {
      for (int64_t k = 0; k < depth; ++k) column[k] = At(b, b_layout.type, n * b_layout.ld + k);
      for (int64_t m = 0; m < static_cast<int64_t>(d_layout.rows); ++m) {
        float sum = 0, part = 0;
        for (int64_t k = 0; k < depth; ++k) {
          part += At(a, a_layout.type, m * a_layout.ld + k) * column[k];
          if (k % kGroup != kGroup - 1 && k != depth - 1) continue;
          sum += part * ScaleOf(m, n, k / kGroup);
          part = 0;
        }
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
  if (size == sizeof(void*) && attribute == kDescScalePointerA) {
    std::memcpy(&desc->scales_a, value, size);
    return kCublasSuccess;
  }
  if (size == sizeof(void*) && attribute == kDescScalePointerB) {
    std::memcpy(&desc->scales_b, value, size);
    return kCublasSuccess;
  }
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
  if (attribute == kDescScaleModeA && number == kScaleBlock128) {
    desc->scale_mode_a = number;
    return kCublasSuccess;
  }
  if (attribute == kDescScaleModeB && number == kScaleVector128) {
    desc->scale_mode_b = number;
    return kCublasSuccess;
  }
  if (attribute == kDescEpilogue && number == kEpilogueBias) {
    desc->has_bias = true;
    return kCublasSuccess;
  }
  return kInvalidValue;
}

// e4m3 comes with scales of both operands, and in multiples of what the tensor cores take.
bool Fp8Fits(const CublasLtMatmulDesc& desc,
             const CublasLtMatrixLayout& a,
             const CublasLtMatrixLayout& b,
             const CublasLtMatrixLayout& d) {
  if (a.type != CUDA_R_8F_E4M3) return desc.scale_mode_a == 0 && desc.scale_mode_b == 0;
  return desc.scale_mode_a == kScaleBlock128 && desc.scale_mode_b == kScaleVector128 &&
         a.rows % kGroup == 0 && a.cols % 16 == 0 && b.cols % 16 == 0 && d.type != CUDA_R_8F_E4M3;
}

bool ShapesFit(const CublasLtMatmulDesc& desc,
               const CublasLtMatrixLayout& a,
               const CublasLtMatrixLayout& b,
               const CublasLtMatrixLayout& d) {
  return desc.transpose_a && a.rows == b.rows && a.cols == d.rows && b.cols == d.cols &&
         a.type == b.type && Fp8Fits(desc, a, b, d) && a.ld >= static_cast<int64_t>(a.rows) &&
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
  // The second one does not run, as may happen; any that runs computes the same.
  for (; *found < wanted && *found < 3; ++*found) {
    results[*found] = {};
    results[*found].algo.data[0] = kAlgoMark;
    results[*found].algo.data[1] = *found == 1 ? kDoesNotRun : *found;
  }
  return kCublasSuccess;
}

int AlgoCheck(CublasLtHandle*,
              CublasLtMatmulDesc* desc,
              CublasLtMatrixLayout* a,
              CublasLtMatrixLayout* b,
              CublasLtMatrixLayout*,
              CublasLtMatrixLayout* d,
              const CublasLtAlgo* algo,
              CublasLtHeuristic* result) {
  if (!ShapesFit(*desc, *a, *b, *d) || algo->data[0] != kAlgoMark) return kInvalidValue;
  *result = {};
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
                     (!desc->has_bias || desc->bias != nullptr) &&
                     (desc->scale_mode_a == 0 || (desc->scales_a && desc->scales_b));
  if (!valid) return kInvalidValue;
  if (algo->data[1] == kDoesNotRun) return kNotSupported;
  for (const void* pointer :
       {a, b, static_cast<const void*>(d), static_cast<const void*>(desc->scales_a),
        static_cast<const void*>(desc->scales_b)}) {
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
  if (type != CUDA_R_32F && type != CUDA_R_16BF && type != CUDA_R_8F_E4M3) return kNotSupported;
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
                                  .algo_check = AlgoCheck,
                                  .matmul = Matmul};
  return &api;
}

}  // namespace baton::ops::cuda
