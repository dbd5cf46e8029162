#include "engine/runtime/step_inputs.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"

namespace baton::runtime {
namespace {

template <typename... Facts>
absl::Status Invalid(size_t sequence, const Facts&... facts) {
  return absl::InvalidArgumentError(absl::StrCat("step: sequence=", sequence, " ", facts...));
}

absl::Status ValidateTokens(size_t index, const StepSequence& sequence, const StepLimits& limits) {
  if (sequence.tokens.empty()) return Invalid(index, "tokens=0");
  const int64_t end = int64_t{sequence.start} + static_cast<int64_t>(sequence.tokens.size());
  if (sequence.start < 0 || end > limits.max_model_len) {
    return Invalid(index, "start=", sequence.start, " tokens=", sequence.tokens.size(),
                   " max_model_len=", limits.max_model_len);
  }
  for (const uint32_t id : sequence.tokens) {
    if (id >= static_cast<uint32_t>(limits.vocab_size)) {
      return Invalid(index, "token_id=", id, " vocabulary=", limits.vocab_size);
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateBlocks(size_t index, const StepSequence& sequence, const StepLimits& limits) {
  const size_t need = kv::BlocksFor(sequence.start + static_cast<int>(sequence.tokens.size()));
  if (sequence.block_table.size() < need) {
    return Invalid(index, "need_blocks=", need, " block_table=", sequence.block_table.size());
  }
  for (const kv::BlockId block : sequence.block_table.first(need)) {
    if (block < 0 || block >= limits.num_blocks) {
      return Invalid(index, "block_id=", block, " num_blocks=", limits.num_blocks);
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateRows(size_t index, const StepSequence& sequence) {
  int previous = -1;
  for (const int row : sequence.logit_rows) {
    if (row <= previous || row >= static_cast<int>(sequence.tokens.size())) {
      return Invalid(index, "logit_row=", row, " after=", previous,
                     " tokens=", sequence.tokens.size());
    }
    previous = row;
  }
  return absl::OkStatus();
}

// `chain`: that of the sequences before.
absl::Status ValidateDrawn(size_t index,
                           const StepSequence& sequence,
                           const ops::DrawChain** chain) {
  if (sequence.drawn.empty()) return absl::OkStatus();
  if (sequence.drawn.size() != sequence.tokens.size()) {
    return Invalid(index, "drawn=", sequence.drawn.size(), " tokens=", sequence.tokens.size());
  }
  if (sequence.chain == nullptr || (*chain != nullptr && *chain != sequence.chain))
    return Invalid(index, "drawn: not the chain of the step");
  *chain = sequence.chain;
  return absl::OkStatus();
}

}  // namespace

StepInputs::StepInputs(const StepLimits& limits) : limits_(limits) {
  ids_.reserve(limits.max_tokens);
  positions_.reserve(limits.max_tokens);
  slots_.reserve(limits.max_tokens);
  views_.reserve(limits.max_tokens);
  logit_rows_.reserve(limits.max_logit_rows);
  drawn_.reserve(limits.max_tokens);
}

absl::Status StepInputs::Fill(absl::Span<const StepSequence> sequences) {
  BATON_RETURN_IF_ERROR(Validate(sequences));
  ids_.clear();
  positions_.clear();
  slots_.clear();
  views_.clear();
  logit_rows_.clear();
  for (const StepSequence& sequence : sequences) Append(sequence);
  AppendDrawn(sequences);
  return absl::OkStatus();
}

absl::Status StepInputs::Validate(absl::Span<const StepSequence> sequences) const {
  if (sequences.empty()) return absl::InvalidArgumentError("step: sequences=0");
  size_t num_tokens = 0;
  size_t num_rows = 0;
  const ops::DrawChain* chain = nullptr;
  for (size_t i = 0; i < sequences.size(); ++i) {
    BATON_RETURN_IF_ERROR(ValidateTokens(i, sequences[i], limits_));
    BATON_RETURN_IF_ERROR(ValidateBlocks(i, sequences[i], limits_));
    BATON_RETURN_IF_ERROR(ValidateRows(i, sequences[i]));
    BATON_RETURN_IF_ERROR(ValidateDrawn(i, sequences[i], &chain));
    num_tokens += sequences[i].tokens.size();
    num_rows += sequences[i].logit_rows.size();
  }
  if (num_tokens > static_cast<size_t>(limits_.max_tokens)) {
    return absl::InvalidArgumentError(
        absl::StrCat("step: tokens=", num_tokens, " max_step_tokens=", limits_.max_tokens));
  }
  if (num_rows > static_cast<size_t>(limits_.max_logit_rows)) {
    return absl::InvalidArgumentError(
        absl::StrCat("step: logit_rows=", num_rows, " max_logit_rows=", limits_.max_logit_rows));
  }
  return absl::OkStatus();
}

void StepInputs::AppendDrawn(absl::Span<const StepSequence> sequences) {
  drawn_.clear();
  chain_ = nullptr;
  for (const StepSequence& sequence : sequences) {
    if (!sequence.drawn.empty()) chain_ = sequence.chain;
  }
  if (chain_ == nullptr) return;
  for (const StepSequence& sequence : sequences) {
    drawn_.insert(drawn_.end(), sequence.drawn.begin(), sequence.drawn.end());
    if (sequence.drawn.empty()) drawn_.insert(drawn_.end(), sequence.tokens.size(), -1);
  }
}

void StepInputs::Append(const StepSequence& sequence) {
  ops::SequenceView view;
  view.query_start = static_cast<int>(ids_.size());
  view.query_len = static_cast<int>(sequence.tokens.size());
  view.context_len = sequence.start + view.query_len;
  view.block_table = sequence.block_table.first(kv::BlocksFor(view.context_len));
  views_.push_back(view);
  for (const int row : sequence.logit_rows) logit_rows_.push_back(view.query_start + row);
  for (int i = 0; i < view.query_len; ++i) {
    const int position = sequence.start + i;
    ids_.push_back(static_cast<int32_t>(sequence.tokens[i]));
    positions_.push_back(position);
    slots_.push_back(int64_t{view.block_table[position / kv::kBlockTokens]} * kv::kBlockTokens +
                     position % kv::kBlockTokens);
  }
}

}  // namespace baton::runtime
