#pragma once

// One way to configure every process: ABSL_FLAGs, set by the command line, else by the environment,
// else by a YAML file.
//   --kv-dtype=fp8 or --kv-dtype fp8   (dashes and underscores in a name are the same; --flag and
//   --no-flag for booleans) BATON_KV_DTYPE=fp8
//   --config FILE with a line  kv-dtype: fp8

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace baton::base {

struct ParsedFlags {
  bool help = false;     // --help was given
  bool version = false;  // --version was given
};

// Sets the flags that were defined in files whose path contains one of `sources` (all of ours if
// empty). Errors: INVALID_ARGUMENT naming the flag, its bad value and what is accepted; unknown
// flags and keys are errors, and so is any word that belongs to no flag.
absl::StatusOr<ParsedFlags> ParseFlags(int argc,
                                       const char* const* argv,
                                       const std::vector<std::string>& sources);

// The entries of a --config file, keys with underscores, values as text. Errors: INVALID_ARGUMENT
// with the file.
absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ReadConfigFile(
    const std::string& path);

// For --help: every flag with its text and default.
std::string FlagsHelp(absl::string_view usage, const std::vector<std::string>& sources);

// What every main does with its command line: sets the flags or, after --help, --version or an
// error, has printed what there is to say and returns the exit code.
struct FlagsOutcome {
  bool go_on = false;
  int exit_code = 0;
};
FlagsOutcome HandleFlags(int argc,
                         const char* const* argv,
                         absl::string_view usage,
                         const std::vector<std::string>& sources);

}  // namespace baton::base
