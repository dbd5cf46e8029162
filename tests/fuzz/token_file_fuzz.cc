// A token file of any bytes, and any header against it: a Status or tokens that keep the bounds.

#include <cstdint>
#include <string>
#include <utility>

#include "engine/base/log.h"
#include "router/token_table.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace baton::router;  // NOLINT: one function
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  absl::StatusOr<std::vector<TokenSpec>> tokens = ParseTokens(text);
  TokenTable table;
  if (tokens.ok()) {
    BATON_CHECK(tokens->size() <= kMaxTokens);
    for (const TokenSpec& token : *tokens) {
      BATON_CHECK(!token.name.empty() && !token.tenant.empty());
      BATON_CHECK(token.name.find('\n') == std::string::npos &&
                  token.tenant.find('\n') == std::string::npos);
      BATON_CHECK(token.rate >= 0 && token.burst >= 1 && token.concurrent >= 0);
    }
    table.Replace(*std::move(tokens));
  }
  // The input as a header too, against what it said itself.
  for (const absl::string_view header : {text, text.substr(0, text.find('\n'))}) {
    (void)table.Enter(header, CallCost::kAnswer, absl::UnixEpoch(), absl::Seconds(1)).status();
  }
  return 0;
}
