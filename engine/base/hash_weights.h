#pragma once

// Made-up weights: for measurements where no checkpoint is, every number is a hash of its place.
// Host and device make the same bits.

#include <cstdint>

#if defined(__CUDACC__)
#define BATON_HOST_DEVICE __host__ __device__
#else
#define BATON_HOST_DEVICE
#endif

namespace baton::base {

// The largest magnitude of HashWeight with std 1.
inline constexpr float kHashWeightMax = 3.4642f;

// About normal with mean 0: the sum of four uniform numbers. Zeros would be faster to multiply than
// real weights are.
BATON_HOST_DEVICE inline float HashWeight(uint64_t seed, int64_t row, int64_t col, float std) {
  uint64_t x = seed + (static_cast<uint64_t>(row) << 32) + static_cast<uint64_t>(col);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  x ^= x >> 31;
  constexpr int32_t kMean = 4 * 65535 / 2;
  constexpr float kStd = 37837.227f;  // of the sum: sqrt(4 * (65536^2 - 1) / 12)
  const int32_t sum = static_cast<int32_t>(x & 0xffff) + static_cast<int32_t>(x >> 16 & 0xffff) +
                      static_cast<int32_t>(x >> 32 & 0xffff) + static_cast<int32_t>(x >> 48);
  return static_cast<float>(sum - kMean) * (std / kStd);
}

}  // namespace baton::base
