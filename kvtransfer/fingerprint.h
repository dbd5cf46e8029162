#pragma once

// May two workers exchange KV blocks?

#include "absl/status/status.h"
#include "baton/worker/v1/common.pb.h"
#include "engine/kv/kv_layout.h"

namespace baton::kvtransfer {

// Errors: FAILED_PRECONDITION "fingerprint: field=kv_dtype ours=fp8 peer=bf16" naming the first
// field that forbids a pair. Every field must be equal but tp: each side's is 1 or 2 and divides
// the KV heads, and blocks are re-sharded on their way.
absl::Status CompareFingerprints(const worker::v1::LayoutFingerprint& ours,
                                 const worker::v1::LayoutFingerprint& peer);

// Errors: INVALID_ARGUMENT when a worker's fingerprint does not describe its own pool.
absl::Status CheckFingerprintOfPool(const worker::v1::LayoutFingerprint& fingerprint,
                                    const kv::KvLayout& layout);

}  // namespace baton::kvtransfer
