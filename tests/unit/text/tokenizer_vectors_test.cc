// Qwen3's real tokenizer against the vectors of tests/data/tokenizer (see the README there).

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

#include "engine/base/json.h"
#include "engine/base/mapped_file.h"
#include "engine/base/utf8.h"
#include "engine/text/nfc.h"
#include "engine/text/tokenizer.h"
#include "engine/text/unicode_classes.h"
#include "tests/unit/text/vector_files.h"

namespace baton::text {
namespace {

// Case 9.3 and case 9.1 (ids_literal).
TEST(TokenizerVectorsTest, EncodesLikeTheReference) {
  const Tokenizer& tokenizer = Qwen3Tokenizer();
  const auto records = ReadVectors("encode.jsonl");
  ASSERT_EQ(records.size(), 743u);
  for (const auto& record : records) {
    const std::string text = TextOf(record, "text");
    const auto ids = tokenizer.Encode(text, SpecialPolicy::kParse);
    EXPECT_EQ(ids, IdsOf(*record.Find("ids"))) << TextOf(record, "id");
    const auto* literal = record.Find("ids_literal");
    const auto ids_literal = tokenizer.Encode(text, SpecialPolicy::kLiteral);
    EXPECT_EQ(ids_literal, IdsOf(literal ? *literal : *record.Find("ids"))) << TextOf(record, "id");
    for (const TokenId id : ids_literal)
      EXPECT_FALSE(tokenizer.IsAdded(id)) << TextOf(record, "id");
  }
}

TEST(TokenizerVectorsTest, DecodesWhatItEncoded) {
  const Tokenizer& tokenizer = Qwen3Tokenizer();
  for (const auto& record : ReadVectors("encode.jsonl")) {
    const auto ids = IdsOf(*record.Find("ids"));
    const auto* decoded = record.Find("decoded");
    const auto* skipped = record.Find("decoded_skip_special");
    const std::string expected = decoded ? decoded->text() : TextOf(record, "text");
    EXPECT_EQ(tokenizer.Decode(ids, /*skip_special=*/false), expected) << TextOf(record, "id");
    EXPECT_EQ(tokenizer.Decode(ids, /*skip_special=*/true), skipped ? skipped->text() : expected)
        << TextOf(record, "id");
    std::string storage;
    const auto literal = tokenizer.Encode(TextOf(record, "text"), SpecialPolicy::kLiteral);
    EXPECT_EQ(tokenizer.Decode(literal, false), ToNfc(TextOf(record, "text"), &storage))
        << TextOf(record, "id");
  }
}

// Cases 1.1 and 1.2.
TEST(TokenizerVectorsTest, StreamsTheDeltasOfTheReference) {
  const Tokenizer& tokenizer = Qwen3Tokenizer();
  const auto records = ReadVectors("decode.jsonl");
  ASSERT_EQ(records.size(), 166u);
  for (size_t n = 0; n < records.size(); ++n) {
    const auto ids = IdsOf(*records[n].Find("ids"));
    const std::string text = TextOf(records[n], "text");
    const auto* skipped = records[n].Find("text_skip_special");
    EXPECT_EQ(tokenizer.Decode(ids, /*skip_special=*/false), text) << "line " << n + 1;
    EXPECT_EQ(tokenizer.Decode(ids, /*skip_special=*/true), skipped ? skipped->text() : text)
        << "line " << n + 1;
    IncrementalDecoder decoder(tokenizer);
    std::string joined;
    for (size_t i = 0; i < ids.size(); ++i) {
      const std::string delta = decoder.Push(ids[i]);
      EXPECT_TRUE(base::IsValidUtf8(delta));
      EXPECT_EQ(delta, records[n].Find("deltas")->items().at(i).text())
          << "line " << n + 1 << " id " << i;
      joined += delta;
    }
    const std::string rest = decoder.Flush();
    EXPECT_EQ(rest, TextOf(records[n], "flush")) << "line " << n + 1;
    EXPECT_EQ(joined + rest, text) << "line " << n + 1;
  }
}

TEST(TokenizerVectorsTest, TheWholeVocabularyRoundTripsAsInTheReference) {
  const Tokenizer& tokenizer = Qwen3Tokenizer();
  const auto text =
      base::ReadSmallFile(SourcePath("tests/data/tokenizer/vocab_roundtrip.json"), 1 << 20);
  ASSERT_TRUE(text.ok()) << text.status();
  const auto expected = base::ParseJson(*text);
  ASSERT_TRUE(expected.ok()) << expected.status();
  const auto number = [&](absl::string_view key) { return expected->Find(key)->AsInt64().value(); };

  std::vector<TokenId> same, changed, changed_encodings;
  int64_t num_broken = 0;
  for (TokenId id = 0; id < number("ids"); ++id) {
    const std::string decoded = tokenizer.Decode({id}, /*skip_special=*/false);
    if (decoded.find("\xEF\xBF\xBD") != std::string::npos) {
      ++num_broken;
      continue;
    }
    const auto ids = tokenizer.Encode(decoded, SpecialPolicy::kParse);
    if (ids == std::vector<TokenId>{id}) {
      same.push_back(id);
      continue;
    }
    changed.push_back(id);
    changed_encodings.push_back(id);
    changed_encodings.push_back(static_cast<TokenId>(ids.size()));
    changed_encodings.insert(changed_encodings.end(), ids.begin(), ids.end());
  }
  EXPECT_EQ(num_broken, number("decode_has_fffd"));
  EXPECT_EQ(static_cast<int64_t>(same.size()), number("identity"));
  EXPECT_EQ(static_cast<int64_t>(changed.size()), number("non_identity"));
  EXPECT_EQ(Sha256Hex(LittleEndian(same)), TextOf(*expected, "identity_sha256"));
  EXPECT_EQ(Sha256Hex(LittleEndian(changed)), TextOf(*expected, "non_identity_sha256"));
  EXPECT_EQ(Sha256Hex(LittleEndian(changed_encodings)),
            TextOf(*expected, "non_identity_encodings_sha256"));
}

TEST(TokenizerVectorsTest, UnicodeClassesAreThoseOfUnicode16) {
  std::string letters;
  for (char32_t c = 0; c < 0x110000; ++c) {
    const bool surrogate = c >= 0xD800 && c < 0xE000;
    letters.push_back(surrogate ? '-' : "oLNsn"[static_cast<int>(UnicodeClasses::Get().Of(c))]);
  }
  EXPECT_EQ(Sha256Hex(letters), "e1b79c860fb4e42ea99e0aee965624c8fe22c985112fdb7dbdbf3cf6d970e4f3");
}

}  // namespace
}  // namespace baton::text
