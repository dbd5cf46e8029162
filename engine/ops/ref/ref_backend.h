#pragma once

#include <memory>

#include "engine/ops/backend.h"

namespace baton::ops {

// Plain loops in the canonical order of sums: the oracle. One thread. Never optimised.
std::unique_ptr<Backend> CreateRefBackend(WeightDtype dtype);

}  // namespace baton::ops
