#pragma once

// One small kernel for every wrapper of engine/ops/cuda/gpu.h and every CUDA name of
// tests/simt/cuda_names.h. The same file runs on the emulator and, built by nvcc, on a device.

#include <cuda_runtime.h>

#include <cstdint>

namespace baton::simt {

inline constexpr int kShuffleResults = 6;
// out [kShuffleResults][32]: value 100 + lane by __shfl (source 3 lane + 1), up 3, down 5, xor 9,
// xor 2 in segments of 4, __shfl (source lane + 1) in segments of 8.
cudaError_t RunShuffles(int* out);

// out [10][32]: of value (lane * 7) % 5 and predicate lane % 3 == 0: ballot, any, all, match_any,
// reduce add, min, max, and, or, xor; lanes of the odd mask only in row 3.
cudaError_t RunVotes(unsigned* out);

// out [4 * blocks]: count, and, or of predicate thread < 40 in a block of 64, then threads seen
// through a named barrier by the consuming warp.
cudaError_t RunBarriers(int* out, int num_blocks);

enum class MmaKind { kBf16, kF16, kE4m3 };
// d [16][8] f32 = a [16][k] * b [8][k]^T + c [16][8]; a and b as bytes of the type, k = 16 or 32.
cudaError_t RunMma(MmaKind kind, const void* a, const void* b, const float* c, float* d);

// in [32][8] u16, out [2][32][4]: what each lane gets, plain and transposed.
cudaError_t RunLdMatrix(const uint16_t* in, uint32_t* out);

// Copies `count` floats through a ring of three stages; the last `tail` bytes of each 16 are cut.
cudaError_t RunAsyncCopy(const float* in, float* out, int count, uint32_t valid);

// out [5]: add, max, min, or, exchanges that found 0 (compare-and-swap by all threads: 1).
cudaError_t RunAtomics(int* out, float* float_sum, int num_blocks);

// out [count]: the last of each thread's own elements in `bytes` of dynamic shared memory.
cudaError_t RunDynamicShared(int* out, int bytes);

// e4m3 [256] -> halves [256] and f32 -> e4m3 codes; exp2, rsqrt of the inputs.
cudaError_t RunConversions(
    const float* in, int count, uint8_t* codes, float* exp2, float* rsqrt, float* decoded);

}  // namespace baton::simt
