#include "engine/process/tls.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <fstream>
#include <utility>
#include <vector>

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"

#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::process {
namespace {

using grpc::experimental::FileWatcherCertificateProvider;

constexpr size_t kMaxPemBytes = size_t{1} << 20;

struct BioFree {
  void operator()(BIO* bio) const { BIO_free(bio); }
};
struct X509Free {
  void operator()(X509* cert) const { X509_free(cert); }
};
struct KeyFree {
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
using Bio = std::unique_ptr<BIO, BioFree>;
using Cert = std::unique_ptr<X509, X509Free>;
using Key = std::unique_ptr<EVP_PKEY, KeyFree>;

absl::Status FileError(absl::string_view flag, const std::string& path, absl::string_view what) {
  ERR_clear_error();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, ": ", path, ": ", what));
}

absl::StatusOr<std::string> ReadPem(absl::string_view flag, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxPemBytes + 1, '\0');
  if (!file) return FileError(flag, path, "cannot be read");
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(std::max<std::streamsize>(file.gcount(), 0)));
  if (text.size() > kMaxPemBytes) return FileError(flag, path, "is above 1 MiB");
  return text;
}

Bio BioOf(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// A key with a passphrase is refused: the library would else ask on the terminal.
int NoPassphrase(char*, int, int, void*) { return 0; }

// The first certificate of a file.
absl::StatusOr<Cert> ReadCert(absl::string_view flag, const std::string& path) {
  BATON_ASSIGN_OR_RETURN(const std::string text, ReadPem(flag, path));
  Cert cert(PEM_read_bio_X509(BioOf(text).get(), nullptr, &NoPassphrase, nullptr));
  if (cert == nullptr) return FileError(flag, path, "holds no PEM certificate");
  if (X509_cmp_current_time(X509_get0_notAfter(cert.get())) < 0)
    BATON_LOG(Warning, "certificate has expired", LogField("file", path));
  return cert;
}

absl::Status CheckPair(absl::string_view cert_flag,
                       const std::string& cert_path,
                       absl::string_view key_flag,
                       const std::string& key_path) {
  if (cert_path.empty() != key_path.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", cert_flag, ", --", key_flag, ": both or neither"));
  }
  if (cert_path.empty()) return absl::OkStatus();
  BATON_ASSIGN_OR_RETURN(const Cert cert, ReadCert(cert_flag, cert_path));
  BATON_ASSIGN_OR_RETURN(const std::string text, ReadPem(key_flag, key_path));
  const Key key(PEM_read_bio_PrivateKey(BioOf(text).get(), nullptr, &NoPassphrase, nullptr));
  if (key == nullptr) return FileError(key_flag, key_path, "holds no PEM key, or it is encrypted");
  if (X509_check_private_key(cert.get(), key.get()) != 1)
    return FileError(key_flag, key_path, absl::StrCat("is not the key of ", cert_path));
  return absl::OkStatus();
}

absl::Status CheckInterval(absl::Duration interval) {
  if (interval >= absl::Seconds(1) && interval <= absl::Hours(24)) return absl::OkStatus();
  return absl::InvalidArgumentError("--tls-reload-interval: want 1s to 24h");
}

// One thread for all channels or servers with these files.
std::shared_ptr<FileWatcherCertificateProvider> Watch(const std::string& key,
                                                      const std::string& cert,
                                                      const std::string& ca,
                                                      absl::Duration interval) {
  return std::make_shared<FileWatcherCertificateProvider>(
      key, cert, ca, static_cast<unsigned>(absl::ToInt64Seconds(interval)));
}

}  // namespace

bool IsLoopbackHost(absl::string_view host) {
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  const std::string text(host);
  in_addr v4;
  if (inet_pton(AF_INET, text.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6;
  if (inet_pton(AF_INET6, text.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
  return host == "localhost";
}

absl::string_view HostOf(absl::string_view address) {
  return address.substr(0, address.rfind(':'));
}

absl::Status CheckTls(const TlsServerOptions& options, absl::string_view listen) {
  BATON_RETURN_IF_ERROR(CheckPair("tls-cert", options.cert, "tls-key", options.key));
  BATON_RETURN_IF_ERROR(CheckInterval(options.reload_interval));
  if (!options.client_ca.empty()) {
    if (options.cert.empty())
      return absl::InvalidArgumentError("--tls-client-ca: needs --tls-cert and --tls-key");
    BATON_RETURN_IF_ERROR(ReadCert("tls-client-ca", options.client_ca).status());
  }
  if (options.cert.empty() && !options.allow_plaintext && !IsLoopbackHost(HostOf(listen))) {
    return absl::InvalidArgumentError(
        absl::StrCat("--listen: ", listen,
                     " can be reached from other machines: give --tls-cert and --tls-key, or "
                     "--allow-plaintext where the network is trusted"));
  }
  return absl::OkStatus();
}

absl::Status CheckTls(const TlsClientOptions& options) {
  BATON_RETURN_IF_ERROR(CheckPair("tls-client-cert", options.cert, "tls-client-key", options.key));
  BATON_RETURN_IF_ERROR(CheckInterval(options.reload_interval));
  if (options.ca.empty()) {
    if (options.cert.empty() && options.server_name.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError("--tls-client-cert, --tls-server-name: need --tls-ca");
  }
  return ReadCert("tls-ca", options.ca).status();
}

absl::string_view TlsMode(const TlsServerOptions& options) {
  return options.cert.empty() ? "none" : options.client_ca.empty() ? "tls" : "mtls";
}

std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(const TlsServerOptions& options) {
  if (options.cert.empty()) return grpc::InsecureServerCredentials();
  grpc::experimental::TlsServerCredentialsOptions tls(
      Watch(options.key, options.cert, options.client_ca, options.reload_interval));
  tls.watch_identity_key_cert_pairs();
  if (!options.client_ca.empty()) {
    tls.watch_root_certs();
    tls.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(tls);
}

ChannelSecurity MakeChannelSecurity(const TlsClientOptions& options) {
  if (options.ca.empty()) return {};
  grpc::experimental::TlsChannelCredentialsOptions tls;
  tls.set_certificate_provider(
      Watch(options.key, options.cert, options.ca, options.reload_interval));
  tls.watch_root_certs();
  if (!options.cert.empty()) tls.watch_identity_key_cert_pairs();
  return {grpc::experimental::TlsCredentials(tls), options.server_name};
}

}  // namespace baton::process
