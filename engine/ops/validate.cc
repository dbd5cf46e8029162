#include "engine/ops/validate.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "engine/ops/quantize.h"

namespace baton::ops {
namespace {

absl::Status Invalid(absl::string_view what, absl::string_view detail) {
  return absl::InvalidArgumentError(absl::StrCat(what, ": ", detail));
}

absl::Status CheckHeads(
    absl::string_view what, int num_tokens, int num_heads, int num_kv_heads, int head_dim) {
  if (num_tokens < 0 || num_heads <= 0 || num_kv_heads <= 0 || num_heads % num_kv_heads != 0 ||
      head_dim <= 0 || head_dim % 2 != 0) {
    return Invalid(what, absl::StrCat("T=", num_tokens, " Hq=", num_heads, " Hkv=", num_kv_heads,
                                      " D=", head_dim));
  }
  return absl::OkStatus();
}

absl::Status CheckCache(absl::string_view what,
                        const KvCacheView& cache,
                        int num_kv_heads,
                        int head_dim) {
  if (cache.layout == nullptr || cache.layer_base == nullptr) return Invalid(what, "no cache");
  BATON_RETURN_IF_ERROR(CheckEqual(what, "cache Hkv", cache.layout->num_kv_heads, num_kv_heads));
  BATON_RETURN_IF_ERROR(CheckEqual(what, "cache D", cache.layout->head_dim, head_dim));
  const int num_scales = cache.layout->format == kv::KvFormat::kFp8 ? 2 * num_kv_heads : 0;
  if (static_cast<int>(cache.scales.size()) < num_scales) {
    return Invalid(what, absl::StrCat("scales=", cache.scales.size(), " want=", num_scales));
  }
  return absl::OkStatus();
}

absl::Status CheckSequence(const SequenceView& sequence, int num_tokens, int num_blocks) {
  const absl::string_view what = "paged attention";
  if (sequence.query_start < 0 || sequence.query_len < 0 ||
      sequence.query_len > sequence.context_len ||
      sequence.query_start > num_tokens - sequence.query_len) {
    return Invalid(
        what, absl::StrCat("query_start=", sequence.query_start, " query_len=", sequence.query_len,
                           " context_len=", sequence.context_len, " T=", num_tokens));
  }
  const int need = kv::BlocksFor(sequence.context_len);
  if (static_cast<int>(sequence.block_table.size()) < need) {
    return Invalid(what, absl::StrCat("block table=", sequence.block_table.size(), " want=", need));
  }
  for (int i = 0; i < need; ++i) {
    BATON_RETURN_IF_ERROR(CheckAtMost(what, "block", sequence.block_table[i], num_blocks - 1));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckEqual(absl::string_view what,
                        absl::string_view name,
                        int64_t value,
                        int64_t expected) {
  if (value == expected) return absl::OkStatus();
  return Invalid(what, absl::StrCat(name, "=", value, " want=", expected));
}

absl::Status CheckAtMost(absl::string_view what,
                         absl::string_view name,
                         int64_t value,
                         int64_t most) {
  if (value >= 0 && value <= most) return absl::OkStatus();
  return Invalid(what, absl::StrCat(name, "=", value, " max=", most));
}

absl::Status CheckPack(const MatrixSource& source, WeightDtype dtype, bool interleave_half) {
  const absl::string_view what = "pack";
  const std::string shape = absl::StrCat("rows=", source.rows, " cols=", source.cols);
  if (source.rows <= 0 || source.cols <= 0 || !source.read_row) return Invalid(what, shape);
  if (interleave_half && source.rows % 2 != 0)
    return Invalid(what, absl::StrCat(shape, ": an odd number of rows has no halves"));
  if (source.first_col < 0 || source.first_col > source.source_cols() - source.cols) {
    return Invalid(what, absl::StrCat(shape, " first_col=", source.first_col,
                                      " whole_cols=", source.whole_cols));
  }
  if (dtype == WeightDtype::kQ4 &&
      (source.cols % kQ4Group != 0 || source.first_col % kQ4Group != 0 ||
       source.source_cols() % kQ4Group != 0)) {
    return Invalid(what, absl::StrCat(shape, ": q4 needs cols in groups of ", kQ4Group));
  }
  // int8 sums are exact in int32 up to here.
  if (dtype == WeightDtype::kInt8 && source.source_cols() > 65536)
    return Invalid(what, absl::StrCat(shape, ": int8 takes cols <= 65536"));
  return absl::OkStatus();
}

absl::Status CheckIds(absl::Span<const int32_t> ids, int rows) {
  for (const int32_t id : ids) BATON_RETURN_IF_ERROR(CheckAtMost("embed", "id", id, rows - 1));
  return absl::OkStatus();
}

absl::Status CheckQkNormRopeAppend(const QkNormRopeAppendArgs& args, int max_tokens, int width) {
  const absl::string_view what = "qk norm rope append";
  BATON_RETURN_IF_ERROR(
      CheckHeads(what, args.num_tokens, args.num_heads, args.num_kv_heads, args.head_dim));
  BATON_RETURN_IF_ERROR(CheckAtMost(what, "T", args.num_tokens, max_tokens));
  BATON_RETURN_IF_ERROR(
      CheckEqual(what, "width", width, (args.num_heads + 2 * args.num_kv_heads) * args.head_dim));
  BATON_RETURN_IF_ERROR(CheckCache(what, args.cache, args.num_kv_heads, args.head_dim));
  if (!args.q_weight.empty())
    BATON_RETURN_IF_ERROR(CheckEqual(what, "q_weight", args.q_weight.size(), args.head_dim));
  if (!args.k_weight.empty())
    BATON_RETURN_IF_ERROR(CheckEqual(what, "k_weight", args.k_weight.size(), args.head_dim));
  BATON_RETURN_IF_ERROR(CheckEqual(what, "positions", args.positions.size(), args.num_tokens));
  BATON_RETURN_IF_ERROR(CheckEqual(what, "slots", args.slots.size(), args.num_tokens));
  const int64_t num_positions = static_cast<int64_t>(args.rope.size()) / args.head_dim;
  for (const int32_t pos : args.positions)
    BATON_RETURN_IF_ERROR(CheckAtMost(what, "position", pos, num_positions - 1));
  const int64_t num_slots = static_cast<int64_t>(args.cache.layout->num_blocks) * kv::kBlockTokens;
  for (const int64_t slot : args.slots) {
    if (slot != -1) BATON_RETURN_IF_ERROR(CheckAtMost(what, "slot", slot, num_slots - 1));
  }
  return absl::OkStatus();
}

absl::Status CheckPagedAttention(const PagedAttentionArgs& args,
                                 int max_tokens,
                                 int qkv_width,
                                 int out_width) {
  const absl::string_view what = "paged attention";
  BATON_RETURN_IF_ERROR(
      CheckHeads(what, args.num_tokens, args.num_heads, args.num_kv_heads, args.head_dim));
  BATON_RETURN_IF_ERROR(CheckAtMost(what, "T", args.num_tokens, max_tokens));
  BATON_RETURN_IF_ERROR(CheckEqual(what, "qkv width", qkv_width,
                                   (args.num_heads + 2 * args.num_kv_heads) * args.head_dim));
  BATON_RETURN_IF_ERROR(CheckEqual(what, "out width", out_width, args.num_heads * args.head_dim));
  BATON_RETURN_IF_ERROR(CheckCache(what, args.cache, args.num_kv_heads, args.head_dim));
  int next = 0;  // sequences lie one behind another and cover the step
  for (const SequenceView& sequence : args.sequences) {
    BATON_RETURN_IF_ERROR(CheckEqual(what, "query_start", sequence.query_start, next));
    BATON_RETURN_IF_ERROR(CheckSequence(sequence, args.num_tokens, args.cache.layout->num_blocks));
    next += sequence.query_len;
  }
  return CheckEqual(what, "queries", next, args.num_tokens);
}

absl::Status CheckDraws(const PassInputs& inputs, const DrawLimits& limits) {
  const Draws& draws = *inputs.draws;
  const auto num_rows = static_cast<int64_t>(draws.rows.size());
  const auto num_edits = static_cast<int64_t>(draws.edits.size());
  BATON_RETURN_IF_ERROR(CheckAtMost("draws", "rows", num_rows, limits.rows));
  BATON_RETURN_IF_ERROR(CheckAtMost("draws", "edits", num_edits, limits.edits));
  BATON_RETURN_IF_ERROR(
      CheckEqual("draws", "rows", num_rows, static_cast<int64_t>(inputs.logit_rows.size())));
  BATON_RETURN_IF_ERROR(
      CheckEqual("draws", "results", static_cast<int64_t>(draws.results.size()), num_rows));
  for (const SampleRow& row : draws.rows) {
    BATON_RETURN_IF_ERROR(CheckAtMost("draws", "first_edit", row.first_edit, num_edits));
    BATON_RETURN_IF_ERROR(
        CheckAtMost("draws", "num_edits", row.num_edits, num_edits - row.first_edit));
    BATON_RETURN_IF_ERROR(
        CheckAtMost("draws", "logprobs", std::max(row.num_logprobs, 0), kMaxLogprobs));
  }
  for (const TokenEdit& edit : draws.edits)
    BATON_RETURN_IF_ERROR(CheckAtMost("draws", "edit", edit.id, draws.num_tokens - 1));
  return absl::OkStatus();
}

absl::Status CheckDrawn(const PassInputs& inputs) {
  if (inputs.drawn.empty()) return absl::OkStatus();
  BATON_RETURN_IF_ERROR(
      CheckEqual("drawn", "T", static_cast<int64_t>(inputs.drawn.size()), inputs.ids.size()));
  const int last = inputs.source == nullptr ? -1 : inputs.source->size() - 1;
  for (const int32_t draw : inputs.drawn) {
    if (draw != -1) BATON_RETURN_IF_ERROR(CheckAtMost("drawn", "draw", draw, last));
  }
  return absl::OkStatus();
}

int SplitK(int cols, WeightDtype dtype) {
  const int step = dtype == WeightDtype::kInt8 ? 64 : 32;
  return (cols / 2 + step - 1) / step * step < cols ? (cols / 2 + step - 1) / step * step : cols;
}

}  // namespace baton::ops
