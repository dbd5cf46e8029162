#pragma once

// A client's request, looked at once, for everyone behind: what is out of range is refused by name,
// what is absent gets its default.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "baton/v1/generation.pb.h"
#include "baton/worker/v1/common.pb.h"

#include "engine/text/model_text_config.h"

namespace baton::router {

inline constexpr int kMaxStops = 16;
inline constexpr size_t kMaxStopBytes = 256;
inline constexpr int kMaxStopTokenIds = 256;
inline constexpr uint32_t kMaxChoices = 16;
inline constexpr uint32_t kMaxLogprobs = 20;
inline constexpr float kMaxLogitBias = 100;
inline constexpr float kMaxPenalty = 2;
inline constexpr size_t kMaxSaltBytes = 1024;
inline constexpr int64_t kMaxPriority = 16;

// Everything that can be said without encoding text.
// Errors: INVALID_ARGUMENT with the field as BadRequest.FieldViolation.
absl::Status CheckRequest(const v1::GenerateRequest& request, uint32_t vocab_size);

// Checks the encoded prompt against the context, and resolves what is absent: the model's own
// defaults, else the API's. `seed` is taken when the request has none. Errors: INVALID_ARGUMENT
// with both numbers.
absl::StatusOr<worker::v1::Sampling> ResolveSampling(const v1::GenerateRequest& request,
                                                     const text::ModelTextConfig& config,
                                                     uint32_t prompt_tokens,
                                                     uint32_t max_model_len,
                                                     uint64_t seed);

// What a request gets that sets nothing.
v1::SamplingParams DefaultSampling(const text::ModelTextConfig& config);

}  // namespace baton::router
