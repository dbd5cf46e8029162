#pragma once

// The requests of a simulation: when each comes, how much it brings, how much it wants.

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace baton::cli {

struct TraceRequest {
  double arrival_s = 0;
  uint32_t prompt_tokens = 1;
  uint32_t output_tokens = 1;
  // Requests of a group share the first `prefix_tokens` of their prompts. Empty: nothing is shared.
  std::string prefix_group;
  uint32_t prefix_tokens = 0;
  bool is_session = false;  // the answer belongs to the prefix of the group's next request too
  std::string tenant;
  std::string priority = "normal";  // high, normal, low
};

// JSON Lines: {"arrival": SECONDS, "prompt_tokens": N, "output_tokens": N, "prefix_group": TEXT,
// "prefix_tokens": N, "tenant": TEXT, "priority": TEXT}, of which the first three are needed. With
// a prefix_group and no prefix_tokens the group is a session: each prompt goes on where the group's
// last answer ended. Sorted by arrival in the result.
// Errors: INVALID_ARGUMENT naming the line and the field.
absl::StatusOr<std::vector<TraceRequest>> ReadTrace(std::istream& in);

}  // namespace baton::cli
