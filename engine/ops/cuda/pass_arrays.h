#pragma once

// What the host says of a small pass (decode, speculative verify), on the device: all of it in one
// copy, in places that depend on the pass's padded shape alone. So the kernels of two passes of one
// shape are given the same pointers and sizes, and a graph of them serves every pass of that shape.
// Behind it lies which tokens were drawn by a chain and what tokens are drawn by, of passes that
// are not padded too; no graph reads that.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/ops/backend.h"
#include "engine/ops/cuda/device_buffer.h"

namespace baton::ops::cuda {

// Sizes of a pass, rounded up to few different ones.
struct PassShape {
  int tokens = 0, sequences = 0, rows = 0;
  int query_max = 0;   // most queries of a sequence: 1, 2, 4 or 8
  int max_blocks = 0;  // cache blocks of a sequence, as many as the block table has room for

  bool operator==(const PassShape&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const PassShape& s) {
    return H::combine(std::move(h), s.tokens, s.sequences, s.rows, s.query_max, s.max_blocks);
  }
};

// Most tokens of a pass that is padded.
inline constexpr int kPassTokensMax = 512;

// The padded shape of a pass, or none (tokens = 0): a sequence has more than kDecodeQueryMax
// queries, or there are more than kPassTokensMax tokens, or no logits are wanted. `max_tokens`:
// what the activations hold.
PassShape ShapeOfPass(const PassInputs& inputs, int max_tokens);

// Owns the memory. Engine thread only.
class PassArrays {
 public:
  // Room for draws, whatever the pass. Before the first Send. Errors: RESOURCE_EXHAUSTED.
  absl::Status ReserveDraws(const DrawLimits& limits);

  // Sends a pass in the order of `stream`, or with an empty shape what it has drawn and its draws
  // alone, the latter within what was reserved. Padding: token 0 at position 0 without a slot,
  // sequences without queries, row 0. `wait`: until the stream is done with the passes before; else
  // it may still have to read them, and each pass sent since the last one that waited keeps pinned
  // memory of its own. True: the arrays have moved to new memory; what was issued with the old
  // pointers must not be issued again. Errors: RESOURCE_EXHAUSTED; those of the stream.
  absl::StatusOr<bool> Send(const PassInputs& inputs,
                            const PassShape& shape,
                            bool wait,
                            cudaStream_t stream);

  // Of the last pass sent.
  const PassShape& shape() const { return shape_; }
  const int64_t* slots() const { return At<int64_t>(layout_.slots); }            // [tokens]
  int32_t* ids() const { return Mutable<int32_t>(layout_.ids); }                 // [tokens]
  const int32_t* positions() const { return At<int32_t>(layout_.positions); }    // [tokens]
  const int32_t* rows() const { return At<int32_t>(layout_.rows); }              // [rows]
  const int32_t* query_starts() const { return At<int32_t>(layout_.starts); }    // [sequences + 1]
  const int32_t* context_lens() const { return At<int32_t>(layout_.contexts); }  // [sequences]
  const int32_t* sequences() const { return At<int32_t>(layout_.sequences); }    // 0, 1, ...
  const int32_t* block_tables() const {  // [sequences][max_blocks]
    return At<int32_t>(layout_.tables);
  }
  const int32_t* drawn() const { return At<int32_t>(layout_.drawn); }  // [T] of the pass, or none
  const SampleRow* sample_rows() const { return At<SampleRow>(layout_.draws); }  // [draws' rows]
  TokenEdit* edits() const { return Mutable<TokenEdit>(layout_.edits); }         // [draws' edits]

 private:
  // Offsets in bytes.
  struct Layout {
    size_t slots, ids, positions, rows, starts, contexts, sequences, tables, drawn, draws, edits,
        bytes;
  };
  static Layout LayoutOf(const PassInputs& inputs, const PassShape& shape);
  template <typename T>
  const T* At(size_t offset) const {
    return reinterpret_cast<const T*>(device_.as<const uint8_t>() + offset);
  }
  template <typename T>
  T* Mutable(size_t offset) const {
    return reinterpret_cast<T*>(device_.as<uint8_t>() + offset);
  }
  template <typename T>
  T* Staged(size_t offset) const {
    return reinterpret_cast<T*>(staged_[next_].as<uint8_t>() + offset);
  }
  absl::StatusOr<bool> Grow(size_t bytes, cudaStream_t stream);
  // Room for one more pass that the stream may still read when the next one is sent.
  absl::Status GrowStaged(size_t bytes);
  void Stage(const PassInputs& inputs);
  void StageDraws(const Draws& draws);

  PassShape shape_;
  Layout layout_ = {};
  size_t draw_bytes_max_ = 0;
  DeviceBuffer device_;
  std::vector<DeviceBuffer> staged_;  // one for each pass sent since one waited; as large as needed
  size_t next_ = 0;                   // the one that is written now
};

}  // namespace baton::ops::cuda
