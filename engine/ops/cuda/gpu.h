#pragma once

// The only header of CUDA's that a kernel file includes, and the only file with inline PTX.
// Compiled by nvcc it is CUDA; compiled by the host compiler it leads to tests/simt, which runs the
// same kernels on the CPU. So a kernel is written as usual, but for these:
//   instead of k<<<grid, block, bytes, stream>>>(a...)   gpu::Launch(k, grid, block, bytes, stream,
//   a...) instead of __shared__ float x[32];                   BATON_SHARED(float, x, [32]);
//   instead of extern __shared__ T x[];                  BATON_DYNAMIC_SHARED(T, x);
//   instead of inline PTX                                a function of this file, with its twin
// A kernel that has barriers does not return early: it guards with a condition.

#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#define BATON_SHARED(type, name, ...) __shared__ type name __VA_ARGS__
#define BATON_DYNAMIC_SHARED(type, name)                                         \
  extern __shared__ __align__(1024) unsigned char baton_dynamic_shared_memory[]; \
  type* const name = reinterpret_cast<type*>(baton_dynamic_shared_memory)

namespace baton::ops::gpu {

template <typename... P, typename... A>
cudaError_t Launch(void (*kernel)(P...),
                   dim3 grid,
                   dim3 block,
                   size_t shared_bytes,
                   cudaStream_t stream,
                   A&&... args) {
  kernel<<<grid, block, shared_bytes, stream>>>(std::forward<A>(args)...);
  return cudaGetLastError();
}

__device__ __forceinline__ uint32_t SharedAddress(const void* address) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}

// The first `num_threads` (a multiple of 32) to come wait for one another at barrier `id` (1..15).
__device__ __forceinline__ void NamedBarrierSync(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
// Counts as one of them and goes on.
__device__ __forceinline__ void NamedBarrierArrive(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Copies 16 bytes from global to shared memory in the background; bytes from `valid` on are zeros.
__device__ __forceinline__ void AsyncCopy16(void* shared, const void* global, uint32_t valid = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(shared)),
               "l"(global), "r"(valid)
               : "memory");
}
__device__ __forceinline__ void AsyncCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most kGroupsLeft of this thread's committed groups are still in flight.
template <int kGroupsLeft>
__device__ __forceinline__ void AsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroupsLeft) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane 8m + r gives the address of row r of matrix m.
__device__ __forceinline__ void LdMatrixX4(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(SharedAddress(row))
               : "memory");
}
__device__ __forceinline__ void LdMatrixX4Transposed(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(SharedAddress(row))
               : "memory");
}

// d = a * b + c, f32 accumulation; a [16][k] row-major, b [k][8] column-major, c and d [16][8].
#define BATON_MMA(name, shape)                                                                     \
  __device__ __forceinline__ void name(float(&d)[4], const uint32_t(&a)[4], const uint32_t(&b)[2], \
                                       const float(&c)[4]) {                                       \
    asm volatile("mma.sync.aligned." shape                                                         \
                 " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"                      \
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]),    \
                   "f"(c[1]), "f"(c[2]), "f"(c[3]));                                               \
  }
BATON_MMA(MmaBf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
BATON_MMA(MmaF16, "m16n8k16.row.col.f32.f16.f16.f32")
BATON_MMA(MmaE4m3, "m16n8k32.row.col.f32.e4m3.e4m3.f32")
#undef BATON_MMA

// A word that kernels of several devices, or the host, see: what was written before the store is
// seen by whoever has loaded what it stored.
__device__ __forceinline__ uint32_t LoadAcquireSystem(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void StoreReleaseSystem(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// Between two looks at such a word.
__device__ __forceinline__ void WaitForPeer() { __nanosleep(20); }

// 2^x: the hardware's approximation (2 ulp); 0 for x = -infinity.
__device__ __forceinline__ float FastExp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace baton::ops::gpu

#else  // the host compiler

#include "tests/simt/cuda_names.h"

#define BATON_SHARED(type, name, ...)                                      \
  static thread_local ::baton::simt::SharedDeclaration name##_declaration; \
  using name##_type = type __VA_ARGS__;                                    \
  name##_type& name = *static_cast<name##_type*>(                          \
      ::baton::simt::SharedMemory(&name##_declaration, sizeof(name##_type), alignof(name##_type)))
#define BATON_DYNAMIC_SHARED(type, name) \
  type* const name = static_cast<type*>(::baton::simt::DynamicSharedMemory())

namespace baton::ops::gpu {

using simt::Launch;
using Site = simt::Site;

inline void NamedBarrierSync(int id, int num_threads, Site site = Site::current()) {
  simt::NamedBarrier(id, num_threads, true, site);
}
inline void NamedBarrierArrive(int id, int num_threads, Site site = Site::current()) {
  simt::NamedBarrier(id, num_threads, false, site);
}
inline void AsyncCopy16(void* shared,
                        const void* global,
                        uint32_t valid = 16,
                        Site site = Site::current()) {
  simt::AsyncCopy(shared, global, 16, valid, site);
}
inline void AsyncCommit() { simt::AsyncCommit(); }
template <int kGroupsLeft>
inline void AsyncWait() {
  simt::AsyncWait(kGroupsLeft);
}
inline void LdMatrixX4(uint32_t (&out)[4], const void* row, Site site = Site::current()) {
  simt::LdMatrixX4(out, row, false, site);
}
inline void LdMatrixX4Transposed(uint32_t (&out)[4], const void* row, Site site = Site::current()) {
  simt::LdMatrixX4(out, row, true, site);
}
#define BATON_MMA(name, type)                                                                      \
  inline void name(float(&d)[4], const uint32_t(&a)[4], const uint32_t(&b)[2], const float(&c)[4], \
                   Site site = Site::current()) {                                                  \
    simt::Mma(simt::MmaType::type, d, a, b, c, site);                                              \
  }
BATON_MMA(MmaBf16, kBf16)
BATON_MMA(MmaF16, kF16)
BATON_MMA(MmaE4m3, kE4m3)
#undef BATON_MMA
inline uint32_t LoadAcquireSystem(const uint32_t* address) {
  const uint32_t value = __atomic_load_n(address, __ATOMIC_ACQUIRE);
  simt::LookedAtPeer();
  return value;
}
inline void StoreReleaseSystem(uint32_t* address, uint32_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
inline void WaitForPeer(Site site = Site::current()) { simt::YieldToPeer(site); }
inline float FastExp2(float x) { return std::exp2(x); }

}  // namespace baton::ops::gpu

#endif
