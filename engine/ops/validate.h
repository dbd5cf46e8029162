#pragma once

// The shape checks that every backend runs before the first write. Each answers INVALID_ARGUMENT
// with the letters of backend.h.

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "engine/ops/backend.h"

namespace baton::ops {

// value == expected, else "<what>: <name>=<value> want=<expected>".
absl::Status CheckEqual(absl::string_view what,
                        absl::string_view name,
                        int64_t value,
                        int64_t expected);
// 0 <= value <= most.
absl::Status CheckAtMost(absl::string_view what,
                         absl::string_view name,
                         int64_t value,
                         int64_t most);

absl::Status CheckPack(const MatrixSource& source, WeightDtype dtype, bool interleave_half);
absl::Status CheckIds(absl::Span<const int32_t> ids, int rows);
// `width`: of the qkv activation.
absl::Status CheckQkNormRopeAppend(const QkNormRopeAppendArgs& args, int max_tokens, int width);
absl::Status CheckPagedAttention(const PagedAttentionArgs& args,
                                 int max_tokens,
                                 int qkv_width,
                                 int out_width);

// One draw and one place for its result for each row of logits, all of it within `limits`; edits of
// tokens that may be drawn.
absl::Status CheckDraws(const PassInputs& inputs, const DrawLimits& limits);
// One entry a token, none of them a draw that the source does not have.
absl::Status CheckDrawn(const PassInputs& inputs);

// Where ProjectAdd cuts K: half of it, rounded up to the dtype's step along k.
int SplitK(int cols, WeightDtype dtype);

}  // namespace baton::ops
