// The two kinds of tokenizer on small hand-made vocabularies; expected values are those of the
// reference (tests/golden/make_tokenizer_golden.py).

#include "engine/text/tokenizer.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

#include "engine/base/mapped_file.h"
#include "engine/text/nfc.h"
#include "tests/unit/text/vector_files.h"

namespace baton::text {
namespace {

using ::testing::HasSubstr;

std::string TinyPath(absl::string_view kind) {
  return SourcePath(absl::StrCat("tests/data/tokenizer/tiny_", kind, ".json"));
}

std::string TinyJson(absl::string_view kind) {
  return *base::ReadSmallFile(TinyPath(kind), 1 << 20);
}

std::unique_ptr<Tokenizer> Tiny(absl::string_view kind) {
  auto tokenizer = Tokenizer::LoadHuggingFace(TinyPath(kind));
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

std::unique_ptr<Tokenizer> FromJson(absl::string_view tokenizer_json,
                                    absl::string_view config_json = "") {
  auto spec = ParseHuggingFaceVocabulary(tokenizer_json, config_json);
  EXPECT_TRUE(spec.ok()) << spec.status();
  auto tokenizer = Tokenizer::FromVocabulary(*std::move(spec));
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

// Case 9.3.
TEST(TokenizerTest, BothKindsAgreeWithTheReference) {
  const auto qwen2 = Tiny("qwen2");
  const auto smollm = Tiny("smollm");
  const auto records = ReadVectors("tiny_vectors.jsonl");
  ASSERT_GT(records.size(), 400u);
  for (const auto& record : records) {
    const Tokenizer& tokenizer = TextOf(record, "tokenizer") == "qwen2" ? *qwen2 : *smollm;
    const std::string text = TextOf(record, "text");
    EXPECT_EQ(tokenizer.Encode(text, SpecialPolicy::kParse), IdsOf(*record.Find("ids"))) << text;
    EXPECT_EQ(tokenizer.Encode(text, SpecialPolicy::kLiteral), IdsOf(*record.Find("ids_literal")))
        << text;
    EXPECT_EQ(tokenizer.Decode(IdsOf(*record.Find("ids")), /*skip_special=*/false),
              TextOf(record, "decoded"))
        << text;
  }
}

TEST(PreTokenizerTest, PiecesAreThoseOfTheReference) {
  for (const auto& record : ReadVectors("tiny_vectors.jsonl")) {
    const auto kind = *FindPreTokenizer(TextOf(record, "tokenizer"));
    std::string storage;
    const std::string text = TextOf(record, "text");
    PreTokenizer pieces(
        kind, kind == PreTokenizerKind::kQwen2 ? ToNfc(text, &storage) : absl::string_view(text));
    std::vector<TokenId> lengths;
    for (auto piece = pieces.Next(); !piece.empty(); piece = pieces.Next())
      lengths.push_back(static_cast<TokenId>(piece.size()));
    EXPECT_EQ(lengths, IdsOf(*record.Find("pieces"))) << text;
  }
}

// Case 9.1.
TEST(TokenizerTest, AddedTokensCountOnlyInsideTrustedRanges) {
  const auto tokenizer = Tiny("qwen2");
  const std::string text = "<|im_end|>a<|im_end|><think>";
  const TokenId end = *tokenizer->FindToken("<|im_end|>");
  const auto count = [&](std::vector<TrustedRange> ranges) {
    const auto ids = tokenizer->EncodeWithTrusted(text, ranges);
    EXPECT_EQ(tokenizer->Decode(ids, false), text);
    return std::count(ids.begin(), ids.end(), end);
  };
  EXPECT_EQ(count({}), 0);
  EXPECT_EQ(count({{0, 10}}), 1);
  EXPECT_EQ(count({{0, 9}}), 0);              // not wholly inside
  EXPECT_EQ(count({{0, 5}, {5, 10}}), 1);     // ranges that touch are one
  EXPECT_EQ(count({{8, 40}, {0, 9}}), 2);     // in any order, past the end
  EXPECT_EQ(count({{5, 3}, {100, 200}}), 0);  // empty ones
}

TEST(TokenizerTest, TextIsNotCutAtTheBorderOfARange) {
  const auto tokenizer = Tiny("qwen2");
  EXPECT_EQ(tokenizer->EncodeWithTrusted("the the", {TrustedRange{0, 2}, TrustedRange{5, 6}}),
            tokenizer->Encode("the the", SpecialPolicy::kLiteral));
}

TEST(TokenizerTest, ThreadsShareOne) {
  const auto tokenizer = Tiny("qwen2");
  const auto records = ReadVectors("tiny_vectors.jsonl");
  std::atomic<int> num_wrong = 0;
  const auto encode_all = [&] {
    for (const auto& record : records) {
      if (TextOf(record, "tokenizer") != "qwen2") continue;
      const auto ids = tokenizer->Encode(TextOf(record, "text"), SpecialPolicy::kParse);
      if (ids != IdsOf(*record.Find("ids"))) ++num_wrong;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(encode_all);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_wrong, 0);
}

TEST(TokenizerTest, KnowsItsTokens) {
  const auto tokenizer = Tiny("qwen2");
  const TokenId think = *tokenizer->FindToken("<think>");
  const TokenId end = *tokenizer->FindToken("<|im_end|>");
  EXPECT_TRUE(tokenizer->IsAdded(think));
  EXPECT_FALSE(tokenizer->IsSpecial(think));
  EXPECT_TRUE(tokenizer->IsSpecial(end));
  EXPECT_EQ(tokenizer->TextBytes(end, /*show_special=*/false), "");
  EXPECT_EQ(tokenizer->TextBytes(end, /*show_special=*/true), "<|im_end|>");
  EXPECT_EQ(tokenizer->TokenBytes(*tokenizer->FindToken(" t")), " t");
  EXPECT_EQ(tokenizer->FindToken("nothing like it"), std::nullopt);
  EXPECT_EQ(tokenizer->TokenBytes(static_cast<TokenId>(tokenizer->vocab_size())), "");
  EXPECT_EQ(tokenizer->TokenBytes(UINT32_MAX), "");
  EXPECT_FALSE(tokenizer->IsAdded(UINT32_MAX));
}

TEST(TokenizerTest, BytesThatAreNotUtf8AreEncodedAsReplacementCharacters) {
  for (const char* kind : {"qwen2", "smollm"}) {
    const auto tokenizer = Tiny(kind);
    EXPECT_EQ(tokenizer->Encode("a\xFF\xE4\xB8z", SpecialPolicy::kParse),
              tokenizer->Encode("a\xEF\xBF\xBD\xEF\xBF\xBDz", SpecialPolicy::kParse));
  }
}

TEST(TokenizerTest, FingerprintIsOfTheContentAndNotOfTheFile) {
  const std::string json = TinyJson("qwen2");
  const std::string print = Tiny("qwen2")->fingerprint();
  EXPECT_EQ(print.size(), 64u);
  // Saved with other white space and merges in the older spelling.
  EXPECT_EQ(FromJson(absl::StrReplaceAll(json, {{",\n", ",\n\n  "}}))->fingerprint(), print);
  auto spec = *ParseHuggingFaceVocabulary(json, "");
  spec.tokens.resize(spec.tokens.size() + 50);  // padding rows, as GGUF files have them
  spec.types.resize(spec.tokens.size(), TokenType::kUnused);
  EXPECT_EQ((*Tokenizer::FromVocabulary(spec))->fingerprint(), print);

  EXPECT_NE(Tiny("smollm")->fingerprint(), print);
  auto other = *ParseHuggingFaceVocabulary(json, "");
  std::swap(other.merges[0], other.merges[1]);
  EXPECT_NE((*Tokenizer::FromVocabulary(other))->fingerprint(), print);
  other = *ParseHuggingFaceVocabulary(json, "");
  other.types.back() = TokenType::kControl;
  EXPECT_NE((*Tokenizer::FromVocabulary(other))->fingerprint(), print);
}

TEST(TokenizerTest, ConfigBesideItAddsTokensEndAndTemplate) {
  const auto tokenizer =
      FromJson(TinyJson("qwen2"),
               R"({"added_tokens_decoder":{"400":{"content":"<tool_call>","special":false},
                                      "401":{"content":"<|box|>","special":true}},
                                      "eos_token":"<|im_end|>","bos_token":null,"chat_template":"T"})");
  EXPECT_EQ(tokenizer->Encode("<tool_call><|box|>", SpecialPolicy::kParse),
            (std::vector<TokenId>{400, 401}));
  EXPECT_TRUE(tokenizer->IsSpecial(401));
  EXPECT_EQ(tokenizer->eos_id(), tokenizer->FindToken("<|im_end|>"));
  EXPECT_EQ(tokenizer->bos_id(), std::nullopt);
  EXPECT_FALSE(tokenizer->add_bos());
  EXPECT_EQ(tokenizer->chat_template(), "T");
  EXPECT_EQ(tokenizer->TokenBytes(399), "");
  const auto named = FromJson(TinyJson("qwen2"), R"({"eos_token":{"content":"<|endoftext|>"},
                                "chat_template":[{"name":"tool_use","template":"A"},{"name":"default","template":"B"}]})");
  EXPECT_EQ(named->eos_id(), named->FindToken("<|endoftext|>"));
  EXPECT_EQ(named->chat_template(), "B");
}

// What tokenizer.json may say and this tokenizer does not do.
TEST(TokenizerTest, RefusesWhatItWouldGetWrongByName) {
  const std::string json = TinyJson("qwen2");
  const std::pair<std::string, std::string> changes[] = {
      {"\"NFC\"", "\"NFKC\""},
      {"{1,3}", ""},
      {"\\\\p{N}|", "\\\\p{N}{1,3}|"},
      {"\"Isolated\"", "\"Removed\""},
      {"\"use_regex\": false", "\"use_regex\": true"},
      {"\"BPE\"", "\"Unigram\""},
      {"\"dropout\": null", "\"dropout\": 0.1"},
      {"\"byte_fallback\": false", "\"byte_fallback\": true"},
      {"\"end_of_word_suffix\": \"\"", "\"end_of_word_suffix\": \"</w>\""},
      {"\"lstrip\": false", "\"lstrip\": true"},
      {"\"unk_token\": null", "\"unk_token\": \"<unk>\""},
      {"\"post_processor\": {\n\"type\": \"ByteLevel\"",
       "\"post_processor\": {\n\"type\": \"TemplateProcessing\""},
  };
  for (const auto& [from, to] : changes) {
    if (from == "{1,3}") continue;
    const std::string changed = absl::StrReplaceAll(json, {{from, to}});
    ASSERT_NE(changed, json) << from;
    const auto spec = ParseHuggingFaceVocabulary(changed, "");
    EXPECT_EQ(spec.status().code(), absl::StatusCode::kInvalidArgument) << from;
    EXPECT_THAT(std::string(spec.status().message()), HasSubstr("tokenizer.json: field ")) << from;
  }
}

TEST(TokenizerTest, RefusesVocabulariesThatContradictThemselves) {
  const auto spec = [] { return *ParseHuggingFaceVocabulary(TinyJson("qwen2"), ""); };
  const auto code = [](VocabularySpec spec) {
    return Tokenizer::FromVocabulary(std::move(spec)).status().code();
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code(spec()), absl::StatusCode::kOk);
  EXPECT_EQ(code(VocabularySpec()), kInvalid);
  auto s = spec();
  s.pre_tokenizer = "llama3";
  EXPECT_EQ(code(s), kInvalid);
  s = spec();
  s.tokens[5] = s.tokens[6];
  EXPECT_EQ(code(s), kInvalid);
  s = spec();
  s.tokens[5] = "\xE2\x82\xAC";  // not in the byte alphabet
  EXPECT_EQ(code(s), kInvalid);
  s = spec();
  s.tokens[5] = "";
  EXPECT_EQ(code(s), kInvalid);
  s = spec();
  s.types.pop_back();
  EXPECT_EQ(code(s), kInvalid);
  s = spec();
  s.types[3] = static_cast<TokenType>(9);
  EXPECT_EQ(code(s), kInvalid);
  s = spec();
  s.types[3] = TokenType::kByte;
  EXPECT_EQ(code(s), kInvalid);
  for (const char* merge : {"a", "a b c", "zz zz", "z q", " ", ""}) {
    s = spec();
    s.merges.push_back(merge);
    EXPECT_EQ(code(s), kInvalid) << merge;
  }
  s = spec();
  s.eos_id = 100000;
  EXPECT_EQ(code(s), kInvalid);
  s = spec();
  s.add_bos = true;
  EXPECT_EQ(code(s), kInvalid);
}

TEST(TokenizerTest, RefusesIdsThatClashOrAreOutOfRange) {
  const std::string json = TinyJson("qwen2");
  for (const char* decoder : {R"({"5":{"content":"<x>"}})", R"({"-1":{"content":"<x>"}})",
                              R"({"99999999":{"content":"<x>"}})", R"({"x":{"content":"<x>"}})",
                              R"({"400":{"content":""}})", R"({"400":{}})"}) {
    const auto spec =
        ParseHuggingFaceVocabulary(json, absl::StrCat("{\"added_tokens_decoder\":", decoder, "}"));
    EXPECT_EQ(spec.status().code(), absl::StatusCode::kInvalidArgument) << decoder;
  }
  EXPECT_EQ(Tokenizer::LoadHuggingFace("/nowhere/at/all").status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_FALSE(Tokenizer::Load(SourcePath("tests/data/tokenizer/README.md")).ok());
}

TEST(TokenizerTest, ByteTokensAndIgnoreMergesAreUnderstood) {
  VocabularySpec spec;
  spec.tokens = {"a", "b", "ab", "<0x63>", "cab"};
  spec.types = {TokenType::kNormal, TokenType::kNormal, TokenType::kNormal, TokenType::kByte,
                TokenType::kNormal};
  spec.merges = {"a b"};
  spec.pre_tokenizer = "smollm";
  const auto merged = *Tokenizer::FromVocabulary(spec);
  EXPECT_EQ(merged->Encode("cab", SpecialPolicy::kParse), (std::vector<TokenId>{3, 2}));
  spec.whole_pieces_first = true;
  const auto whole = *Tokenizer::FromVocabulary(spec);
  EXPECT_EQ(whole->Encode("cab", SpecialPolicy::kParse), (std::vector<TokenId>{4}));
  EXPECT_EQ(whole->Encode("abcz", SpecialPolicy::kParse),
            (std::vector<TokenId>{2, 3}));  // no token for z
}

TEST(ByteAlphabetTest, IsABijectionOverAllBytes) {
  std::string bytes;
  for (int b = 0; b < 256; ++b) bytes.push_back(static_cast<char>(b));
  EXPECT_EQ(DecodeByteAlphabet(EncodeByteAlphabet(bytes)), bytes);
  EXPECT_EQ(EncodeByteAlphabet(" the\n"), "\xC4\xA0the\xC4\x8A");
  EXPECT_EQ(DecodeByteAlphabet(" "), std::nullopt);
  EXPECT_EQ(DecodeByteAlphabet("\xFF"), std::nullopt);
}

TEST(NfcTest, ComposesReordersAndLeavesTheRestAlone) {
  std::string storage;
  EXPECT_EQ(ToNfc("e\xCC\x81", &storage), "\xC3\xA9");
  EXPECT_EQ(ToNfc("a\xCC\x81\xCC\xA7", &storage),
            "\xC3\xA1\xCC\xA7");  // the cedilla goes first, then a + acute meet
  EXPECT_EQ(ToNfc("\xE1\x84\x92\xE1\x85\xA1\xE1\x86\xAB", &storage), "\xED\x95\x9C");  // jamo
  EXPECT_EQ(ToNfc("\xE2\x84\xAB", &storage), "\xC3\x85");  // the angstrom sign
  const std::string fine = "plain \xC3\xA9 \xE4\xB8\x96 \xEA\xB0\x81";
  const absl::string_view same = ToNfc(fine, &storage);
  EXPECT_EQ(same.data(), fine.data());
  EXPECT_EQ(ToNfc("a\xFF", &storage), "a\xEF\xBF\xBD");
}

}  // namespace
}  // namespace baton::text
