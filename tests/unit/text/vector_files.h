#pragma once

// The tokenizer vectors of tests/data/tokenizer and the real tokenizer they speak of.

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "engine/base/json.h"
#include "engine/text/tokenizer.h"

namespace baton::text {

// One value for each line of tests/data/tokenizer/<name>. A test failure and an empty vector when
// it cannot be read.
std::vector<base::JsonValue> ReadVectors(const std::string& name);

// Members of a vector that are known to be there.
std::string TextOf(const base::JsonValue& record, absl::string_view key);
std::vector<TokenId> IdsOf(const base::JsonValue& value);

std::string Sha256Hex(absl::string_view bytes);
// The ids as little-endian 32-bit numbers.
std::string LittleEndian(absl::Span<const TokenId> ids);

// Qwen3's tokenizer, loaded once. scripts/get_tokenizer.sh fetches it; without it this stops the
// test with that advice.
const Tokenizer& Qwen3Tokenizer();

std::string SourcePath(absl::string_view relative);

}  // namespace baton::text
