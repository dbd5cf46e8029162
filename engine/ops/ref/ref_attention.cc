#include "engine/ops/ref/ref_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "engine/base/fp8.h"
#include "engine/ops/canonical_math.h"
#include "engine/ops/quantize.h"

namespace baton::ops {
namespace {

using kv::kBlockTokens;
using kv::KvFormat;

float SumOfSquares(const float* x, int n) {
  float lanes[16] = {};
  for (int i = 0; i < n; ++i) lanes[i % 16] = std::fma(x[i], x[i], lanes[i % 16]);
  return ReduceLanes16(lanes);
}

void Norm(float* x, absl::Span<const float> weight, float eps) {
  if (weight.empty()) return;
  const int n = static_cast<int>(weight.size());
  const float scale = RmsScale(SumOfSquares(x, n), n, eps);
  for (int i = 0; i < n; ++i) x[i] = (x[i] * scale) * weight[i];
}

void Rotate(float* x, const float* cosine_sine, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float cosine = cosine_sine[i], sine = cosine_sine[half + i];
    const float lo = x[i], hi = x[half + i];
    x[i] = std::fma(lo, cosine, -(hi * sine));
    x[half + i] = std::fma(hi, cosine, lo * sine);
  }
}

// Row `offset` of (side, head) in the block of `slot`.
void Append(const KvCacheView& cache, int64_t slot, int side, int head, const float* x) {
  if (slot < 0) return;
  const kv::KvLayout& layout = *cache.layout;
  const int row_index = static_cast<int>(slot % kBlockTokens);
  uint8_t* block =
      cache.layer_base + static_cast<size_t>(slot / kBlockTokens) * layout.block_bytes();
  uint8_t* row = block + layout.RowOffset(side, head, row_index);
  const int n = layout.head_dim;
  if (layout.format == KvFormat::kF32) {
    std::memcpy(row, x, n * sizeof(float));
  } else if (layout.format == KvFormat::kBf16) {
    for (int i = 0; i < n; ++i) {
      const uint16_t bits = base::Bf16FromFloat(x[i]);
      std::memcpy(row + 2 * i, &bits, 2);
    }
  } else if (layout.format == KvFormat::kFp8) {
    const float scale = cache.scales[side * layout.num_kv_heads + head];
    for (int i = 0; i < n; ++i) row[i] = base::Fp8FromFloat(x[i] / scale);
  } else {
    uint32_t largest = 0;
    for (int i = 0; i < n; ++i) largest = std::max(largest, MagnitudeBits(x[i]));
    const DynamicScale scale = ScaleFor(largest, base::kFp8Max);
    for (int i = 0; i < n; ++i)
      row[i] = scale.inverse == 0.0f ? 0 : base::Fp8FromFloat(x[i] * scale.inverse);
    std::memcpy(block + layout.ScaleOffset(side, head, row_index), &scale.scale, sizeof(float));
  }
}

// One block of keys or values of one head as f32 [64][D], and one scale per row (1 where the format
// has none).
struct BlockValues {
  std::vector<float> values;
  float scales[kBlockTokens];
};

// Rows from `num_valid` on are zero, whatever the memory holds.
void ReadBlock(
    const KvCacheView& cache, kv::BlockId id, int side, int head, int num_valid, BlockValues* out) {
  const kv::KvLayout& layout = *cache.layout;
  const uint8_t* block = cache.layer_base + static_cast<size_t>(id) * layout.block_bytes();
  const int n = layout.head_dim;
  out->values.assign(static_cast<size_t>(kBlockTokens) * n, 0.0f);
  std::fill(std::begin(out->scales), std::end(out->scales), 1.0f);
  for (int j = 0; j < num_valid; ++j) {
    const uint8_t* row = block + layout.RowOffset(side, head, j);
    float* to = out->values.data() + static_cast<size_t>(j) * n;
    for (int i = 0; i < n; ++i) {
      if (layout.format == KvFormat::kF32) {
        std::memcpy(to + i, row + 4 * i, 4);
      } else if (layout.format == KvFormat::kBf16) {
        uint16_t bits;
        std::memcpy(&bits, row + 2 * i, 2);
        to[i] = base::FloatFromBf16(bits);
      } else {
        to[i] = base::FloatFromFp8(row[i]);
      }
    }
    if (layout.format == KvFormat::kFp8)
      out->scales[j] = cache.scales[side * layout.num_kv_heads + head];
    if (layout.format == KvFormat::kFp8Dynamic) {
      std::memcpy(&out->scales[j], block + layout.ScaleOffset(side, head, j), sizeof(float));
    }
  }
}

// a . b in the dot of the cache's format; element k of b at b[k * stride].
float CacheDot(KvFormat format, const float* a, const float* b, int n, int stride) {
  if (format == KvFormat::kF32) {
    float sum = 0;
    for (int k = 0; k < n; ++k) sum = std::fma(a[k], b[static_cast<size_t>(k) * stride], sum);
    return sum;
  }
  std::vector<uint16_t> bits(n);
  for (int k = 0; k < n; ++k)
    bits[k] = base::Bf16FromFloat(b[static_cast<size_t>(k) * stride]);  // exact
  return DotBf16(a, bits.data(), n);
}

// The online softmax of one (query, head).
struct State {
  float maximum = -INFINITY;
  float sum = 0;
  std::vector<float> out;  // [D]
};

void AddBlock(KvFormat format,
              const float* q,
              float softmax_scale,
              int num_valid,
              const BlockValues& keys,
              const BlockValues& values,
              State* state) {
  const int n = static_cast<int>(state->out.size());
  float scores[kBlockTokens], p[kBlockTokens] = {}, weights[kBlockTokens] = {}, lanes[16];
  float maximum = state->maximum;
  for (int j = 0; j < num_valid; ++j) {
    const float dot = CacheDot(format, q, keys.values.data() + static_cast<size_t>(j) * n, n, 1);
    scores[j] = (dot * keys.scales[j]) * softmax_scale;
    maximum = scores[j] > maximum ? scores[j] : maximum;
  }
  for (int j = 0; j < num_valid; ++j) p[j] = CanonicalExp(scores[j] - maximum);
  for (int i = 0; i < 16; ++i) lanes[i] = ((p[i] + p[i + 16]) + p[i + 32]) + p[i + 48];
  const float decay = CanonicalExp(state->maximum - maximum);
  state->sum = std::fma(state->sum, decay, ReduceLanes16(lanes));
  state->maximum = maximum;
  for (int j = 0; j < num_valid; ++j) {
    weights[j] = format == KvFormat::kFp8Dynamic ? p[j] * values.scales[j] : p[j];
    if (format != KvFormat::kF32) weights[j] = base::RoundToBf16(weights[j]);
  }
  for (int d = 0; d < n; ++d) {
    const float sum = CacheDot(format, weights, values.values.data() + d, kBlockTokens, n);
    state->out[d] = std::fma(state->out[d], decay, sum);
  }
}

void Attend(
    const PagedAttentionArgs& args, const SequenceView& sequence, int query, int head, float* out) {
  const auto& qkv = static_cast<const RefActivation&>(*args.qkv);
  const KvFormat format = args.cache.layout->format;
  const int n = args.head_dim;
  const int kv_head = head / (args.num_heads / args.num_kv_heads);
  const float* source = qkv.row(sequence.query_start + query) + head * n;
  std::vector<float> q(source, source + n);
  if (format != KvFormat::kF32) {
    for (float& value : q) value = base::RoundToBf16(value);
  }
  const int visible = sequence.context_len - sequence.query_len + query + 1;
  State state;
  state.out.assign(n, 0.0f);
  BlockValues keys, values;
  for (int b = 0; b < kv::BlocksFor(visible); ++b) {
    const int num_valid = std::min(kBlockTokens, visible - b * kBlockTokens);
    ReadBlock(args.cache, sequence.block_table[b], 0, kv_head, num_valid, &keys);
    ReadBlock(args.cache, sequence.block_table[b], 1, kv_head, num_valid, &values);
    AddBlock(format, q.data(), args.softmax_scale, num_valid, keys, values, &state);
  }
  const float v_scale =
      format == KvFormat::kFp8 ? args.cache.scales[args.num_kv_heads + kv_head] : 1.0f;
  for (int d = 0; d < n; ++d) out[d] = (state.out[d] / state.sum) * v_scale;
}

}  // namespace

void RefQkNormRopeAppend(const QkNormRopeAppendArgs& args) {
  auto& qkv = static_cast<RefActivation&>(*args.qkv);
  const int n = args.head_dim;
  for (int t = 0; t < args.num_tokens; ++t) {
    const float* rope = args.rope.data() + static_cast<size_t>(args.positions[t]) * n;
    float* x = qkv.row(t);
    for (int head = 0; head < args.num_heads; ++head, x += n) {
      Norm(x, args.q_weight, args.eps);
      Rotate(x, rope, n);
    }
    for (int head = 0; head < args.num_kv_heads; ++head, x += n) {
      Norm(x, args.k_weight, args.eps);
      Rotate(x, rope, n);
      Append(args.cache, args.slots[t], 0, head, x);
    }
    for (int head = 0; head < args.num_kv_heads; ++head, x += n)
      Append(args.cache, args.slots[t], 1, head, x);
  }
}

void RefPagedAttention(const PagedAttentionArgs& args) {
  auto& out = static_cast<RefActivation&>(*args.out);
  for (const SequenceView& sequence : args.sequences) {
    for (int query = 0; query < sequence.query_len; ++query) {
      const int t = sequence.query_start + query;
      for (int head = 0; head < args.num_heads; ++head) {
        Attend(args, sequence, query, head, out.row(t) + head * args.head_dim);
      }
      out.FinishLinearInput(t);
    }
  }
}

}  // namespace baton::ops
