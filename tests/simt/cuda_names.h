#pragma once

// CUDA's names for kernels that a host compiler compiles. Only what our kernels use; the test of
// the wrappers (conformance_test.cc) goes through all of it. Follows the CUDA headers, then
// redefines the few macros that would be in the way.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "tests/simt/msan.h"
#include "tests/simt/simt.h"

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

#define threadIdx (::baton::simt::current_thread->thread_index)
#define blockIdx (::baton::simt::block_index)
#define blockDim (::baton::simt::block_dim)
#define gridDim (::baton::simt::grid_dim)

using SimtSite = baton::simt::Site;

// ---- Barriers and fences ------------------------------------------------------------------------

inline void __syncthreads(SimtSite site = SimtSite::current()) {
  baton::simt::BlockBarrier(false, site);
}
inline int __syncthreads_count(int predicate, SimtSite site = SimtSite::current()) {
  return baton::simt::BlockBarrier(predicate != 0, site).count;
}
inline int __syncthreads_and(int predicate, SimtSite site = SimtSite::current()) {
  return baton::simt::BlockBarrier(predicate != 0, site).all;
}
inline int __syncthreads_or(int predicate, SimtSite site = SimtSite::current()) {
  return baton::simt::BlockBarrier(predicate != 0, site).any;
}
inline void __syncwarp(unsigned mask = baton::simt::kFullWarp,
                       SimtSite site = SimtSite::current()) {
  baton::simt::WarpCollective("__syncwarp", mask, nullptr, nullptr, true, site);
}
inline void __threadfence() { asm volatile("" ::: "memory"); }
inline void __threadfence_block() { asm volatile("" ::: "memory"); }
inline void __threadfence_system() { asm volatile("" ::: "memory"); }
inline void __nanosleep(unsigned, SimtSite site = SimtSite::current()) { baton::simt::Yield(site); }
[[noreturn]] inline void __trap(SimtSite site = SimtSite::current()) {
  baton::simt::Fail(site, "__trap");
}

// ---- Warp exchange ------------------------------------------------------------------------------

namespace baton::simt {

inline int Lane() { return static_cast<int>(current_thread->lane); }

template <typename T>
T ShuffleFrom(unsigned mask, T value, int source, SimtSite site) {
  static_assert(sizeof(T) <= 16 && std::is_trivially_copyable_v<T>);
  Shuffle(mask, &value, sizeof(T), source, site);
  return value;
}

// `source` when it lies in the caller's segment of `width` lanes, else the caller itself.
inline int InSegment(int source, int width) {
  return (source & ~(width - 1)) == (Lane() & ~(width - 1)) ? source : Lane();
}

}  // namespace baton::simt

template <typename T>
inline T __shfl_sync(
    unsigned mask, T value, int source, int width = 32, SimtSite site = SimtSite::current()) {
  const int base = baton::simt::Lane() & ~(width - 1);
  return baton::simt::ShuffleFrom(mask, value, base | (source & (width - 1)), site);
}
template <typename T>
inline T __shfl_up_sync(
    unsigned mask, T value, unsigned delta, int width = 32, SimtSite site = SimtSite::current()) {
  const int source = baton::simt::Lane() - static_cast<int>(delta);
  return baton::simt::ShuffleFrom(mask, value, baton::simt::InSegment(source, width), site);
}
template <typename T>
inline T __shfl_down_sync(
    unsigned mask, T value, unsigned delta, int width = 32, SimtSite site = SimtSite::current()) {
  const int source = baton::simt::Lane() + static_cast<int>(delta);
  return baton::simt::ShuffleFrom(mask, value, baton::simt::InSegment(source, width), site);
}
template <typename T>
inline T __shfl_xor_sync(
    unsigned mask, T value, int bits, int width = 32, SimtSite site = SimtSite::current()) {
  const int source = baton::simt::Lane() ^ bits;
  return baton::simt::ShuffleFrom(mask, value, baton::simt::InSegment(source, width), site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SimtSite site = SimtSite::current()) {
  return baton::simt::Ballot(mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, SimtSite site = SimtSite::current()) {
  return baton::simt::Ballot(mask, predicate != 0, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, SimtSite site = SimtSite::current()) {
  return baton::simt::Ballot(mask, predicate == 0, site) == 0;
}
template <typename T>
inline unsigned __match_any_sync(unsigned mask, T value, SimtSite site = SimtSite::current()) {
  static_assert(std::is_integral_v<T>);
  return baton::simt::MatchAny(mask, static_cast<uint64_t>(value), site);
}

#define BATON_SIMT_REDUCE(name, op)                                              \
  inline unsigned __reduce_##name##_sync(unsigned mask, unsigned value,          \
                                         SimtSite site = SimtSite::current()) {  \
    return baton::simt::ReduceU32(mask, value, baton::simt::ReduceOp::op, site); \
  }                                                                              \
  inline int __reduce_##name##_sync(unsigned mask, int value,                    \
                                    SimtSite site = SimtSite::current()) {       \
    return baton::simt::ReduceS32(mask, value, baton::simt::ReduceOp::op, site); \
  }
BATON_SIMT_REDUCE(add, kAdd)
BATON_SIMT_REDUCE(min, kMin)
BATON_SIMT_REDUCE(max, kMax)
BATON_SIMT_REDUCE(and, kAnd)
BATON_SIMT_REDUCE(or, kOr)
BATON_SIMT_REDUCE(xor, kXor)
#undef BATON_SIMT_REDUCE

// ---- Atomics ------------------------------------------------------------------------------------
// Relaxed on the device; ordering here, because the thread sanitizer does not model __threadfence.

namespace baton::simt {
template <typename T>
using Same = std::type_identity_t<T>;

template <typename T, typename F>
T AtomicUpdate(T* address, F update) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  auto* bits = reinterpret_cast<Bits*>(address);
  Bits old = __atomic_load_n(bits, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(bits, &old,
                                      std::bit_cast<Bits>(update(std::bit_cast<T>(old))), false,
                                      __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
  }
  return std::bit_cast<T>(old);
}
}  // namespace baton::simt

template <typename T>
inline T atomicAdd(T* address, baton::simt::Same<T> value) {
  return baton::simt::AtomicUpdate(address, [=](T old) { return static_cast<T>(old + value); });
}
template <typename T>
inline T atomicMax(T* address, baton::simt::Same<T> value) {
  return baton::simt::AtomicUpdate(address, [=](T old) { return old < value ? value : old; });
}
template <typename T>
inline T atomicMin(T* address, baton::simt::Same<T> value) {
  return baton::simt::AtomicUpdate(address, [=](T old) { return value < old ? value : old; });
}
template <typename T>
inline T atomicOr(T* address, baton::simt::Same<T> value) {
  return baton::simt::AtomicUpdate(address, [=](T old) { return static_cast<T>(old | value); });
}
template <typename T>
inline T atomicExch(T* address, baton::simt::Same<T> value) {
  return baton::simt::AtomicUpdate(address, [=](T) { return value; });
}
template <typename T>
inline T atomicCAS(T* address, baton::simt::Same<T> expected, baton::simt::Same<T> value) {
  return baton::simt::AtomicUpdate(address, [=](T old) { return old == expected ? value : old; });
}

// ---- Loads, bits, arithmetic --------------------------------------------------------------------

template <typename T>
inline T __ldg(const T* address) {
  return *address;
}
template <typename T>
inline T __ldcs(const T* address) {
  return *address;
}
template <typename T>
inline T __ldcg(const T* address) {
  return *address;
}
template <typename T>
inline void __stcs(T* address, T value) {
  *address = value;
}
inline int __popc(unsigned value) { return std::popcount(value); }
inline int __clz(int value) { return std::countl_zero(static_cast<unsigned>(value)); }
inline int __clzll(long long value) {
  return std::countl_zero(static_cast<unsigned long long>(value));
}
inline int __ffs(int value) { return __builtin_ffs(value); }
// Four bytes of the eight in (low, high), chosen by the low nibbles of `select`.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned select) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = select >> (4 * i) & 15;
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (nibble & 7))) & 0xff;
    if ((nibble & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;  // the sign, spread
    result |= byte << (8 * i);
  }
  return result;
}
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
template <typename T>
requires std::is_arithmetic_v<T>
inline T min(T a, T b) { return b < a ? b : a; }
template <typename T>
requires std::is_arithmetic_v<T>
inline T max(T a, T b) { return a < b ? b : a; }

// ---- What gpu.h wraps in inline assembly under nvcc
// -----------------------------------------------

namespace baton::simt {

// Out of line and in the kernel's own translation unit: the sanitizers blame the right thread.
[[gnu::noinline]] inline void ReadRow(const void* address, uint32_t (&row)[4]) {
  const auto* words = static_cast<const uint32_t*>(address);
  for (int i = 0; i < 4; ++i) row[i] = words[i];
}

inline void LdMatrixX4(uint32_t (&out)[4], const void* row, bool transpose, SimtSite site) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) Fail(site, "ldmatrix: a row is misaligned");
  if (!IsShared(row)) Fail(site, "ldmatrix: a row is not in shared memory");
  uint32_t words[4];
  ReadRow(row, words);
  LdMatrix(out, words, row, transpose, site);
}

[[gnu::noinline]] inline void MoveBytes(void* to,
                                        const void* from,
                                        uint32_t bytes,
                                        uint32_t valid) {
  auto* out = static_cast<unsigned char*>(to);
  const auto* in = static_cast<const unsigned char*>(from);
  for (uint32_t i = 0; i < bytes; ++i) out[i] = i < valid ? in[i] : 0;
}

[[gnu::noinline]] inline void Poison(void* to, uint32_t bytes) {
  auto* out = static_cast<unsigned char*>(to);
  for (uint32_t i = 0; i < bytes; ++i) out[i] = 0xff;
  ForgetMemory(to, bytes);
}

inline void AsyncCopy(
    void* shared, const void* global, uint32_t bytes, uint32_t valid, SimtSite site) {
  QueueAsyncCopy(shared, global, bytes, valid, site);
  Poison(shared, bytes);
}

inline void AsyncWait(uint32_t groups_left) {
  AsyncCopyRequest copy;
  while (NextAsyncCopy(groups_left, &copy)) MoveBytes(copy.to, copy.from, copy.bytes, copy.valid);
}

}  // namespace baton::simt
