#pragma once

// Who computes what of FlashPrefill (flash_prefill.h), and the scale that its queries have.

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "engine/ops/cuda/attention_plan.h"
#include "engine/ops/cuda/flash_prefill.h"

namespace baton::ops::cuda {

// The pieces of the sequences that a step's AttentionPlan leaves to prefill, dealt out to the
// multiprocessors: long ones first, each to who has least to do. Reused from step to step, and for
// the layers of a step planned once. Engine thread only.
class FlashPlan {
 public:
  void Fill(const AttentionPlan& plan, int num_heads, int num_kv_heads, int head_dim, int num_sms);

  // What goes to the device, and what lies where in it once it is there.
  absl::Span<const int32_t> words() const { return words_; }
  FlashWork At(const int32_t* words) const;

 private:
  struct Tile {
    int sequence, index;
    int64_t cost;
  };
  struct Piece {
    Tile tile;
    int head, sm;
  };
  bool IsPlanned(const AttentionPlan& plan, const std::vector<int32_t>& shape);
  void CutTiles(const AttentionPlan& plan, int head_dim);
  void DealOut(int num_heads, int num_kv_heads, int num_sms);
  void Write(const AttentionPlan& plan, int num_sms);

  std::vector<int32_t> planned_, wanted_;  // what the plan is made from
  std::vector<Tile> tiles_;
  std::vector<Piece> pieces_;
  std::vector<std::pair<int64_t, int>> load_;  // a heap: least first
  std::vector<int32_t> next_, words_;
  int num_sms_ = 0;
};

// Queries of e4m3 times this: a power of two, so large that no query of a head that was normed with
// these weights can be beyond the codes. As KvScales for keys (engine/model/kv_scales.h): a normed
// head is at most sqrt(D) long before its weights, and rotation leaves pairs as long as they were
// but for RoPE's attention factor. 0 where the weights promise nothing: without QK-norm, or where
// they are not finite.
float FlashQueryScale(absl::Span<const float> norm_weight, float attention_factor);

}  // namespace baton::ops::cuda
