#pragma once

#include <cstdint>

namespace baton::text {

using TokenId = uint32_t;

inline constexpr TokenId kNoToken = UINT32_MAX;

}  // namespace baton::text
