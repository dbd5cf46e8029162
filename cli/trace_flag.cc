// The trace of the commands that read one.

#include "absl/flags/flag.h"

#include "cli/common_flags.h"

ABSL_FLAG(
    std::string,
    trace,
    "",
    "JSON Lines, one request a line: arrival (s), prompt_tokens, output_tokens, and optionally "
    "prefix_group, prefix_tokens, tenant, priority.");

namespace baton::cli {

std::string TraceFlag() { return absl::GetFlag(FLAGS_trace); }

}  // namespace baton::cli
