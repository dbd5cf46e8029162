#include "cli/common_flags.h"

#include "absl/flags/flag.h"

ABSL_FLAG(std::string, address, "127.0.0.1:50051", "HOST:PORT of the router.");
ABSL_FLAG(absl::Duration, timeout, absl::Minutes(10), "The call's deadline.");

namespace baton::cli {

std::string AddressFlag() { return absl::GetFlag(FLAGS_address); }
absl::Duration TimeoutFlag() { return absl::GetFlag(FLAGS_timeout); }

}  // namespace baton::cli
