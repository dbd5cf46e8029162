#include "tests/simt/conformance_kernels.h"

#include "engine/ops/cuda/gpu.h"

namespace baton::simt {
namespace {

namespace gpu = ops::gpu;
constexpr unsigned kAll = 0xffffffffu;

__global__ void ShuffleKernel(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  const int value = 100 + lane;
  out[lane] = __shfl_sync(kAll, value, 3 * lane + 1);
  out[32 + lane] = __shfl_up_sync(kAll, value, 3);
  out[64 + lane] = __shfl_down_sync(kAll, value, 5);
  out[96 + lane] = __shfl_xor_sync(kAll, value, 9);
  out[128 + lane] = __shfl_xor_sync(kAll, value, 2, 4);
  out[160 + lane] = __shfl_sync(kAll, value, lane + 1, 8);
}

__global__ void VoteKernel(unsigned* out) {
  const unsigned lane = threadIdx.x;
  const unsigned value = lane * 7 % 5;
  const bool predicate = lane % 3 == 0;
  out[lane] = __ballot_sync(kAll, predicate);
  out[32 + lane] = static_cast<unsigned>(__any_sync(kAll, predicate));
  out[64 + lane] = static_cast<unsigned>(__all_sync(kAll, predicate));
  if (lane % 2 == 1) out[96 + lane] = __match_any_sync(0xaaaaaaaau, value);
  out[128 + lane] = __reduce_add_sync(kAll, value);
  out[160 + lane] = __reduce_min_sync(kAll, value);
  out[192 + lane] = __reduce_max_sync(kAll, value);
  out[224 + lane] = __reduce_and_sync(kAll, value | 8u);
  out[256 + lane] = __reduce_or_sync(kAll, value);
  out[288 + lane] = __reduce_xor_sync(kAll, value);
}

__global__ void BarrierKernel(int* out) {
  BATON_SHARED(int, mailbox, [32]);
  const int thread = static_cast<int>(threadIdx.x);
  const bool low = thread < 40;
  const int count = __syncthreads_count(low);
  const int all = __syncthreads_and(low);
  const int any = __syncthreads_or(low);
  int seen = 0;
  if (thread < 32) {
    mailbox[thread] = 1;
    gpu::NamedBarrierArrive(1, 64);
  } else {
    gpu::NamedBarrierSync(1, 64);
    for (int i = 0; i < 32; ++i) seen += mailbox[i];
  }
  if (thread == 63) {
    int* row = out + 4 * blockIdx.x;
    row[0] = count;
    row[1] = all;
    row[2] = any;
    row[3] = seen;
  }
}

template <MmaKind kKind>
__global__ void MmaKernel(const uint8_t* a, const uint8_t* b, const float* c, float* d) {
  // Rows of 32 bytes: 16 16-bit elements or 32 bytes, so the fragment maps are the same in bytes.
  const int lane = static_cast<int>(threadIdx.x);
  const int group = lane / 4, t = lane % 4;
  const auto word = [](const uint8_t* matrix, int row, int column) {
    return *reinterpret_cast<const uint32_t*>(matrix + row * 32 + column);
  };
  uint32_t fa[4], fb[2];
  float fc[4], fd[4];
  for (int r = 0; r < 4; ++r) fa[r] = word(a, group + r % 2 * 8, t * 4 + r / 2 * 16);
  for (int r = 0; r < 2; ++r) fb[r] = word(b, group, t * 4 + r * 16);
  for (int r = 0; r < 4; ++r) fc[r] = c[(group + r / 2 * 8) * 8 + t * 2 + r % 2];
  if constexpr (kKind == MmaKind::kBf16) gpu::MmaBf16(fd, fa, fb, fc);
  if constexpr (kKind == MmaKind::kF16) gpu::MmaF16(fd, fa, fb, fc);
  if constexpr (kKind == MmaKind::kE4m3) gpu::MmaE4m3(fd, fa, fb, fc);
  for (int r = 0; r < 4; ++r) d[(group + r / 2 * 8) * 8 + t * 2 + r % 2] = fd[r];
}

__global__ void LdMatrixKernel(const uint16_t* in, uint32_t* out) {
  BATON_SHARED(uint4, rows, [32]);
  const int lane = static_cast<int>(threadIdx.x);
  const int written = (lane + 5) % 32;  // a row that another lane gives the address of
  rows[written] = reinterpret_cast<const uint4*>(in)[written];
  __syncwarp();
  uint32_t plain[4], transposed[4];
  gpu::LdMatrixX4(plain, &rows[lane]);
  gpu::LdMatrixX4Transposed(transposed, &rows[lane]);
  for (int m = 0; m < 4; ++m) {
    out[lane * 4 + m] = plain[m];
    out[128 + lane * 4 + m] = transposed[m];
  }
}

__global__ void AsyncCopyKernel(const float* in, float* out, int count, uint32_t valid) {
  constexpr int kStages = 3, kThreads = 32;
  BATON_SHARED(float4, ring, [kStages][kThreads]);
  const int thread = static_cast<int>(threadIdx.x);
  const int rounds = count / (4 * kThreads);
  const auto fetch = [&](int round) {
    if (round < rounds) {
      const float* from = in + 4 * (round * kThreads + thread);
      gpu::AsyncCopy16(&ring[round % kStages][thread], from, valid);
    }
    gpu::AsyncCommit();
  };
  for (int round = 0; round < kStages - 1; ++round) fetch(round);
  for (int round = 0; round < rounds; ++round) {
    gpu::AsyncWait<kStages - 2>();
    __syncthreads();
    fetch(round + kStages - 1);
    // A neighbour's element: its copy too has landed.
    const float4 value = ring[round % kStages][(thread + 1) % kThreads];
    reinterpret_cast<float4*>(out)[round * kThreads + (thread + 1) % kThreads] = value;
  }
}

__global__ void AtomicKernel(int* out, float* float_sum) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(&out[0], i);
  atomicMax(&out[1], i);
  atomicMin(&out[2], -i);
  atomicOr(&out[3], 1 << (i % 31));
  if (atomicCAS(&out[4], 0, 1) == 0) atomicAdd(&out[5], 1);
  atomicExch(&out[6], 7);
  atomicAdd(float_sum, 0.5f);
}

__global__ void DynamicSharedKernel(int* out, int count) {
  BATON_DYNAMIC_SHARED(int, buffer);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
    buffer[i] = i;
  __syncthreads();
  out[threadIdx.x] = buffer[count - 1 - static_cast<int>(threadIdx.x)];
}

__global__ void ConversionKernel(
    const float* in, int count, uint8_t* codes, float* exp2, float* rsqrt, float* decoded) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) {
    codes[i] = __nv_cvt_float_to_fp8(in[i], __NV_SATFINITE, __NV_E4M3);
    exp2[i] = gpu::FastExp2(in[i]);
    rsqrt[i] = rsqrtf(fabsf(in[i]));
  }
  if (i < 256) {
    const __half_raw half = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(i), __NV_E4M3);
    decoded[i] = __half2float(__half(half));
  }
}

const uint8_t* Bytes(const void* data) { return static_cast<const uint8_t*>(data); }

}  // namespace

cudaError_t RunShuffles(int* out) {
  return gpu::Launch(ShuffleKernel, dim3(1), dim3(32), 0, nullptr, out);
}
cudaError_t RunVotes(unsigned* out) {
  return gpu::Launch(VoteKernel, dim3(1), dim3(32), 0, nullptr, out);
}
cudaError_t RunBarriers(int* out, int num_blocks) {
  return gpu::Launch(BarrierKernel, dim3(num_blocks), dim3(64), 0, nullptr, out);
}
cudaError_t RunMma(MmaKind kind, const void* a, const void* b, const float* c, float* d) {
  const auto kernel = kind == MmaKind::kBf16  ? MmaKernel<MmaKind::kBf16>
                      : kind == MmaKind::kF16 ? MmaKernel<MmaKind::kF16>
                                              : MmaKernel<MmaKind::kE4m3>;
  return gpu::Launch(kernel, dim3(1), dim3(32), 0, nullptr, Bytes(a), Bytes(b), c, d);
}
cudaError_t RunLdMatrix(const uint16_t* in, uint32_t* out) {
  return gpu::Launch(LdMatrixKernel, dim3(1), dim3(32), 0, nullptr, in, out);
}
cudaError_t RunAsyncCopy(const float* in, float* out, int count, uint32_t valid) {
  return gpu::Launch(AsyncCopyKernel, dim3(1), dim3(32), 0, nullptr, in, out, count, valid);
}
cudaError_t RunAtomics(int* out, float* float_sum, int num_blocks) {
  return gpu::Launch(AtomicKernel, dim3(num_blocks), dim3(64), 0, nullptr, out, float_sum);
}
cudaError_t RunDynamicShared(int* out, int bytes) {
  const auto kernel = reinterpret_cast<const void*>(&DynamicSharedKernel);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  return gpu::Launch(DynamicSharedKernel, dim3(1), dim3(64), static_cast<size_t>(bytes), nullptr,
                     out, bytes / 4);
}
cudaError_t RunConversions(
    const float* in, int count, uint8_t* codes, float* exp2, float* rsqrt, float* decoded) {
  return gpu::Launch(ConversionKernel, dim3(1), dim3(256), 0, nullptr, in, count, codes, exp2,
                     rsqrt, decoded);
}

}  // namespace baton::simt
