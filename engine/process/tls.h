#pragma once

// TLS of our gRPC ports and channels: which files, whether they can work, and credentials that take
// up changed files while they are in use. New files count for new connections; those that are open
// go on.

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "engine/process/channel.h"

namespace grpc {
class ServerCredentials;
}  // namespace grpc

namespace baton::process {

// Of a port. Files are PEM. Without `cert` the port is plaintext.
struct TlsServerOptions {
  std::string cert;       // our certificate, and those between it and the CA's
  std::string key;        // of `cert`, without a passphrase
  std::string client_ca;  // clients must show a certificate that one of these has signed
  // Plaintext beyond loopback is meant: the network is trusted, or something in front does TLS.
  bool allow_plaintext = false;
  absl::Duration reload_interval = absl::Seconds(10);  // how often files are looked at again
};

// Of channels to others. Without `ca` they are plaintext.
struct TlsClientOptions {
  std::string ca;    // one of these must have signed the server's certificate
  std::string cert;  // ours, for servers that ask for one; empty: none
  std::string key;
  std::string server_name;  // whom certificates must name; empty: the host of the address
  absl::Duration reload_interval = absl::Seconds(10);
};

// Of a process that is both.
struct TlsOptions {
  TlsServerOptions server;
  TlsClientOptions client;
};

// True for what cannot be reached from another machine: localhost, 127.0.0.0/8, ::1 (with or
// without brackets). A name that only a resolver knows is not loopback.
bool IsLoopbackHost(absl::string_view host);

// The host of HOST:PORT.
absl::string_view HostOf(absl::string_view address);

// Whether a server may listen on `listen` (HOST:PORT) with these files: a certificate and its key,
// or plaintext where that is loopback or was allowed. A certificate that has expired is only warned
// of: the next files may come any moment. Errors: INVALID_ARGUMENT naming the flag, and the file.
absl::Status CheckTls(const TlsServerOptions& options, absl::string_view listen);
// Errors: INVALID_ARGUMENT likewise.
absl::Status CheckTls(const TlsClientOptions& options);

// "none", "tls" or "mtls".
absl::string_view TlsMode(const TlsServerOptions& options);

// After CheckTls. gRPC shares them with its servers and channels. One ChannelSecurity serves all
// channels of a process: it has a thread that looks at the files.
std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(const TlsServerOptions& options);
ChannelSecurity MakeChannelSecurity(const TlsClientOptions& options);

}  // namespace baton::process
