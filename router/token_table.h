#pragma once

// Bearer tokens: who may call, as which tenant, and how much. No threads, no files, no clock.

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace baton::router {

using TokenDigest = std::array<uint8_t, 32>;  // SHA-256

inline constexpr size_t kMaxTokens = 4096;
inline constexpr size_t kMaxTokenBytes = 1024;
// A shorter secret is a mistake, if not a word.
inline constexpr size_t kMinSecretBytes = 16;

struct TokenSpec {
  std::string name;    // for people; in logs
  std::string tenant;  // whose requests share prefix cache and place in the queue
  TokenDigest digest = {};
  double rate = 0;     // requests a second; 0: any number
  double burst = 0;    // requests at once, at least 1; only with `rate`
  int concurrent = 0;  // answers at a time; 0: any number
  absl::Time expires = absl::InfiniteFuture();
};

TokenDigest DigestOf(absl::string_view secret);
// Takes as long whatever the two have in common.
bool SameDigest(const TokenDigest& a, const TokenDigest& b);

// A token a line: NAME, then sha256:HEX (of the secret) or secret:TEXT, then any of tenant=NAME
// (else the token's name), rate=N, burst=N, concurrent=N, expires=RFC3339. # begins a comment.
// Errors: INVALID_ARGUMENT with the line's number, never with a secret.
absl::StatusOr<std::vector<TokenSpec>> ParseTokens(absl::string_view text);

// What a call costs its token.
enum class CallCost {
  kNothing,  // says what is there
  kRequest,  // counts against `rate`
  kAnswer,   // counts against `rate`, and against `concurrent` until it ends
};

// A bucket of `burst` requests that fills with `rate` a second. Thread-compatible.
class RateBucket {
 public:
  // Zero: a request may pass, and is counted. Else how long until one may; nothing is counted then.
  absl::Duration Take(double rate, double burst, absl::Duration now);

 private:
  double level_ = 0;
  absl::Duration filled_ = -absl::InfiniteDuration();
};

// Thread-compatible.
class TokenTable {
 public:
  // What one token has used; outlives the table while a call holds it, hence shared.
  struct Use {
    RateBucket bucket;
    int answers = 0;
  };
  struct Entry {
    const TokenSpec* token = nullptr;  // until the next Replace
    std::shared_ptr<Use> use;
  };

  // From now on these. A token keeps what one of the same name has used.
  void Replace(std::vector<TokenSpec> tokens);
  size_t size() const { return tokens_.size(); }

  // `authorization` is the header's value, "Bearer SECRET". `wall` is compared with `expires`;
  // `now` is any clock's. For kAnswer the caller takes one from use->answers when the call ends.
  // Errors: UNAUTHENTICATED; RESOURCE_EXHAUSTED with RetryInfo.
  absl::StatusOr<Entry> Enter(absl::string_view authorization,
                              CallCost cost,
                              absl::Time wall,
                              absl::Duration now);

 private:
  absl::StatusOr<const TokenSpec*> Find(absl::string_view authorization, absl::Time wall) const;

  std::vector<TokenSpec> tokens_;
  std::map<std::string, std::shared_ptr<Use>> uses_;  // by name
};

// The salt of prefix caches for a tenant's request: no two tenants have one in common, whatever
// `cache_salt` the client chose.
std::string TenantSalt(absl::string_view tenant, absl::string_view cache_salt);

}  // namespace baton::router
