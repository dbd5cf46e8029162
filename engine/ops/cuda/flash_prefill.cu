// FlashInfer's paged FP8 prefill kernel, handed our cache as it lies: a page is one of our blocks,
// K and V are the two halves of a block with the same strides, and tables of blocks are its lists
// of pages. (engine/ops/cuda/gpu.h has no part in this file: nothing in it is a kernel of ours, and
// it does not run on the CPU.)

#include "engine/ops/cuda/flash_prefill.h"

// Of that header FlashInfer needs the names of CUTLASS that follow; the rest of it wants cuRAND.
#define FLASHINFER_CUTLASS_UTILS_CUH_
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>
#include <flashinfer/attention/hopper/quantization/prefill_sm90.cuh>
#include <flashinfer/attention/hopper/variants.cuh>

#include "engine/ops/cuda/cache_rows.h"

namespace baton::ops::cuda {
namespace {

using E4m3 = cutlass::float_e4m3_t;
constexpr int kStages = 2;

// The kernel's host code is a template over this struct and takes what it wants by name.
struct FlashArguments {
  using DTypeQ = E4m3;
  using DTypeKV = E4m3;
  using DTypeO = cutlass::bfloat16_t;
  using IdType = int32_t;
  // What StandardFP8Attention looks for.
  struct AdditionalParams {
    const float *maybe_scale_q, *maybe_scale_k, *maybe_scale_v;  // by head, or null
    float scale_q_scalar, scale_k_scalar, scale_v_scalar;        // where null
    float sm_scale;
  };

  E4m3 *q_ptr, *k_ptr, *v_ptr;
  DTypeO* o_ptr;
  float* lse_ptr;
  int32_t *qo_tile_indices, *head_indices, *qo_indptr, *qo_lens, *kv_lens, *kv_indptr,
      *batch_indices, *work_indptr, *kv_indices;
  AdditionalParams additional_params;
  int64_t q_stride_n, q_stride_h, o_stride_n, o_stride_h;
  int64_t k_stride_n, k_stride_h, k_page_stride, v_stride_n, v_stride_h, v_page_stride;
  int64_t nnz_qo;
  int num_qo_heads, num_kv_heads, page_size, window_left;
};

// (A name that it does not find counts as a scale of one.)
using Additional = FlashArguments::AdditionalParams;
static_assert(flashinfer::has_maybe_scale_q_v<Additional> &&
              flashinfer::has_maybe_scale_k_v<Additional> &&
              flashinfer::has_maybe_scale_v_v<Additional> &&
              flashinfer::has_scale_q_scalar_v<Additional> &&
              flashinfer::has_scale_k_scalar_v<Additional> &&
              flashinfer::has_scale_v_scalar_v<Additional>);

// It writes none of what it takes without const, but for the output.
template <typename To, typename From>
To* Open(const From* pointer) {
  return reinterpret_cast<To*>(const_cast<From*>(pointer));
}

FlashArguments ArgumentsOf(const FlashPrefillParams& p) {
  const CacheLayer& cache = p.cache;
  const int64_t dim = cache.head_dim, head = kBlockTokens * dim, row = p.num_heads * dim;
  FlashArguments a = {};
  a.q_ptr = Open<E4m3>(p.q);
  a.k_ptr = Open<E4m3>(cache.base);
  a.v_ptr = Open<E4m3>(cache.base + cache.num_kv_heads * head);
  a.o_ptr = static_cast<FlashArguments::DTypeO*>(p.out);
  a.qo_tile_indices = Open<int32_t>(p.work.tiles);
  a.head_indices = Open<int32_t>(p.work.heads);
  a.qo_indptr = Open<int32_t>(p.work.query_starts);
  a.qo_lens = Open<int32_t>(p.work.query_lens);
  a.kv_lens = Open<int32_t>(p.work.context_lens);
  a.kv_indptr = Open<int32_t>(p.work.table_starts);
  a.batch_indices = Open<int32_t>(p.work.sequences);
  a.work_indptr = Open<int32_t>(p.work.starts);
  a.kv_indices = Open<int32_t>(p.block_tables);
  a.additional_params.maybe_scale_k = cache.scales;
  a.additional_params.maybe_scale_v = cache.scales + cache.num_kv_heads;
  a.additional_params.scale_q_scalar = p.q_scale;
  a.additional_params.sm_scale = p.softmax_scale;
  a.q_stride_n = a.o_stride_n = row;
  a.q_stride_h = a.o_stride_h = a.k_stride_n = a.v_stride_n = dim;
  a.k_stride_h = a.v_stride_h = head;
  a.k_page_stride = a.v_page_stride = cache.block_bytes;
  a.nnz_qo = p.num_tokens;
  a.num_qo_heads = p.num_heads;
  a.num_kv_heads = cache.num_kv_heads;
  a.page_size = kBlockTokens;
  a.window_left = -1;
  return a;
}

template <int kDim>
cudaError_t LaunchFor(const FlashPrefillParams& params, cudaStream_t stream) {
  using Traits =
      flashinfer::FP8AttentionKernelTraits</*USE_TMA_LOAD_KV=*/false, kDim, FlashQueries(kDim),
                                           kFlashKeys, kStages, E4m3, E4m3, FlashArguments::DTypeO,
                                           int32_t, flashinfer::StandardFP8Attention>;
  FlashArguments arguments = ArgumentsOf(params);
  const cudaError_t error = flashinfer::BatchFP8PrefillWithPagedKVCacheKernelTraitsDispatched<
      Traits, /*LEFT_SLIDING_WINDOW=*/false, /*CAUSAL=*/true,
      /*SAME_SCHEDULE_FOR_ALL_HEADS=*/false>(arguments, stream);
  return error != cudaSuccess ? error : cudaGetLastError();
}

}  // namespace

cudaError_t FlashPrefill(const FlashPrefillParams& params, cudaStream_t stream) {
  if (!FlashPrefillTakes(params)) return cudaErrorInvalidValue;
  // The grid is as large as the device, whatever the plan says.
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  if (num_sms != params.work.num_sms) return cudaErrorInvalidValue;
  return params.cache.head_dim == 64 ? LaunchFor<64>(params, stream)
                                     : LaunchFor<128>(params, stream);
}

}  // namespace baton::ops::cuda
