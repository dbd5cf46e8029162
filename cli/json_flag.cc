// Apart from the flags of clients: commands that call nobody print JSON too.

#include "absl/flags/flag.h"

#include "cli/common_flags.h"

ABSL_FLAG(bool, json, false, "Print one JSON object instead of text.");

namespace baton::cli {

bool JsonFlag() { return absl::GetFlag(FLAGS_json); }

}  // namespace baton::cli
