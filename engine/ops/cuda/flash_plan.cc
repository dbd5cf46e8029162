#include "engine/ops/cuda/flash_plan.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "engine/kv/kv_layout.h"

namespace baton::ops::cuda {
namespace {

// What a piece takes beside its tiles of keys, in tiles: fetching queries, writing rows.
constexpr int kPieceCost = 1;
// The arrays of FlashWork with an entry for each piece.
constexpr int kArrays = 7;
constexpr float kE4m3Max = 448.0f;

}  // namespace

bool FlashPlan::IsPlanned(const AttentionPlan& plan, const std::vector<int32_t>& shape) {
  wanted_.assign(shape.begin(), shape.end());
  for (const std::vector<int32_t>* part : {&plan.others, &plan.query_starts, &plan.context_lens}) {
    wanted_.push_back(static_cast<int32_t>(part->size()));
    wanted_.insert(wanted_.end(), part->begin(), part->end());
  }
  const bool planned = wanted_ == planned_;
  std::swap(wanted_, planned_);
  return planned;
}

void FlashPlan::Fill(
    const AttentionPlan& plan, int num_heads, int num_kv_heads, int head_dim, int num_sms) {
  if (IsPlanned(plan, {num_heads, num_kv_heads, head_dim, num_sms, plan.max_blocks})) return;
  num_sms_ = num_sms;
  CutTiles(plan, head_dim);
  DealOut(num_heads, num_kv_heads, num_sms);
  Write(plan, num_sms);
}

void FlashPlan::CutTiles(const AttentionPlan& plan, int head_dim) {
  const int queries = FlashQueries(head_dim);
  tiles_.clear();
  for (const int sequence : plan.others) {
    const int query_len = plan.query_starts[sequence + 1] - plan.query_starts[sequence];
    const int cached = plan.context_lens[sequence] - query_len;
    for (int first = 0; first < query_len; first += queries) {
      const int visible = cached + std::min(first + queries, query_len);
      tiles_.push_back(
          {sequence, first / queries, kPieceCost + (visible + kFlashKeys - 1) / kFlashKeys});
    }
  }
  std::stable_sort(tiles_.begin(), tiles_.end(),
                   [](const Tile& a, const Tile& b) { return a.cost > b.cost; });
}

// One KV head after the other, so that those who run at the same time read the same keys; within a
// tile, the heads that share them.
void FlashPlan::DealOut(int num_heads, int num_kv_heads, int num_sms) {
  const int heads_per_kv = num_heads / num_kv_heads;
  load_.clear();
  for (int sm = 0; sm < num_sms; ++sm) load_.emplace_back(0, sm);  // equal: a heap as it is
  pieces_.clear();
  for (int kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
    for (const Tile& tile : tiles_) {
      for (int i = 0; i < heads_per_kv; ++i) {
        std::pop_heap(load_.begin(), load_.end(), std::greater<>());
        pieces_.push_back({tile, kv_head * heads_per_kv + i, load_.back().second});
        load_.back().first += tile.cost;
        std::push_heap(load_.begin(), load_.end(), std::greater<>());
      }
    }
  }
}

void FlashPlan::Write(const AttentionPlan& plan, int num_sms) {
  const size_t count = pieces_.size();
  words_.assign(kArrays * count + num_sms + 1, 0);
  int32_t* starts = &words_[kArrays * count];
  for (const Piece& piece : pieces_) ++starts[piece.sm + 1];
  for (int sm = 0; sm < num_sms; ++sm) starts[sm + 1] += starts[sm];
  next_.assign(starts, starts + num_sms);
  for (const Piece& piece : pieces_) {
    const int sequence = piece.tile.sequence;
    const int32_t values[kArrays] = {piece.tile.index,
                                     piece.head,
                                     plan.query_starts[sequence],
                                     plan.query_starts[sequence + 1] - plan.query_starts[sequence],
                                     plan.context_lens[sequence],
                                     sequence * plan.max_blocks,
                                     sequence};
    const int32_t at = next_[piece.sm]++;
    for (size_t array = 0; array < kArrays; ++array) words_[array * count + at] = values[array];
  }
}

FlashWork FlashPlan::At(const int32_t* words) const {
  const size_t count = pieces_.size();
  const auto array = [&](size_t index) { return words + index * count; };
  return {.tiles = array(0),
          .heads = array(1),
          .query_starts = array(2),
          .query_lens = array(3),
          .context_lens = array(4),
          .table_starts = array(5),
          .sequences = array(6),
          .starts = array(kArrays),
          .num_sms = num_sms_};
}

float FlashQueryScale(absl::Span<const float> norm_weight, float attention_factor) {
  float largest = 0;
  for (const float weight : norm_weight) {
    if (!std::isfinite(weight)) return 0;
    largest = std::max(largest, std::fabs(weight));
  }
  const double bound =
      std::sqrt(static_cast<double>(norm_weight.size())) * largest * attention_factor;
  if (!(bound > 0) || !std::isfinite(bound)) return 0;
  int exponent = 0;
  const double fraction = std::frexp(bound / kE4m3Max, &exponent);
  return static_cast<float>(std::ldexp(1.0, fraction == 0.5 ? exponent - 1 : exponent));
}

bool FlashPrefillTakes(const FlashPrefillParams& params) {
  const CacheLayer& cache = params.cache;
  const auto aligned = [](const void* pointer) {
    return pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  };
  return params.num_tokens > 0 && params.num_heads > 0 && cache.num_kv_heads > 0 &&
         params.num_heads % cache.num_kv_heads == 0 &&
         (cache.head_dim == 64 || cache.head_dim == 128) && cache.format == CacheFormat::kFp8 &&
         cache.block_bytes % 16 == 0 && cache.scales != nullptr && aligned(cache.base) &&
         aligned(params.q) && aligned(params.out) && params.q_scale > 0 &&
         params.block_tables != nullptr && params.work.starts != nullptr && params.work.num_sms > 0;
}

}  // namespace baton::ops::cuda
