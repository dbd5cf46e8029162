#include "cli/access_flags.h"

#include <cstdlib>
#include <fstream>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"

#include "engine/base/status_macros.h"
#include "engine/process/tls.h"
#include "engine/process/tls_flags.h"

ABSL_FLAG(std::string,
          token_file,
          "",
          "File with the token to call with, in its first line; empty: the environment's "
          "BATON_TOKEN, if any. For serve: the file of tokens that the router takes.");

namespace baton::cli {
namespace {

absl::StatusOr<std::string> ReadToken() {
  const std::string path = TokenFileFlag();
  if (path.empty()) {
    const char* const token = std::getenv("BATON_TOKEN");
    return std::string(token == nullptr ? "" : token);
  }
  std::ifstream file(path);
  std::string token;
  if (!std::getline(file, token) || token.empty() ||
      token.find_first_of(" \t\r") != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("--token-file: ", path, ": want a line with a token and no blanks"));
  }
  return token;
}

}  // namespace

std::string TokenFileFlag() { return absl::GetFlag(FLAGS_token_file); }

absl::StatusOr<ClientOptions> AccessFromFlags() {
  const process::TlsClientOptions tls = process::TlsClientOptionsFromFlags();
  BATON_RETURN_IF_ERROR(process::CheckTls(tls));
  ClientOptions options;
  options.security = process::MakeChannelSecurity(tls);
  BATON_ASSIGN_OR_RETURN(options.token, ReadToken());
  return options;
}

}  // namespace baton::cli
