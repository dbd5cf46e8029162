#pragma once

// May two workers exchange KV blocks?

#include "absl/status/status.h"
#include "baton/worker/v1/common.pb.h"
#include "engine/kv/kv_layout.h"

namespace baton::kvtransfer {

// Errors: FAILED_PRECONDITION "fingerprint: field=kv_dtype ours=fp8 peer=bf16" naming the first
// field that forbids a pair. Every field must be equal; tensor parallelism must be 1 on both sides,
// as blocks are not re-sharded yet.
absl::Status CompareFingerprints(const worker::v1::LayoutFingerprint& ours,
                                 const worker::v1::LayoutFingerprint& peer);

// Errors: INVALID_ARGUMENT when a worker's fingerprint does not describe its own pool.
absl::Status CheckFingerprintOfPool(const worker::v1::LayoutFingerprint& fingerprint,
                                    const kv::KvLayout& layout);

}  // namespace baton::kvtransfer
