#pragma once

// How every command that calls a router gets in: TLS and a bearer token.

#include <string>

#include "absl/status/statusor.h"

#include "cli/client.h"

namespace baton::cli {

// The source names of these flags, for HandleFlags.
inline constexpr char kAccessFlags[] = "cli/access_flags";
inline constexpr char kTlsClientFlags[] = "engine/process/tls_client_flags";

// From --tls-ca and its like, and --token-file or BATON_TOKEN.
// Errors: INVALID_ARGUMENT naming the flag and the file.
absl::StatusOr<ClientOptions> AccessFromFlags();

// --token-file as it stands: for `serve` it is the router's list of tokens.
std::string TokenFileFlag();

}  // namespace baton::cli
