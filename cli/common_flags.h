#pragma once

// Flags of every command that calls a router.

#include <string>

#include "absl/time/time.h"

namespace baton::cli {

std::string AddressFlag();
bool JsonFlag();
std::string TraceFlag();
absl::Duration TimeoutFlag();

}  // namespace baton::cli
