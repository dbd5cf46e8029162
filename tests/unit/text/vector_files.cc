#include "tests/unit/text/vector_files.h"

#include <openssl/sha.h>

#include <gtest/gtest.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "engine/base/log.h"
#include "engine/base/mapped_file.h"

namespace baton::text {

std::string SourcePath(absl::string_view relative) {
  return absl::StrCat(BATON_SOURCE_DIR, "/", relative);
}

std::vector<base::JsonValue> ReadVectors(const std::string& name) {
  std::vector<base::JsonValue> values;
  const auto text =
      base::ReadSmallFile(SourcePath(absl::StrCat("tests/data/tokenizer/", name)), 1 << 20);
  EXPECT_TRUE(text.ok()) << text.status();
  if (!text.ok()) return values;
  for (const absl::string_view line : absl::StrSplit(*text, '\n', absl::SkipEmpty())) {
    auto value = base::ParseJson(line);
    EXPECT_TRUE(value.ok()) << value.status();
    if (value.ok()) values.push_back(*std::move(value));
  }
  return values;
}

std::string TextOf(const base::JsonValue& record, absl::string_view key) {
  const base::JsonValue* value = record.Find(key);
  BATON_CHECK(value != nullptr, "the record has no ", key);
  return value->text();
}

std::vector<TokenId> IdsOf(const base::JsonValue& value) {
  std::vector<TokenId> ids;
  for (const base::JsonValue& id : value.items())
    ids.push_back(static_cast<TokenId>(id.AsInt64().value()));
  return ids;
}

std::string Sha256Hex(absl::string_view bytes) {
  uint8_t digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size(), digest);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest), sizeof(digest)));
}

std::string LittleEndian(absl::Span<const TokenId> ids) {
  std::string bytes;
  for (const TokenId id : ids) {
    for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(id >> shift));
  }
  return bytes;
}

const Tokenizer& Qwen3Tokenizer() {
  static const Tokenizer* const kTokenizer = [] {
    auto tokenizer = Tokenizer::LoadHuggingFace(SourcePath(".cache/tokenizer-qwen3"));
    BATON_CHECK(tokenizer.ok(),
                "run scripts/get_tokenizer.sh first: ", tokenizer.status().ToString());
    return tokenizer->release();
  }();
  return *kTokenizer;
}

}  // namespace baton::text
