#pragma once

// What names a model, its precision and its tokenizer wherever blocks are named: in the workers'
// prefix caches and in the router's index of them.

#include <string>

#include "baton/worker/v1/common.pb.h"

namespace baton::process {

// Equal for workers that may be paired: all of the fingerprint but tp.
std::string FingerprintKey(const worker::v1::LayoutFingerprint& fingerprint);

}  // namespace baton::process
