#include "absl/flags/flag.h"

#include "engine/process/tls_flags.h"

using baton::process::TlsClientOptions;

ABSL_FLAG(std::string,
          tls_ca,
          TlsClientOptions{}.ca,
          "PEM file of CAs, one of which must have signed the certificates of the servers called "
          "from here; empty: they are called in plaintext.");
ABSL_FLAG(std::string,
          tls_client_cert,
          TlsClientOptions{}.cert,
          "PEM file of the certificate shown to servers that ask for one.");
ABSL_FLAG(std::string,
          tls_client_key,
          TlsClientOptions{}.key,
          "PEM file of the key of --tls-client-cert.");
ABSL_FLAG(std::string,
          tls_server_name,
          TlsClientOptions{}.server_name,
          "Name that the certificates of the servers called must carry; empty: the host called.");

namespace baton::process {

TlsClientOptions TlsClientOptionsFromFlags() {
  TlsClientOptions options;
  options.ca = absl::GetFlag(FLAGS_tls_ca);
  options.cert = absl::GetFlag(FLAGS_tls_client_cert);
  options.key = absl::GetFlag(FLAGS_tls_client_key);
  options.server_name = absl::GetFlag(FLAGS_tls_server_name);
  return options;
}

}  // namespace baton::process
