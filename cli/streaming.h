#pragma once

// What `generate` defines and `chat` uses too: common request flags, and streaming an answer to
// standard output.

#include <string>

#include "absl/status/statusor.h"

#include "cli/client.h"
#include "cli/common_flags.h"

namespace baton::cli {

// --show-special, --include-stop, --cache-salt and the sampling flags.
absl::Status FillCommon(v1::GenerateRequest* request);
// Prints the text as it arrives (or, with --json, one object at the end; with --stats, a table
// after it).
absl::StatusOr<Answer> StreamAnswer(Client* client, const v1::GenerateRequest& request);

}  // namespace baton::cli
