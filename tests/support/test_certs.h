#pragma once

// Certificates made while a test runs: a CA, and leaves that it has signed.

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

namespace baton::test_support {

struct PemPair {
  std::string cert;
  std::string key;
};

// Signs with its own key. Not thread-safe; errors end the test program.
class CertAuthority {
 public:
  explicit CertAuthority(const std::string& name)
      : key_(EVP_EC_gen("P-256"), &EVP_PKEY_free), cert_(X509_new(), &X509_free) {
    Fill(cert_.get(), name, key_.get(), /*days=*/10);
    AddExtension(cert_.get(), NID_basic_constraints, "critical,CA:TRUE");
    X509_sign(cert_.get(), key_.get(), EVP_sha256());
  }

  std::string pem() const { return CertPem(cert_.get()); }

  // `names` as in "DNS:localhost,IP:127.0.0.1". `days` below 0: it has expired.
  PemPair Sign(const std::string& common_name, const std::string& names, int days = 10) const {
    const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(EVP_EC_gen("P-256"),
                                                                  &EVP_PKEY_free);
    const std::unique_ptr<X509, decltype(&X509_free)> cert(X509_new(), &X509_free);
    Fill(cert.get(), common_name, key.get(), days);
    X509_set_issuer_name(cert.get(), X509_get_subject_name(cert_.get()));
    AddExtension(cert.get(), NID_subject_alt_name, names);
    X509_sign(cert.get(), key_.get(), EVP_sha256());
    return {CertPem(cert.get()), KeyPem(key.get())};
  }

 private:
  static void Fill(X509* cert, const std::string& name, EVP_PKEY* key, int days) {
    static long serial = 1;
    X509_set_version(cert, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(cert), ++serial);
    X509_gmtime_adj(X509_getm_notBefore(cert), -20L * 24 * 3600);
    X509_gmtime_adj(X509_getm_notAfter(cert), days * 24L * 3600);
    X509_set_pubkey(cert, key);
    X509_NAME* const subject = X509_get_subject_name(cert);
    X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
    X509_set_issuer_name(cert, subject);
  }
  static void AddExtension(X509* cert, int id, const std::string& value) {
    X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, nullptr, id, value.c_str());
    X509_add_ext(cert, extension, -1);
    X509_EXTENSION_free(extension);
  }
  static std::string Text(BIO* bio) {
    char* data = nullptr;
    const long size = BIO_get_mem_data(bio, &data);
    std::string text(data, static_cast<size_t>(size));
    BIO_free(bio);
    return text;
  }
  static std::string CertPem(X509* cert) {
    BIO* const bio = BIO_new(BIO_s_mem());
    PEM_write_bio_X509(bio, cert);
    return Text(bio);
  }
  static std::string KeyPem(EVP_PKEY* key) {
    BIO* const bio = BIO_new(BIO_s_mem());
    PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr);
    return Text(bio);
  }

  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key_;
  const std::unique_ptr<X509, decltype(&X509_free)> cert_;
};

// A folder of its own, gone with the object.
class CertFolder {
 public:
  CertFolder() {
    std::string path = (std::filesystem::temp_directory_path() / "baton-certs-XXXXXX").string();
    path_ = mkdtemp(path.data());
  }
  ~CertFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  // All at once, as a mounted secret changes; the path.
  std::string Write(const std::string& name, const std::string& text) const {
    const std::string path = path_ + "/" + name;
    std::ofstream(path + ".new") << text;
    std::filesystem::rename(path + ".new", path);
    return path;
  }

 private:
  std::string path_;
};

}  // namespace baton::test_support
