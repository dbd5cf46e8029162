#pragma once

// The worker protocol's messages <-> the engine's types, which know no proto.

#include <cstdint>

#include "absl/status/statusor.h"
#include "baton/worker/v1/common.pb.h"
#include "engine/kv/block_pool.h"
#include "engine/runtime/answer.h"
#include "engine/runtime/sampler.h"
#include "engine/runtime/sequence.h"

namespace baton::worker {

// Checked against `limits`.
// Errors: INVALID_ARGUMENT naming the field.
absl::StatusOr<runtime::EngineRequest> RequestFromProto(const v1::RequestSpec& spec,
                                                        const runtime::RequestLimits& limits);

v1::Token TokenToProto(uint32_t choice, uint32_t position, const runtime::SampledToken& token);
// `finish` is not kNone.
v1::ChoiceFinished FinishToProto(uint32_t choice, const runtime::Finish& finish);

}  // namespace baton::worker
