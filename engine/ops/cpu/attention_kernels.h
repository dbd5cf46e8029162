#pragma once

// Attention over the paged cache. A block of keys (and of values) of one head is turned once per task into panels like those
// of weights (keys: outputs are tokens, k is the head dim; values: outputs are dims, k are the 64 tokens), and then the same
// dots as in GEMM run over the rows of the task. The pool keeps the common layout; panels are scratch.

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
[[gnu::always_inline]] inline void LoadScales(const Cache& cache, const BlockSide& source, int side, int head, int num_valid,
                                              float* out) {
  for (int j = 0; j < kBlockTokens; ++j) {
    out[j] = 1.0f;
    if (cache.format == Cache::Format::kFp8) out[j] = cache.scales[side * cache.num_kv_heads + head];
    if (cache.format == Cache::Format::kFp8Dynamic && j < num_valid) out[j] = source.scales[j];
  }
}

template <typename V>
struct PackBlock {
  // bf16 panels of keys: [2 panels of 32 tokens][steps of 32 dims][2 tiles][16 lines]. Rows behind num_valid are zero.
  static void Keys(const Cache& cache, const BlockSide& source, int num_valid, uint8_t* out) {
    const int num_steps = (cache.head_dim + 31) / 32;
    for (int tile = 0; tile < kBlockTokens / kTileRows; ++tile) {
      for (int step = 0; step < num_steps; ++step) {
        V rows[16];
        for (int i = 0; i < 16; ++i) {
          const int j = tile * 16 + i;
          rows[i] = j < num_valid ? Pairs(cache, source.rows + j * cache.row_bytes, step * 32) : V::Zero();
        }
        V::Transpose(rows);
        uint8_t* to = out + ((tile / 2 * num_steps + step) * 2 + tile % 2) * size_t{kTileBytes};
        for (int i = 0; i < 16; ++i) V::Store(reinterpret_cast<float*>(to + 64 * i), rows[i]);
      }
    }
  }

  // bf16 panels of values: [panels of 32 dims][2 steps of 32 tokens][2 tiles][16 lines].
  // True when a value is infinite or NaN.
  static bool Values(const Cache& cache, const BlockSide& source, int num_valid, uint8_t* out) {
    V largest = V::Zero();
    for (int d = 0; d < cache.head_dim; d += 16) {
      for (int j = 0; j < kBlockTokens; j += 2) {
        const V even = j < num_valid ? Row(cache, source.rows + j * cache.row_bytes, d) : V::Zero();
        const V odd = j + 1 < num_valid ? Row(cache, source.rows + (j + 1) * cache.row_bytes, d) : V::Zero();
        largest = V::MaxMagnitude(V::MaxMagnitude(largest, even), odd);
        V::StorePairs(out + ((d / 32 * 2 + j / 32) * 2 + d / 16 % 2) * size_t{kTileBytes} + 64 * (j % 32 / 2), even, odd);
      }
    }
    return !IsFinite(largest);
  }

  // f32 panels: the same with lines of one k.
  static void KeysF32(const Cache& cache, const BlockSide& source, int num_valid, uint8_t* out) {
    const int num_steps = (cache.head_dim + 15) / 16;
    for (int tile = 0; tile < kBlockTokens / kTileRows; ++tile) {
      for (int step = 0; step < num_steps; ++step) {
        V rows[16];
        for (int i = 0; i < 16; ++i) {
          const int j = tile * 16 + i;
          rows[i] = j < num_valid ? Row(cache, source.rows + j * cache.row_bytes, step * 16) : V::Zero();
        }
        V::Transpose(rows);
        uint8_t* to = out + ((tile / 2 * num_steps + step) * 2 + tile % 2) * size_t{kTileBytes};
        for (int i = 0; i < 16; ++i) V::Store(reinterpret_cast<float*>(to + 64 * i), rows[i]);
      }
    }
  }

  static bool ValuesF32(const Cache& cache, const BlockSide& source, int num_valid, uint8_t* out) {
    V largest = V::Zero();
    for (int d = 0; d < cache.head_dim; d += 16) {
      for (int j = 0; j < kBlockTokens; ++j) {
        const V row = j < num_valid ? Row(cache, source.rows + j * cache.row_bytes, d) : V::Zero();
        largest = V::MaxMagnitude(largest, row);
        V::Store(reinterpret_cast<float*>(out + ((d / 32 * 4 + j / 16) * 2 + d / 16 % 2) * size_t{kTileBytes} + 64 * (j % 16)),
                 row);
      }
    }
    return !IsFinite(largest);
  }

 private:
  // 16 values of a row from dim d; zeros behind the head.
  [[gnu::always_inline]] static inline V Row(const Cache& cache, const uint8_t* row, int d) {
    const int left = cache.head_dim - d;
    if (cache.format == Cache::Format::kF32) return LoadPartial<V>(reinterpret_cast<const float*>(row) + d, left);
    const int bytes = cache.format == Cache::Format::kBf16 ? 2 : 1;
    uint8_t padded[32] = {};
    const uint8_t* from = row + d * bytes;
    if (left < 16) {
      std::memcpy(padded, from, static_cast<size_t>(left) * bytes);
      from = padded;
    }
    return bytes == 2 ? V::LoadBf16(reinterpret_cast<const uint16_t*>(from)) : V::LoadFp8(from);
  }

  // 32 values of a row from dim d, as 16 pairs of bf16.
  [[gnu::always_inline]] static inline V Pairs(const Cache& cache, const uint8_t* row, int d) {
    const int left = cache.head_dim - d;
    const int bytes = cache.format == Cache::Format::kBf16 ? 2 : 1;
    uint8_t padded[64] = {};
    const uint8_t* from = row + d * bytes;
    if (left < 32) {
      std::memcpy(padded, from, static_cast<size_t>(left) * bytes);
      from = padded;
    }
    return bytes == 2 ? V::Load(reinterpret_cast<const float*>(from)) : V::LoadFp8Pairs(from);
  }

  [[gnu::always_inline]] static inline bool IsFinite(V magnitudes) {
    float lanes[16];
    V::Store(lanes, magnitudes);
    for (int i = 0; i < 16; ++i) {
      if (base::FloatBits(lanes[i]) >= 0x7f800000u) return false;
    }
    return true;
  }
};

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
      ForGroups<V::kGemmTokens>(begin, end, [&]<int kRows>(int row) {
        V sums[2][kRows];
        PanelSums<V, kF32, kRows>(s->q + row * kMaxHeadDim, kMaxHeadDim, keys, kF32 ? head_dim : num_steps, sums);
        for (int i = 0; i < 2 * kRows; ++i) {
          V::Store(s->p + (row + i % kRows) * kBlockTokens + panel * kPanelRows + i / kRows * 16, sums[i / kRows][i % kRows]);
        }
      });
    }
  }

  template <bool kF32>
  static void AddOf(const AttentionTask& task, AttentionScratch* s, int begin, int end) {
    constexpr size_t kBytes = (kF32 ? 4 : 2) * 2 * size_t{kTileBytes};
    for (int panel = 0; panel * kPanelRows < task.cache.head_dim; ++panel) {
      const uint8_t* values = s->values + panel * kBytes;
      ForGroups<V::kGemmTokens>(begin, end, [&]<int kRows>(int row) {
        V sums[2][kRows];
        PanelSums<V, kF32, kRows>(s->p + row * kBlockTokens, kBlockTokens, values, kF32 ? kBlockTokens : 2, sums);
        for (int i = 0; i < 2 * kRows; ++i) {
          const int r = row + i % kRows;
          float* out = s->out + r * kMaxHeadDim + panel * kPanelRows + i / kRows * 16;
          V::Store(out, V::Fma(V::Load(out), V::Broadcast(s->decay[r]), sums[i / kRows][i % kRows]));
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
      const float* q = task.qkv + static_cast<size_t>(task.query_start + row / task.group) * task.stride + head * n;
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
    const bool f32 = task.cache.format == Cache::Format::kF32;
    f32 ? PackBlock<V>::KeysF32(task.cache, keys, num_valid, s->keys) : PackBlock<V>::Keys(task.cache, keys, num_valid, s->keys);
    RowDots::Scores(task, s, begin, end);
    for (int r = begin; r < end; ++r) {
      const int left = Visible(task, task.row_begin + r) - start;
      Softmax(task, s, r, left < kBlockTokens ? left : kBlockTokens);
    }
    if (!PackValues(task.cache, values, num_valid, s)) {
      RowDots::Add(task, s, begin, end);
      return;
    }
    // An infinite or NaN value must not reach rows that do not see it, and zero times it would be NaN.
    for (int r = begin; r < end; ++r) {
      const int left = Visible(task, task.row_begin + r) - start;
      PackValues(task.cache, values, left < num_valid ? left : num_valid, s);
      RowDots::Add(task, s, r, r + 1);
    }
  }

  static bool PackValues(const Cache& cache, const BlockSide& values, int num_valid, AttentionScratch* s) {
    if (cache.format == Cache::Format::kF32) return PackBlock<V>::ValuesF32(cache, values, num_valid, s->values);
    return PackBlock<V>::Values(cache, values, num_valid, s->values);
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
    const V lanes = V::Add(V::Add(V::Add(probabilities[0], probabilities[1]), probabilities[2]), probabilities[3]);
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
        if (task.cache.format == Cache::Format::kFp8) value = V::Mul(value, V::Broadcast(s->value_scales[0]));
        StoreInput(task.out, task.query_start + row / task.group, head * n + d, value, n - d < 16 ? n - d : 16);
      }
    }
  }
};

}  // namespace baton::ops::cpu
