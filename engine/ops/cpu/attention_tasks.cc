#include "engine/ops/cpu/attention_tasks.h"

#include <algorithm>

namespace baton::ops::cpu {
namespace {

// Pieces of at most kAttentionRows rows (query x head of a group) of one sequence.
int NumPieces(const SequenceView& sequence, int group) {
  return (sequence.query_len * group + kAttentionRows - 1) / kAttentionRows;
}

// Fills in the sequence's part, for piece and kv head number `index` of it: the pieces that see
// most tokens come first.
void SetTask(const SequenceView& sequence, int index, AttentionTask* task) {
  const int num_kv_heads = task->cache.num_kv_heads;
  const int piece = NumPieces(sequence, task->group) - 1 - index / num_kv_heads;
  task->kv_head = index % num_kv_heads;
  task->query_start = sequence.query_start;
  task->query_len = sequence.query_len;
  task->context_len = sequence.context_len;
  task->block_table = sequence.block_table.data();
  task->row_begin = piece * kAttentionRows;
  task->row_end = std::min(sequence.query_len * task->group, task->row_begin + kAttentionRows);
}

}  // namespace

Cache CacheOf(const KvCacheView& view) {
  const kv::KvLayout& layout = *view.layout;
  return {.format = static_cast<Cache::Format>(layout.format),
          .base = view.layer_base,
          .block_bytes = layout.block_bytes(),
          .side_bytes = layout.payload_bytes() / 2,
          .head_bytes = layout.head_bytes(),
          .row_bytes = layout.row_bytes(),
          .payload_bytes = layout.payload_bytes(),
          .num_kv_heads = layout.num_kv_heads,
          .head_dim = layout.head_dim,
          .scales = view.scales.data()};
}

void RunAttention(const PagedAttentionArgs& args,
                  const AttentionRows& rows,
                  const Kernels& kernels,
                  ThreadPool* pool,
                  const std::function<Scratch(int thread)>& scratch_of) {
  AttentionTask common = {.qkv = rows.qkv,
                          .stride = rows.stride,
                          .group = args.num_heads / args.num_kv_heads,
                          .num_heads = args.num_heads,
                          .softmax_scale = args.softmax_scale,
                          .cache = CacheOf(args.cache),
                          .out = rows.out};
  int num_tasks = 0;
  int64_t work = 0;
  for (const SequenceView& sequence : args.sequences) {
    num_tasks += NumPieces(sequence, common.group) * args.num_kv_heads;
    work += int64_t{sequence.query_len} * sequence.context_len * args.num_heads * args.head_dim;
  }
  const int grain = work < kParallelWork ? std::max(1, num_tasks) : 1;
  pool->ParallelFor(num_tasks, grain, [&](int begin, int end, int thread) {
    AttentionTask task = common;
    int first = 0;  // task number of the sequence
    for (const SequenceView& sequence : args.sequences) {
      const int count = NumPieces(sequence, common.group) * args.num_kv_heads;
      for (int i = std::max(begin, first); i < std::min(end, first + count); ++i) {
        SetTask(sequence, i - first, &task);
        kernels.attention(task, scratch_of(thread));
      }
      first += count;
    }
  });
}

}  // namespace baton::ops::cpu
