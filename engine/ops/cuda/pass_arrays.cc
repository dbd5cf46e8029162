#include "engine/ops/cuda/pass_arrays.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "engine/base/status_macros.h"
#include "engine/ops/cuda/kernels.h"

namespace baton::ops::cuda {
namespace {

// Padding costs at most half of a pass this small, and a third of a larger one.
constexpr int kSizes[] = {1,  2,  4,  8,   12,  16,  24,  32,
                          48, 64, 96, 128, 192, 256, 384, kPassTokensMax};
constexpr size_t kAlignment = 16;
constexpr size_t kLeastBytes = 64 * 1024;
// Contexts grow; each size of the block table means graphs of its own, so there are few.
constexpr int kLeastBlocks = 4, kBlocksGrowth = 4;

int RoundUp(int value) { return *std::lower_bound(std::begin(kSizes), std::end(kSizes), value); }

size_t Aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int RoundUpBlocks(int blocks) {
  int size = kLeastBlocks;
  while (size < blocks) size *= kBlocksGrowth;
  return size;
}

}  // namespace

PassShape ShapeOfPass(const PassInputs& inputs, int max_tokens) {
  const int tokens = static_cast<int>(inputs.ids.size());
  const size_t most = std::max(inputs.sequences.size(), inputs.logit_rows.size());
  if (tokens == 0 || tokens > std::min(kPassTokensMax, max_tokens) || most > kPassTokensMax ||
      inputs.logit_rows.empty())
    return {};
  PassShape shape;
  int blocks = 0, queries = 0;
  for (const SequenceView& sequence : inputs.sequences) {
    queries = std::max(queries, sequence.query_len);
    blocks = std::max(blocks, kv::BlocksFor(sequence.context_len));
  }
  if (queries == 0 || queries > kDecodeQueryMax) return {};
  shape.tokens = std::min(RoundUp(tokens), max_tokens);
  shape.sequences = RoundUp(static_cast<int>(inputs.sequences.size()));
  shape.rows = RoundUp(static_cast<int>(inputs.logit_rows.size()));
  shape.query_max = queries <= 2 ? queries : queries <= 4 ? 4 : kDecodeQueryMax;
  shape.max_blocks = RoundUpBlocks(blocks);
  return shape;
}

PassArrays::Layout PassArrays::LayoutOf(const PassInputs& inputs, const PassShape& shape) {
  const Draws* draws = inputs.draws;
  Layout layout = {};
  const auto take = [&](size_t count, size_t element) {
    const size_t offset = layout.bytes;
    layout.bytes += Aligned(count * element);
    return offset;
  };
  const size_t sequences = static_cast<size_t>(shape.sequences);
  layout.slots = take(shape.tokens, sizeof(int64_t));
  layout.ids = take(shape.tokens, sizeof(int32_t));
  layout.positions = take(shape.tokens, sizeof(int32_t));
  layout.rows = take(shape.rows, sizeof(int32_t));
  layout.starts = take(sequences + 1, sizeof(int32_t));
  layout.contexts = take(sequences, sizeof(int32_t));
  layout.sequences = take(sequences, sizeof(int32_t));
  layout.tables = take(sequences * shape.max_blocks, sizeof(int32_t));
  layout.drawn = take(inputs.drawn.size(), sizeof(int32_t));
  layout.draws = take(draws == nullptr ? 0 : draws->rows.size(), sizeof(SampleRow));
  layout.edits = take(draws == nullptr ? 0 : draws->edits.size(), sizeof(TokenEdit));
  return layout;
}

absl::Status PassArrays::ReserveDraws(const DrawLimits& limits) {
  draw_bytes_max_ =
      Aligned(limits.rows * sizeof(SampleRow)) + Aligned(limits.edits * sizeof(TokenEdit));
  return Grow(0, nullptr).status();
}

absl::StatusOr<bool> PassArrays::Send(const PassInputs& inputs,
                                      const PassShape& shape,
                                      bool wait,
                                      cudaStream_t stream) {
  // The stream may still be reading what was staged.
  if (wait) BATON_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream), "step arrays"));
  next_ = wait ? 0 : next_ + 1;
  const Layout layout = LayoutOf(inputs, shape);
  BATON_ASSIGN_OR_RETURN(const bool moved, Grow(layout.draws, stream));
  BATON_RETURN_IF_ERROR(GrowStaged(layout.bytes));
  shape_ = shape;
  layout_ = layout;
  if (shape.tokens > 0) Stage(inputs);
  std::copy(inputs.drawn.begin(), inputs.drawn.end(), Staged<int32_t>(layout_.drawn));
  if (inputs.draws != nullptr) StageDraws(*inputs.draws);
  BATON_RETURN_IF_ERROR(CudaStatus(cudaMemcpyAsync(device_.data(), staged_[next_].data(),
                                                   layout.bytes, cudaMemcpyHostToDevice, stream),
                                   "step arrays"));
  return moved;
}

// `bytes`: without draws, for which there is always room behind them.
absl::StatusOr<bool> PassArrays::Grow(size_t bytes, cudaStream_t stream) {
  if (device_.size() > 0 && bytes + draw_bytes_max_ <= device_.size()) return false;
  if (device_.size() > 0)  // passes that were not waited for read it
    BATON_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream), "step arrays"));
  const size_t room = std::max(kLeastBytes, 2 * bytes) + draw_bytes_max_;
  BATON_ASSIGN_OR_RETURN(device_, DeviceBuffer::Allocate(room));
  return true;
}

absl::Status PassArrays::GrowStaged(size_t bytes) {
  if (next_ >= staged_.size()) staged_.resize(next_ + 1);
  if (bytes <= staged_[next_].size()) return absl::OkStatus();
  // (The first one is as large as the device's; passes of a chain are small, and there are many.)
  const size_t room = next_ == 0 ? device_.size() : std::max(kLeastBytes, 2 * bytes);
  BATON_ASSIGN_OR_RETURN(staged_[next_], DeviceBuffer::AllocatePinned(room));
  return absl::OkStatus();
}

void PassArrays::Stage(const PassInputs& inputs) {
  const auto pad = [&](auto* to, const auto& from, int size, int value) {
    auto* end = std::copy(from.begin(), from.end(), to);
    std::fill(end, to + size, value);
  };
  pad(Staged<int64_t>(layout_.slots), inputs.slots, shape_.tokens, -1);
  pad(Staged<int32_t>(layout_.ids), inputs.ids, shape_.tokens, 0);
  pad(Staged<int32_t>(layout_.positions), inputs.positions, shape_.tokens, 0);
  pad(Staged<int32_t>(layout_.rows), inputs.logit_rows, shape_.rows, 0);
  int32_t* starts = Staged<int32_t>(layout_.starts);
  int32_t* contexts = Staged<int32_t>(layout_.contexts);
  int32_t* tables = Staged<int32_t>(layout_.tables);
  std::fill_n(starts, shape_.sequences + 1, static_cast<int32_t>(inputs.ids.size()));
  std::fill_n(contexts, shape_.sequences, 0);
  std::fill_n(tables, static_cast<size_t>(shape_.sequences) * shape_.max_blocks, 0);
  for (const SequenceView& sequence : inputs.sequences) {
    *starts++ = sequence.query_start;
    *contexts++ = sequence.context_len;
    std::copy_n(sequence.block_table.begin(), kv::BlocksFor(sequence.context_len), tables);
    tables += shape_.max_blocks;
  }
  int32_t* indices = Staged<int32_t>(layout_.sequences);
  std::iota(indices, indices + shape_.sequences, 0);
}

void PassArrays::StageDraws(const Draws& draws) {
  std::copy(draws.rows.begin(), draws.rows.end(), Staged<SampleRow>(layout_.draws));
  std::copy(draws.edits.begin(), draws.edits.end(), Staged<TokenEdit>(layout_.edits));
}

}  // namespace baton::ops::cuda
