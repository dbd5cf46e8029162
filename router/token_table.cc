#include "router/token_table.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/process/grpc_status.h"

namespace baton::router {
namespace {

constexpr size_t kMaxNameBytes = 64;
constexpr double kMaxRate = 1e6;
// Of a request: what sums of fractions may be off by.
constexpr double kRounding = 1e-6;
// An answer may end any moment.
constexpr absl::Duration kConcurrentRetry = absl::Seconds(1);

bool IsName(absl::string_view text) {
  return !text.empty() && text.size() <= kMaxNameBytes &&
         std::all_of(text.begin(), text.end(), [](char c) {
           return absl::ascii_isalnum(c) || c == '-' || c == '_' || c == '.' || c == '@';
         });
}

absl::Status ParseSecret(absl::string_view word, TokenSpec* token) {
  if (absl::ConsumePrefix(&word, "sha256:")) {
    const bool is_hex = word.size() == 2 * token->digest.size() &&
                        std::all_of(word.begin(), word.end(), absl::ascii_isxdigit);
    if (!is_hex) return absl::InvalidArgumentError("sha256: want 64 hex digits");
    const std::string bytes = absl::HexStringToBytes(word);
    std::copy(bytes.begin(), bytes.end(), token->digest.begin());
    return absl::OkStatus();
  }
  if (!absl::ConsumePrefix(&word, "secret:"))
    return absl::InvalidArgumentError("want sha256:HEX or secret:TEXT after the name");
  if (word.size() < kMinSecretBytes || word.size() > kMaxTokenBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("secret: want ", kMinSecretBytes, " to ", kMaxTokenBytes, " bytes"));
  }
  token->digest = DigestOf(word);
  return absl::OkStatus();
}

absl::Status ParsePositive(absl::string_view key, absl::string_view value, double* out) {
  if (absl::SimpleAtod(value, out) && *out > 0 && *out <= kMaxRate) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(key, ": want a number above 0, at most 1e6"));
}

absl::Status ParseSetting(absl::string_view word, TokenSpec* token) {
  const std::pair<absl::string_view, absl::string_view> setting =
      absl::StrSplit(word, absl::MaxSplits('=', 1));
  const auto& [key, value] = setting;
  if (key == "tenant") {
    token->tenant = std::string(value);
    return IsName(value) ? absl::OkStatus()
                         : absl::InvalidArgumentError("tenant: want a name as a token's");
  }
  if (key == "rate") return ParsePositive(key, value, &token->rate);
  if (key == "burst") return ParsePositive(key, value, &token->burst);
  if (key == "concurrent") {
    if (absl::SimpleAtoi(value, &token->concurrent) && token->concurrent > 0)
      return absl::OkStatus();
    return absl::InvalidArgumentError("concurrent: want a number above 0");
  }
  if (key == "expires") {
    std::string error;
    if (absl::ParseTime(absl::RFC3339_full, value, &token->expires, &error))
      return absl::OkStatus();
    return absl::InvalidArgumentError("expires: want a time like 2030-01-31T12:00:00Z");
  }
  // The word is not shown: it may be a secret that has lost its prefix.
  return absl::InvalidArgumentError(
      "want tenant=, rate=, burst=, concurrent= or expires= after the secret");
}

absl::StatusOr<TokenSpec> ParseToken(const std::vector<absl::string_view>& words) {
  TokenSpec token;
  if (!IsName(words[0])) {
    return absl::InvalidArgumentError(
        absl::StrCat("want a name of letters, digits and -_.@ first, at most ", kMaxNameBytes));
  }
  token.name = token.tenant = std::string(words[0]);
  if (words.size() < 2) return absl::InvalidArgumentError("want sha256:HEX or secret:TEXT");
  BATON_RETURN_IF_ERROR(ParseSecret(words[1], &token));
  for (size_t i = 2; i < words.size(); ++i) BATON_RETURN_IF_ERROR(ParseSetting(words[i], &token));
  if (token.burst > 0 && token.rate == 0) return absl::InvalidArgumentError("burst: needs rate=");
  token.burst = std::max({token.burst, token.rate, 1.0});
  return token;
}

}  // namespace

TokenDigest DigestOf(absl::string_view secret) {
  TokenDigest digest;
  unsigned size = 0;
  BATON_CHECK(
      EVP_Digest(secret.data(), secret.size(), digest.data(), &size, EVP_sha256(), nullptr) == 1 &&
          size == digest.size(),
      "sha256");
  return digest;
}

bool SameDigest(const TokenDigest& a, const TokenDigest& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

absl::StatusOr<std::vector<TokenSpec>> ParseTokens(absl::string_view text) {
  std::vector<TokenSpec> tokens;
  std::set<std::string> names;
  std::set<TokenDigest> digests;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = line.substr(0, line.find('#'));
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty()) continue;
    absl::StatusOr<TokenSpec> token = ParseToken(words);
    if (!token.ok()) return Annotate(token.status(), absl::StrCat("line ", number));
    if (!names.insert(token->name).second || !digests.insert(token->digest).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("line ", number, ": name or secret is there twice"));
    }
    if (tokens.size() == kMaxTokens)
      return absl::InvalidArgumentError(absl::StrCat("more than ", kMaxTokens, " tokens"));
    tokens.push_back(*std::move(token));
  }
  return tokens;
}

absl::Duration RateBucket::Take(double rate, double burst, absl::Duration now) {
  const double gained = absl::ToDoubleSeconds(now - filled_) * rate;  // the first time: infinite
  level_ = std::min(burst, level_ + std::max(gained, 0.0));
  filled_ = now;
  if (level_ >= 1 - kRounding) {
    level_ = std::max(level_ - 1, 0.0);
    return absl::ZeroDuration();
  }
  // Rounded up, so that who waits this long is not refused for a rounding error.
  return absl::Ceil(absl::Seconds((1 - level_) / rate), absl::Milliseconds(1));
}

void TokenTable::Replace(std::vector<TokenSpec> tokens) {
  std::map<std::string, std::shared_ptr<Use>> uses;
  for (const TokenSpec& token : tokens) {
    const auto old = uses_.find(token.name);
    uses[token.name] = old == uses_.end() ? std::make_shared<Use>() : old->second;
  }
  tokens_ = std::move(tokens);
  uses_ = std::move(uses);
}

absl::StatusOr<const TokenSpec*> TokenTable::Find(absl::string_view authorization,
                                                  absl::Time wall) const {
  if (authorization.empty())
    return absl::UnauthenticatedError("a bearer token is needed in the metadata: authorization");
  const absl::string_view scheme = authorization.substr(0, authorization.find(' '));
  if (!absl::EqualsIgnoreCase(scheme, "bearer") || scheme.size() == authorization.size() ||
      authorization.size() > kMaxTokenBytes + scheme.size() + 1) {
    return absl::UnauthenticatedError("authorization: want \"Bearer TOKEN\"");
  }
  const TokenDigest digest = DigestOf(authorization.substr(scheme.size() + 1));
  // All are compared: the time says nothing about which one was near.
  const TokenSpec* found = nullptr;
  for (const TokenSpec& token : tokens_) {
    if (SameDigest(token.digest, digest)) found = &token;
  }
  if (found == nullptr) return absl::UnauthenticatedError("the token is not known here");
  if (wall >= found->expires)
    return absl::UnauthenticatedError(absl::StrCat("the token ", found->name, " has expired"));
  return found;
}

absl::StatusOr<TokenTable::Entry> TokenTable::Enter(absl::string_view authorization,
                                                    CallCost cost,
                                                    absl::Time wall,
                                                    absl::Duration now) {
  BATON_ASSIGN_OR_RETURN(const TokenSpec* const token, Find(authorization, wall));
  Entry entry{token, uses_.at(token->name)};
  if (cost == CallCost::kNothing) return entry;
  // Before the rate: a call refused here has not used that up.
  if (cost == CallCost::kAnswer && token->concurrent > 0 &&
      entry.use->answers >= token->concurrent) {
    return process::WithRetryInfo(
        absl::ResourceExhaustedError(absl::StrCat(
            "token ", token->name, ": concurrent=", token->concurrent, " answers are open")),
        kConcurrentRetry);
  }
  if (token->rate > 0) {
    const absl::Duration wait = entry.use->bucket.Take(token->rate, token->burst, now);
    if (wait > absl::ZeroDuration()) {
      return process::WithRetryInfo(
          absl::ResourceExhaustedError(
              absl::StrCat("token ", token->name, ": rate=", token->rate, " requests a second")),
          wait);
    }
  }
  if (cost == CallCost::kAnswer) ++entry.use->answers;
  return entry;
}

std::string TenantSalt(absl::string_view tenant, absl::string_view cache_salt) {
  return absl::StrCat(tenant, "\n", cache_salt);  // no name has a line break
}

}  // namespace baton::router
