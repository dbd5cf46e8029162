#pragma once

// Attention over the paged cache. A block of keys (and of values) of one head is turned once per
// task into panels like those of weights (keys: outputs are tokens, k is the head dim; values:
// outputs are dims, k are the 64 tokens), and then the same dots as in GEMM run over the rows of
// the task. The pool keeps the common layout; panels are scratch.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "engine/ops/cpu/gemm_kernels.h"
#include "engine/ops/cpu/input_kernels.h"
#include "engine/ops/cpu/kernel_args.h"

namespace baton::ops::cpu {

// Where things lie in Scratch::attention, for head dims up to kMaxHeadDim.
struct AttentionScratch {
  static constexpr size_t kPanelBytes = size_t{kBlockTokens} * kMaxHeadDim * sizeof(float);
  static constexpr size_t kRowBytes = size_t{kAttentionRows} * kMaxHeadDim * sizeof(float);

  uint8_t keys[kPanelBytes];
  uint8_t values[kPanelBytes];
  float q[kAttentionRows * kMaxHeadDim];
  float out[kAttentionRows * kMaxHeadDim];
  float p[kAttentionRows * kBlockTokens];  // dots, then probabilities as the value dot takes them
  float maximum[kAttentionRows];
  float sum[kAttentionRows];
  float decay[kAttentionRows];
  float key_scales[kBlockTokens];
  float value_scales[kBlockTokens];
  // AMX only: q and p as tiles of 16 rows, bf16, and one block of sums.
  alignas(64) uint8_t q_tiles[kAttentionRows * kMaxHeadDim * 2];
  alignas(64) uint8_t p_tiles[kAttentionRows * kBlockTokens * 2];
  alignas(64) float sums[32 * 32];
};

// One (side, head) of a cache block.
struct BlockSide {
  const uint8_t* rows;
  const float* scales;  // kFp8Dynamic
};

[[gnu::always_inline]] inline BlockSide SideOf(const Cache& cache, int block, int side, int head) {
  const uint8_t* base = cache.base + static_cast<size_t>(block) * cache.block_bytes;
  const size_t scale_index = (static_cast<size_t>(side) * cache.num_kv_heads + head) * kBlockTokens;
  return {base + side * cache.side_bytes + head * cache.head_bytes,
          reinterpret_cast<const float*>(base + cache.payload_bytes) + scale_index};
}

// Scales of the rows of a block; 1 where the format has none or the row is not valid.
[[gnu::always_inline]] inline void LoadScales(
    const Cache& cache, const BlockSide& source, int side, int head, int num_valid, float* out) {
  for (int j = 0; j < kBlockTokens; ++j) {
    out[j] = 1.0f;
    if (cache.format == Cache::Format::kFp8)
      out[j] = cache.scales[side * cache.num_kv_heads + head];
    if (cache.format == Cache::Format::kFp8Dynamic && j < num_valid) out[j] = source.scales[j];
  }
}

// Panels of one block of keys or values, for one cache format.
template <typename V, Cache::Format kFormat>
struct PackBlock {
  static constexpr bool kF32 = kFormat == Cache::Format::kF32;
  static constexpr bool kWide = kFormat == Cache::Format::kBf16;
  static constexpr int kBytes = kF32 ? 4 : kWide ? 2 : 1;  // of an element
  static constexpr int kStep = kF32 ? 16 : 32;             // dims of a step of keys

  // Keys: [2 panels of 32 tokens][steps of dims][2 tiles][16 lines]. Rows behind num_valid are
  // zero.
  static void Keys(const uint8_t* rows, int head_dim, int num_valid, uint8_t* out) {
    const int num_steps = (head_dim + kStep - 1) / kStep;
    for (int tile = 0; tile < kBlockTokens / kTileRows; ++tile) {
      for (int step = 0; step < num_steps; ++step) {
        V lines[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          const int j = tile * 16 + i;
          const uint8_t* row = rows + (static_cast<size_t>(j) * head_dim + step * kStep) * kBytes;
          lines[i] = j < num_valid ? Dwords(row, head_dim - step * kStep) : V::Zero();
        }
        V::Transpose(lines);
        uint8_t* to = out + ((tile / 2 * num_steps + step) * 2 + tile % 2) * size_t{kTileBytes};
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) V::Store(reinterpret_cast<float*>(to + 64 * i), lines[i]);
      }
    }
  }

  // Values: [panels of 32 dims][steps of 32 tokens (f32: 16)][2 tiles][16 lines]. Rows behind
  // num_valid are zero.
  static void Values(const uint8_t* rows, int head_dim, int num_valid, uint8_t* out) {
    constexpr int kTokens = kF32 ? 1 : 2;  // of a line
    const size_t row_bytes = static_cast<size_t>(head_dim) * kBytes;
    for (int d = 0; d < head_dim; d += 16) {
      const uint8_t* column = rows + d * kBytes;
      const int left = head_dim - d;
      for (int j = 0; j < kBlockTokens; j += kTokens) {
        const int line = j / kTokens;
        uint8_t* to = out +
                      ((d / 32 * (4 / kTokens) + line / 16) * 2 + d / 16 % 2) * size_t{kTileBytes} +
                      64 * (line % 16);
        const uint8_t* row = column + j * row_bytes;
        if (j + kTokens <= num_valid && left >= 16) {
          StoreLine(row, row + row_bytes, to);
          continue;
        }
        // The edge: what is not valid is read from zeros.
        uint8_t padded[2][64] = {};
        const size_t bytes = static_cast<size_t>(left < 16 ? left : 16) * kBytes;
        if (j < num_valid) std::memcpy(padded[0], row, bytes);
        if (j + 1 < num_valid && !kF32) std::memcpy(padded[1], row + row_bytes, bytes);
        StoreLine(padded[0], padded[1], to);
      }
    }
  }

  // Is no value of the first num_valid rows infinite or NaN?
  static bool IsFinite(const uint8_t* rows, int head_dim, int num_valid) {
    // Without a branch, so that the compiler vectorises it.
    const int count = num_valid * head_dim;
    uint32_t bad = 0;
    if constexpr (kBytes == 1) {
      for (int i = 0; i < count; ++i) bad |= (rows[i] & 0x7f) == 0x7f ? 1 : 0;
    } else {
      for (int i = 0; i < count; ++i) {
        const uint8_t* p = rows + static_cast<size_t>(i) * kBytes;
        bad |= (p[kBytes - 1] & 0x7f) == 0x7f && (p[kBytes - 2] & 0x80) != 0 ? 1 : 0;
      }
    }
    return bad == 0;
  }

 private:
  // One step of a row as 16 dwords: f32 values, or pairs of bf16. Zeros behind the head.
  [[gnu::always_inline]] static inline V Dwords(const uint8_t* row, int left) {
    uint8_t padded[64];
    if (left < kStep) {
      std::memset(padded, 0, sizeof(padded));
      std::memcpy(padded, row, static_cast<size_t>(left) * kBytes);
      row = padded;
    }
    if constexpr (kBytes == 1) return V::LoadFp8Pairs(row);
    return V::Load(reinterpret_cast<const float*>(row));
  }

  // 16 dims of one row (f32) or of two rows, in pairs.
  [[gnu::always_inline]] static inline void StoreLine(const uint8_t* even,
                                                      const uint8_t* odd,
                                                      uint8_t* to) {
    if constexpr (kF32) {
      V::Store(reinterpret_cast<float*>(to), V::Load(reinterpret_cast<const float*>(even)));
    } else if constexpr (kWide) {
      V::ZipBf16(to, reinterpret_cast<const uint16_t*>(even),
                 reinterpret_cast<const uint16_t*>(odd));
    } else {
      V::ZipFp8(to, even, odd);
    }
  }
};

// Calls f.template operator()<format>().
template <typename F>
[[gnu::always_inline]] inline auto WithFormat(Cache::Format format, F f) {
  switch (format) {
    case Cache::Format::kF32:
      return f.template operator()<Cache::Format::kF32>();
    case Cache::Format::kBf16:
      return f.template operator()<Cache::Format::kBf16>();
    default:  // the two formats of fp8 differ in their scales only
      return f.template operator()<Cache::Format::kFp8>();
  }
}

// The dots of rows with a panel in vector registers. The AMX level has its own.
template <typename V>
struct VectorDots {
  // Called once when q is complete.
  static void Prepare(const AttentionTask& task, AttentionScratch* s, int num_rows) {}
  // Rows [begin, end) of p = q . keys, for all 64 tokens.
  static void Scores(const AttentionTask& task, AttentionScratch* s, int begin, int end) {
    const bool f32 = task.cache.format == Cache::Format::kF32;
    f32 ? ScoresOf<true>(task, s, begin, end) : ScoresOf<false>(task, s, begin, end);
  }
  // Rows [begin, end) of out = out * decay + p . values.
  static void Add(const AttentionTask& task, AttentionScratch* s, int begin, int end) {
    const bool f32 = task.cache.format == Cache::Format::kF32;
    f32 ? AddOf<true>(task, s, begin, end) : AddOf<false>(task, s, begin, end);
  }

 private:
  template <bool kF32>
  static void ScoresOf(const AttentionTask& task, AttentionScratch* s, int begin, int end) {
    const int head_dim = task.cache.head_dim;
    const int num_steps = kF32 ? (head_dim + 15) / 16 : (head_dim + 31) / 32;
    for (int panel = 0; panel < kBlockTokens / kPanelRows; ++panel) {
      const uint8_t* keys = s->keys + panel * static_cast<size_t>(num_steps) * 2 * kTileBytes;
      ForGroups<kF32 ? V::kF32Tokens : V::kGemmTokens>(begin, end, [&]<int kRows>(int row) {
        V sums[2][kRows];
        PanelSums<V, kF32, kRows>(s->q + row * kMaxHeadDim, kMaxHeadDim, keys,
                                  kF32 ? head_dim : num_steps, sums);
        for (int i = 0; i < 2 * kRows; ++i) {
          V::Store(s->p + (row + i % kRows) * kBlockTokens + panel * kPanelRows + i / kRows * 16,
                   sums[i / kRows][i % kRows]);
        }
      });
    }
  }

  template <bool kF32>
  static void AddOf(const AttentionTask& task, AttentionScratch* s, int begin, int end) {
    constexpr size_t kBytes = (kF32 ? 4 : 2) * 2 * size_t{kTileBytes};
    for (int panel = 0; panel * kPanelRows < task.cache.head_dim; ++panel) {
      const uint8_t* values = s->values + panel * kBytes;
      ForGroups<kF32 ? V::kF32Tokens : V::kGemmTokens>(begin, end, [&]<int kRows>(int row) {
        V sums[2][kRows];
        PanelSums<V, kF32, kRows>(s->p + row * kBlockTokens, kBlockTokens, values,
                                  kF32 ? kBlockTokens : 2, sums);
        for (int i = 0; i < 2 * kRows; ++i) {
          const int r = row + i % kRows;
          float* out = s->out + r * kMaxHeadDim + panel * kPanelRows + i / kRows * 16;
          V::Store(out,
                   V::Fma(V::Load(out), V::Broadcast(s->decay[r]), sums[i / kRows][i % kRows]));
        }
      });
    }
  }
};

template <typename V, typename RowDots>
struct Attention {
  static void Run(const AttentionTask& task, const Scratch& scratch) {
    auto* s = reinterpret_cast<AttentionScratch*>(scratch.attention);
    Start(task, s);
    const int first = task.row_begin, last = task.row_end - 1;
    const int num_rows = task.row_end - task.row_begin;
    RowDots::Prepare(task, s, num_rows);
    for (int start = 0; start < Visible(task, last); start += kBlockTokens) {
      // Rows are ordered by query: those before `begin` do not see this block.
      const int query = start - (task.context_len - task.query_len);
      const int begin = query <= 0 ? 0 : query * task.group - first;
      Block(task, s, start, begin < 0 ? 0 : begin, num_rows);
    }
    Finish(task, s, num_rows);
  }

 private:
  // Tokens that a row of the sequence sees.
  static int Visible(const AttentionTask& task, int row) {
    return task.context_len - task.query_len + row / task.group + 1;
  }

  static void Start(const AttentionTask& task, AttentionScratch* s) {
    const int n = task.cache.head_dim;
    for (int row = task.row_begin; row < task.row_end; ++row) {
      const int r = row - task.row_begin;
      const int head = task.kv_head * task.group + row % task.group;
      const float* q = task.qkv +
                       static_cast<size_t>(task.query_start + row / task.group) * task.stride +
                       head * n;
      for (int d = 0; d < (n + 31) / 32 * 32; d += 16) {
        V value = d < n ? LoadPartial<V>(q + d, n - d) : V::Zero();
        if (task.cache.format != Cache::Format::kF32) value = V::RoundBf16(value);
        V::Store(s->q + r * kMaxHeadDim + d, value);
        V::Store(s->out + r * kMaxHeadDim + d, V::Zero());
      }
      s->maximum[r] = -INFINITY;
      s->sum[r] = 0;
    }
  }

  static void Block(const AttentionTask& task, AttentionScratch* s, int start, int begin, int end) {
    const int visible = Visible(task, task.row_end - 1) - start;
    const int num_valid = visible < kBlockTokens ? visible : kBlockTokens;
    const int block = task.block_table[start / kBlockTokens];
    const BlockSide keys = SideOf(task.cache, block, 0, task.kv_head);
    const BlockSide values = SideOf(task.cache, block, 1, task.kv_head);
    LoadScales(task.cache, keys, 0, task.kv_head, num_valid, s->key_scales);
    LoadScales(task.cache, values, 1, task.kv_head, num_valid, s->value_scales);
    WithFormat(task.cache.format, [&]<Cache::Format kFormat>() {
      PackBlock<V, kFormat>::Keys(keys.rows, task.cache.head_dim, num_valid, s->keys);
    });
    RowDots::Scores(task, s, begin, end);
    for (int r = begin; r < end; ++r) Softmax(task, s, r, Valid(task, r, start, num_valid));
    if (Valid(task, begin, start, num_valid) == num_valid ||
        ValuesAreFinite(task, values, num_valid)) {
      AddValues(task, values, num_valid, s, begin, end);
      return;
    }
    // An infinite or NaN value must not reach rows that do not see it, and zero times it would be
    // NaN.
    for (int r = begin; r < end; ++r)
      AddValues(task, values, Valid(task, r, start, num_valid), s, r, r + 1);
  }

  // Tokens of the block at `start` that row r of the task sees.
  static int Valid(const AttentionTask& task, int r, int start, int num_valid) {
    const int left = Visible(task, task.row_begin + r) - start;
    return left < num_valid ? left : num_valid;
  }

  static bool ValuesAreFinite(const AttentionTask& task, const BlockSide& values, int num_valid) {
    return WithFormat(task.cache.format, [&]<Cache::Format kFormat>() {
      return PackBlock<V, kFormat>::IsFinite(values.rows, task.cache.head_dim, num_valid);
    });
  }

  static void AddValues(const AttentionTask& task,
                        const BlockSide& values,
                        int num_valid,
                        AttentionScratch* s,
                        int begin,
                        int end) {
    WithFormat(task.cache.format, [&]<Cache::Format kFormat>() {
      PackBlock<V, kFormat>::Values(values.rows, task.cache.head_dim, num_valid, s->values);
    });
    RowDots::Add(task, s, begin, end);
  }

  // Dots of row r -> probabilities; updates maximum, sum and decay.
  static void Softmax(const AttentionTask& task, AttentionScratch* s, int r, int num_valid) {
    float* p = s->p + r * kBlockTokens;
    const V scale = V::Broadcast(task.softmax_scale);
    V scores[4], probabilities[4], most = V::Broadcast(-INFINITY);
    for (int i = 0; i < 4; ++i) {
      scores[i] = V::Mul(V::Mul(V::Load(p + 16 * i), V::Load(s->key_scales + 16 * i)), scale);
      scores[i] = V::Select(V::FirstLanes(num_valid - 16 * i), scores[i], V::Broadcast(-INFINITY));
      most = V::Select(V::Less(most, scores[i]), scores[i], most);
    }
    const float block_maximum = V::ReduceMax(most);
    const float maximum = s->maximum[r] < block_maximum ? block_maximum : s->maximum[r];
    for (int i = 0; i < 4; ++i) {
      probabilities[i] = Exp(V::Sub(scores[i], V::Broadcast(maximum)));
      probabilities[i] = V::Select(V::FirstLanes(num_valid - 16 * i), probabilities[i], V::Zero());
    }
    const V lanes = V::Add(V::Add(V::Add(probabilities[0], probabilities[1]), probabilities[2]),
                           probabilities[3]);
    s->decay[r] = Exp(F32x1{s->maximum[r] - maximum}).v;
    s->sum[r] = F32x1::Fma({s->sum[r]}, {s->decay[r]}, {SumLanes(lanes)}).v;
    s->maximum[r] = maximum;
    for (int i = 0; i < 4; ++i) {
      V weights = probabilities[i];
      if (task.cache.format == Cache::Format::kFp8Dynamic) {
        weights = V::Mul(weights, V::Load(s->value_scales + 16 * i));
        weights = V::Select(V::FirstLanes(num_valid - 16 * i), weights, V::Zero());
      }
      if (task.cache.format != Cache::Format::kF32) weights = V::RoundBf16(weights);
      V::Store(p + 16 * i, weights);
    }
  }

  static void Finish(const AttentionTask& task, AttentionScratch* s, int num_rows) {
    const int n = task.cache.head_dim;
    for (int r = 0; r < num_rows; ++r) {
      const int row = task.row_begin + r;
      const int head = task.kv_head * task.group + row % task.group;
      const V sum = V::Broadcast(s->sum[r]);
      for (int d = 0; d < n; d += 16) {
        V value = V::Div(V::Load(s->out + r * kMaxHeadDim + d), sum);
        if (task.cache.format == Cache::Format::kFp8)
          value = V::Mul(value, V::Broadcast(s->value_scales[0]));
        StoreInput(task.out, task.query_start + row / task.group, head * n + d, value,
                   n - d < 16 ? n - d : 16);
      }
    }
  }
};

}  // namespace baton::ops::cpu
