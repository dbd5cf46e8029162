#pragma once

// Cuts attention into tasks for the kernels. Any cut gives the same bits.

#include <cstddef>
#include <cstdint>
#include <functional>

#include "engine/ops/backend.h"
#include "engine/ops/cpu/kernel_args.h"
#include "engine/ops/cpu/thread_pool.h"

namespace baton::ops::cpu {

// Below this many multiply-adds (some 20 us of one core) waking a worker costs more than it gains.
inline constexpr int64_t kParallelWork = 1 << 18;

Cache CacheOf(const KvCacheView& view);

struct AttentionRows {
  const float* qkv;
  size_t stride;
  Input out;
};

// Arguments have been checked.
void RunAttention(const PagedAttentionArgs& args,
                  const AttentionRows& rows,
                  const Kernels& kernels,
                  ThreadPool* pool,
                  const std::function<Scratch(int thread)>& scratch_of);

}  // namespace baton::ops::cpu
