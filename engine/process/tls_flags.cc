#include "engine/process/tls_flags.h"

#include "absl/flags/flag.h"
#include "absl/time/time.h"

using baton::process::TlsServerOptions;

ABSL_FLAG(
    std::string,
    tls_cert,
    TlsServerOptions{}.cert,
    "PEM file of this server's certificate chain; empty: plaintext. Files are read again when "
    "they change.");
ABSL_FLAG(std::string, tls_key, TlsServerOptions{}.key, "PEM file of the key of --tls-cert.");
ABSL_FLAG(std::string,
          tls_client_ca,
          TlsServerOptions{}.client_ca,
          "PEM file of CAs: clients must show a certificate that one of them has signed (mTLS).");
ABSL_FLAG(bool,
          allow_plaintext,
          TlsServerOptions{}.allow_plaintext,
          "Listen beyond loopback without TLS, on a network that is trusted.");
ABSL_FLAG(absl::Duration,
          tls_reload_interval,
          TlsServerOptions{}.reload_interval,
          "How often the files of TLS are looked at again.");

namespace baton::process {

TlsOptions TlsOptionsFromFlags() {
  TlsOptions options;
  options.server.cert = absl::GetFlag(FLAGS_tls_cert);
  options.server.key = absl::GetFlag(FLAGS_tls_key);
  options.server.client_ca = absl::GetFlag(FLAGS_tls_client_ca);
  options.server.allow_plaintext = absl::GetFlag(FLAGS_allow_plaintext);
  options.server.reload_interval = absl::GetFlag(FLAGS_tls_reload_interval);
  options.client = TlsClientOptionsFromFlags();
  options.client.reload_interval = options.server.reload_interval;
  if (!options.client.ca.empty() && options.client.cert.empty() && options.client.key.empty()) {
    options.client.cert = options.server.cert;
    options.client.key = options.server.key;
  }
  return options;
}

}  // namespace baton::process
