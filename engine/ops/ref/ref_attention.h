#pragma once

// Rotation, append and attention of the ref backend: plain loops in the canonical order.

#include "engine/ops/backend.h"
#include "engine/ops/ref/ref_tensors.h"

namespace baton::ops {

// Arguments have been checked.
void RefQkNormRopeAppend(const QkNormRopeAppendArgs& args);
void RefPagedAttention(const PagedAttentionArgs& args);

}  // namespace baton::ops
