#pragma once

// Tells whoever started a process with port 0 which ports it got.

#include <string>

#include "absl/status/status.h"

namespace baton::process {

// Writes {"grpc":GRPC,"http":HTTP,"health":HEALTH} to `path`, all at once: a reader sees the whole
// file or none. A port below 0 is null. An empty path does nothing. Errors: what the file system
// says, with the path.
absl::Status WritePortFile(const std::string& path, int grpc, int http, int health);
void RemovePortFile(const std::string& path);

}  // namespace baton::process
