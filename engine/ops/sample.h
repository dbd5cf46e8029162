#pragma once

// Tokens that a backend draws from logits itself (Backend::RunPass): what it is told and what it
// answers. Plain data, which goes to a device and comes back as it is.

#include <cstdint>

#include "absl/types/span.h"

namespace baton::ops {

// Most alternatives whose log probabilities a row may ask for.
inline constexpr int kMaxLogprobs = 32;

// How the token of one row of logits is drawn: in the order and with the noise of
// engine/runtime/sampler.h.
struct SampleRow {
  float temperature = 1, top_p = 1, min_p = 0;
  int32_t top_k = 0;  // <= 0: off
  uint64_t seed = 0;
  uint32_t choice = 0, position = 0;
  float repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  int32_t num_logprobs = -1;  // -1: none; else alternatives, at most kMaxLogprobs
  int32_t first_edit = 0, num_edits = 0;
};

// One token whose logit is changed before the draw; at most one a row and token.
struct TokenEdit {
  int32_t id = 0;
  int32_t output_count = 0;
  float bias = 0;
  bool has_bias = false, penalised = false, masked = false;  // applied in this order
  float raw = 0;  // the logit the model gave, filled in by who applies the edit
};

enum class SampleStatus : int32_t { kOk, kNotFinite, kAllMasked };
struct SampleResult {
  SampleStatus status;
  int32_t id;
  float logprob;  // of `id`; valid with num_logprobs >= 0
  int32_t num_top;
  int32_t top_ids[kMaxLogprobs];  // most likely first
  float top_logprobs[kMaxLogprobs];
};

// Most rows and edits of a pass. No rows: nothing is drawn.
struct DrawLimits {
  int rows = 0;
  int edits = 0;
};

class DrawChain;

// The token of a draw that gives none, where a later pass reads it.
inline constexpr int32_t kNoTokenDrawn = 0;

// The draws of a pass with R rows of logits.
struct Draws {
  absl::Span<const SampleRow> rows;   // [R]
  absl::Span<const TokenEdit> edits;  // of all rows
  int num_tokens = 0;                 // ids that may be drawn: [0, num_tokens)
  absl::Span<SampleResult> results;   // [R] out
  // The pass is not waited for: it is the next one of this chain, of the same backend, and
  // `results` are there when that has been finished. Null: they are there when the pass returns.
  DrawChain* chain = nullptr;
};

}  // namespace baton::ops
