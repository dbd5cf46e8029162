#pragma once

// Bytes and strides of a KV block, and the names of the formats. Book-keeping only: owns no memory.

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace baton::kv {

// Tokens in a block: the unit of sharing, hashing and transfer.
inline constexpr int kBlockTokens = 64;

// Index of a block in a pool; the same id indexes every layer.
using BlockId = int32_t;

enum class KvFormat {
  kFp8,         // e4m3, one power-of-two scale per (layer, K|V, kv head), from the weights alone
  kFp8Dynamic,  // e4m3, one f32 scale per token and head behind the payload
  kBf16,
  kF32,
};

// "fp8", "fp8_dynamic", "bf16", "f32".
absl::string_view KvFormatName(KvFormat format);
// Errors: INVALID_ARGUMENT naming the accepted values. "auto" is not a format: the caller resolves
// it.
absl::StatusOr<KvFormat> ParseKvFormat(absl::string_view name);

// Layout of a worker's pool: the pools of its ranks one behind another, each with an equal share of
// the heads, in order. Of a rank, per layer an array of num_blocks blocks.
//   block   = payload [K|V][kv_head][64][head_dim] in the format's element type, then, in
//   kFp8Dynamic only,
//             scales [K|V][kv_head][64] f32
//   address = layer * num_blocks * (bytes of a rank's block) + block_id * (the same) from the base
//   of the rank's pool
// Head-major, so a slice of heads is two contiguous sub-ranges (K, V) of the payload. Sizes are
// those of all ranks together, offsets lie in one.
struct KvLayout {
  int num_layers = 0;
  int num_kv_heads = 0;  // of the model
  int head_dim = 0;
  int num_blocks = 0;
  KvFormat format = KvFormat::kFp8;
  int tp = 1;  // ranks; num_kv_heads is a multiple of it

  int rank_heads() const { return num_kv_heads / tp; }
  size_t rank_block_bytes() const { return block_bytes() / tp; }
  size_t rank_pool_bytes() const { return pool_bytes() / tp; }
  // The layout of one rank's pool.
  KvLayout OfRank() const {
    KvLayout layout = *this;
    layout.num_kv_heads = rank_heads();
    layout.tp = 1;
    return layout;
  }

  size_t element_bytes() const {
    return format == KvFormat::kF32 ? 4 : format == KvFormat::kBf16 ? 2 : 1;
  }
  size_t row_bytes() const { return static_cast<size_t>(head_dim) * element_bytes(); }
  // One (K|V, head) of a block.
  size_t head_bytes() const { return kBlockTokens * row_bytes(); }
  size_t payload_bytes() const { return 2 * static_cast<size_t>(num_kv_heads) * head_bytes(); }
  size_t scale_bytes() const {
    return format == KvFormat::kFp8Dynamic
               ? 2 * static_cast<size_t>(num_kv_heads) * kBlockTokens * sizeof(float)
               : 0;
  }
  // Of one block in one layer.
  size_t block_bytes() const { return payload_bytes() + scale_bytes(); }
  size_t layer_bytes() const { return block_bytes() * static_cast<size_t>(num_blocks); }
  size_t pool_bytes() const { return layer_bytes() * static_cast<size_t>(num_layers); }
  // Offset of a rank's block from the pool's base.
  size_t BlockOffset(int layer, BlockId block, int rank = 0) const {
    return static_cast<size_t>(rank) * rank_pool_bytes() +
           static_cast<size_t>(layer) * (layer_bytes() / tp) +
           static_cast<size_t>(block) * rank_block_bytes();
  }
  // Offsets inside a rank's block. `side` is 0 for K and 1 for V; `head` counts within the rank.
  size_t RowOffset(int side, int head, int row) const {
    return (static_cast<size_t>(side) * rank_heads() + head) * head_bytes() +
           static_cast<size_t>(row) * row_bytes();
  }
  size_t ScaleOffset(int side, int head, int row) const {
    return payload_bytes() / tp +
           ((static_cast<size_t>(side) * rank_heads() + head) * kBlockTokens + row) * sizeof(float);
  }
};

// Blocks that `tokens` tokens need.
constexpr int BlocksFor(int tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

}  // namespace baton::kv
