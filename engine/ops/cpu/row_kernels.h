#pragma once

// RMS norm of rows; per-head norm, rotation and append to the paged cache.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "engine/base/fp8.h"
#include "engine/ops/cpu/input_kernels.h"
#include "engine/ops/cpu/kernel_args.h"

namespace baton::ops::cpu {

template <typename V>
void RmsNormRows(const NormArgs& args, int begin, int end) {
  for (int t = begin; t < end; ++t) {
    const float* x =
        args.x + static_cast<size_t>(args.row_ids != nullptr ? args.row_ids[t] : t) * args.x_stride;
    const V scale = V::Broadcast(RmsScale(SumOfSquares<V>(x, args.width), args.width, args.eps));
    for (int i = 0; i < args.width; i += 16) {
      const int n = args.width - i < 16 ? args.width - i : 16;
      const V value =
          V::Mul(V::Mul(LoadPartial<V>(x + i, n), scale), LoadPartial<V>(args.weight + i, n));
      StoreInput(args.out, t, i, value, n);
    }
  }
  if (HasCodes(args.out)) QuantizeInput<V>(args.out, nullptr, begin, end);
}

template <typename V>
struct RopeAppend {
  static void Tokens(const RopeArgs& args, int begin, int end) {
    const int n = args.head_dim;
    for (int t = begin; t < end; ++t) {
      const float* rope = args.rope + static_cast<size_t>(args.positions[t]) * n;
      float* x = args.qkv + static_cast<size_t>(t) * args.stride;
      for (int head = 0; head < args.num_heads; ++head, x += n)
        NormRotate(x, args.q_weight, args.eps, rope, n);
      for (int head = 0; head < args.num_kv_heads; ++head, x += n) {
        NormRotate(x, args.k_weight, args.eps, rope, n);
        Append(args.cache, args.slots[t], 0, head, x);
      }
      for (int head = 0; head < args.num_kv_heads; ++head, x += n)
        Append(args.cache, args.slots[t], 1, head, x);
    }
  }

 private:
  static void NormRotate(float* x, const float* weight, float eps, const float* rope, int n) {
    if (weight != nullptr) {
      const V scale = V::Broadcast(RmsScale(SumOfSquares<V>(x, n), n, eps));
      for (int i = 0; i < n; i += 16) {
        const V value =
            V::Mul(V::Mul(LoadPartial<V>(x + i, n - i), scale), LoadPartial<V>(weight + i, n - i));
        StorePartial(x + i, value, n - i);
      }
    }
    const int half = n / 2;
    for (int i = 0; i < half; i += 16) {
      const int left = half - i;
      const V cosine = LoadPartial<V>(rope + i, left), sine = LoadPartial<V>(rope + half + i, left);
      const V lo = LoadPartial<V>(x + i, left), hi = LoadPartial<V>(x + half + i, left);
      StorePartial(x + i, V::Fma(lo, cosine, V::Negate(V::Mul(hi, sine))), left);
      StorePartial(x + half + i, V::Fma(hi, cosine, V::Mul(lo, sine)), left);
    }
  }

  static void Append(const Cache& cache, int64_t slot, int side, int head, const float* x) {
    if (slot < 0) return;
    const int index = static_cast<int>(slot % kBlockTokens);
    uint8_t* block = cache.base + static_cast<size_t>(slot / kBlockTokens) * cache.block_bytes;
    uint8_t* row =
        block + side * cache.side_bytes + head * cache.head_bytes + index * cache.row_bytes;
    const int n = cache.head_dim;
    if (cache.format == Cache::Format::kF32) {
      std::memcpy(row, x, static_cast<size_t>(n) * sizeof(float));
      return;
    }
    if (cache.format == Cache::Format::kBf16) {
      for (int i = 0; i < n; i += 16) {
        uint16_t bits[16];
        V::StoreBf16(bits, LoadPartial<V>(x + i, n - i));
        std::memcpy(row + 2 * i, bits, n - i < 16 ? 2 * static_cast<size_t>(n - i) : sizeof(bits));
      }
      return;
    }
    if (cache.format == Cache::Format::kFp8) {
      StoreFp8Row(x, n, cache.scales[side * cache.num_kv_heads + head], false, row);
      return;
    }
    const DynamicScale scale = ScaleFor(LargestMagnitude<V>(x, n), base::kFp8Max);
    StoreFp8Row(x, n, scale.inverse, true, row);
    uint8_t* scales = block + cache.payload_bytes;
    const size_t index_of_scale =
        (static_cast<size_t>(side) * cache.num_kv_heads + head) * kBlockTokens + index;
    std::memcpy(scales + sizeof(float) * index_of_scale, &scale.scale, sizeof(float));
  }

  // x / factor, or x * factor; a factor of 0 in the second case means zeros.
  static void StoreFp8Row(const float* x, int n, float factor, bool multiply, uint8_t* row) {
    const V f = V::Broadcast(factor);
    for (int i = 0; i < n; i += 16) {
      const V value = LoadPartial<V>(x + i, n - i);
      const V scaled = !multiply ? V::Div(value, f) : factor == 0.0f ? V::Zero() : V::Mul(value, f);
      uint8_t codes[16];
      V::StoreFp8(codes, scaled);
      std::memcpy(row + i, codes, n - i < 16 ? n - i : 16);
    }
  }
};

}  // namespace baton::ops::cpu
