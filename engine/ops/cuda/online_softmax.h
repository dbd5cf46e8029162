#pragma once

// The online softmax of one warp over the score fragments of mma.m16n8k16: in each lane (g, t) rows
// g and g + 8 of a tile of 16, and of every eight tokens the 2t-th and the next.

#include "engine/ops/cuda/fp8_fragments.h"
#include "engine/ops/cuda/gpu.h"

namespace baton::ops::cuda {

struct RowState {
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f,
                  0.0f};  // this lane's tokens only; the caller adds the four lanes at the end
};

// Adds kEights * 8 tokens, the first of which is token `first`: scores become weights in f16, ready
// to be the A fragments of the product with the values: packed[n][0] of row g, packed[n][1] of row
// g + 8. What was summed so far must be multiplied by `decay`.
//   key_factor(n, e)   what score (n, e) is still to be multiplied by, log2(e) included
//   value_bias(n, e)   kDynamic: log2 of the scale of that token's value row. weight * scale =
//                      2^(score + bias), and the maximum is that of these sums, so that f16 holds
//                      them well however small the scales are.
//   visible            how many tokens each row sees, looked at when `masked`
template <int kEights, bool kDynamic, typename KeyFactor, typename ValueBias>
__device__ __forceinline__ void OnlineSoftmax(float (&scores)[kEights][4],
                                              int first,
                                              const int (&visible)[2],
                                              bool masked,
                                              KeyFactor key_factor,
                                              ValueBias value_bias,
                                              RowState* state,
                                              uint32_t (&packed)[kEights][2],
                                              float (&decay)[2]) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = -INFINITY;
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores[n][2 * half + e];
        score *= key_factor(n, e);
        if (masked && first + 8 * n + 2 * t + e >= visible[half]) score = -INFINITY;
        largest = fmaxf(largest, kDynamic ? score + value_bias(n, e) : score);
      }
    }
    const float maximum = fmaxf(state->maximum[half], SegmentMax<4>(largest));
    const float base = FiniteMaximum(maximum);
    decay[half] = gpu::FastExp2(state->maximum[half] - base);
    state->maximum[half] = maximum;
    float sum = state->sum[half] * decay[half];
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      float weight[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float score = scores[n][2 * half + e];
        weight[e] = gpu::FastExp2((kDynamic ? score + value_bias(n, e) : score) - base);
        sum += kDynamic ? gpu::FastExp2(score - base) : weight[e];
      }
      packed[n][half] = PackHalves(weight[0], weight[1]);
    }
    state->sum[half] = sum;
  }
}

// The bias of a value row's scale. Rows of zeros have a scale of 0; a tiny one serves as well.
__device__ __forceinline__ float ValueBias(float scale) {
  return scale == 0.0f ? -100.0f : log2f(scale);
}

// Multiplies the output of 16 rows by their decay. Once the largest score has been seen nothing
// changes any more, and the warp skips it.
template <int kVectors>
__device__ __forceinline__ void ApplyDecay(const float (&decay)[2], float (&out)[kVectors][4]) {
  const bool changes = !(decay[0] == 1.0f && decay[1] == 1.0f);  // a NaN does
  if (!__any_sync(kAllLanes, changes)) return;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int r = 0; r < 4; ++r) out[j][r] *= decay[r / 2];
  }
}

}  // namespace baton::ops::cuda
