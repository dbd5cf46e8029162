#include "engine/runtime/token_edits.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::runtime {
namespace {

absl::Status CheckBiases(const SamplingParams& params, int num_tokens) {
  for (const auto& [id, bias] : params.logit_bias) {
    if (id >= static_cast<uint32_t>(num_tokens)) {
      return absl::InvalidArgumentError(
          absl::StrCat("logit_bias: token_id=", id, " vocabulary=", num_tokens));
    }
  }
  return absl::OkStatus();
}

bool IdBefore(const ops::TokenEdit& a, const ops::TokenEdit& b) { return a.id < b.id; }

// Edits of one token become one.
void MergeById(size_t first, std::vector<ops::TokenEdit>* edits) {
  const auto begin = edits->begin() + static_cast<ptrdiff_t>(first);
  std::sort(begin, edits->end(), IdBefore);
  auto to = begin;
  for (auto from = begin; from != edits->end(); ++from) {
    if (to != begin && std::prev(to)->id == from->id) {
      ops::TokenEdit& same = *std::prev(to);
      same.bias += from->bias;
      same.has_bias = same.has_bias || from->has_bias;
      same.masked = same.masked || from->masked;
    } else {
      *to++ = *from;
    }
  }
  edits->erase(to, edits->end());
}

}  // namespace

bool HasPenalties(const SamplingParams& params) {
  return params.repetition_penalty != 1 || params.presence_penalty != 0 ||
         params.frequency_penalty != 0;
}

void TokenCounts::AddPrompt(absl::Span<const uint32_t> ids) {
  for (const uint32_t id : ids) counts_[id].in_prompt = true;
}

void TokenCounts::AddOutput(uint32_t id) { ++counts_[id].output; }

void TokenCounts::RemoveOutput(uint32_t id) {
  const auto found = counts_.find(id);
  BATON_CHECK(found != counts_.end() && found->second.output > 0, "id=", id);
  if (--found->second.output == 0 && !found->second.in_prompt) counts_.erase(found);
}

// Biased and masked tokens are few and in order; counted ones may be thousands, and each is looked
// up among those few only.
absl::Status AppendTokenEdits(const SamplingParams& params,
                              uint32_t output_tokens,
                              const TokenCounts& counts,
                              int num_tokens,
                              std::vector<ops::TokenEdit>* edits) {
  BATON_RETURN_IF_ERROR(CheckBiases(params, num_tokens));
  const auto ids_end = static_cast<uint32_t>(num_tokens);
  const size_t first = edits->size();
  for (const auto& [id, bias] : params.logit_bias)
    edits->push_back({.id = static_cast<int32_t>(id), .bias = bias, .has_bias = true});
  if (output_tokens < params.min_tokens) {
    for (const uint32_t id : params.stop_token_ids) {
      if (id < ids_end) edits->push_back({.id = static_cast<int32_t>(id), .masked = true});
    }
  }
  MergeById(first, edits);
  if (!HasPenalties(params)) return absl::OkStatus();
  const size_t num_special = edits->size() - first;
  for (const auto& [id, count] : counts.counts()) {
    if (id >= ids_end) continue;  // a prompt may hold ids that are never drawn
    ops::TokenEdit edit{.id = static_cast<int32_t>(id)};
    edit.output_count = count.output;
    edit.penalised = true;
    const auto begin = edits->begin() + static_cast<ptrdiff_t>(first);
    const auto end = begin + static_cast<ptrdiff_t>(num_special);
    const auto same = std::lower_bound(begin, end, edit, IdBefore);
    if (same != end && same->id == edit.id) {
      same->output_count = edit.output_count;
      same->penalised = true;
    } else {
      edits->push_back(edit);
    }
  }
  return absl::OkStatus();
}

}  // namespace baton::runtime
