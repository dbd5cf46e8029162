// Tokenizers from the metadata of GGUF files.

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/base/gguf.h"
#include "engine/text/tokenizer.h"
#include "tests/support/model_files.h"
#include "tests/unit/text/vector_files.h"

namespace baton::text {
namespace {

using ::testing::HasSubstr;
using testing_support::GgufBytes;
using testing_support::TempDir;

struct Metadata {
  std::string model = "gpt2";
  std::string pre;
  VocabularySpec spec;  // of the same tokenizer in Hugging Face's form

  explicit Metadata(const std::string& kind) : pre(kind) {
    spec = *ReadHuggingFaceVocabulary(SourcePath("tests/data/tokenizer/tiny_" + kind + ".json"));
  }

  std::string Build() const {
    GgufBytes bytes;
    std::vector<int32_t> types;
    for (const TokenType type : spec.types) types.push_back(static_cast<int32_t>(type));
    bytes.AddString("tokenizer.ggml.model", model)
        .AddString("tokenizer.ggml.pre", pre)
        .AddStrings("tokenizer.ggml.tokens", spec.tokens)
        .AddStrings("tokenizer.ggml.merges", spec.merges)
        .AddI32s("tokenizer.ggml.token_type", types)
        .AddU32("tokenizer.ggml.eos_token_id", 2)
        .AddString("tokenizer.chat_template", "T");
    return bytes.Build();
  }
};

absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& bytes) {
  const absl::Span<const uint8_t> span(reinterpret_cast<const uint8_t*>(bytes.data()),
                                       bytes.size());
  auto file = base::GgufFile::Parse("m.gguf", span);
  if (!file.ok()) return file.status();
  return Tokenizer::LoadGguf(**file);
}

TEST(GgufTokenizerTest, IsTheSameTokenizerAsFromTokenizerJson) {
  for (const char* kind : {"qwen2", "smollm"}) {
    const auto tokenizer = Load(Metadata(kind).Build());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    const auto same = Tokenizer::FromVocabulary(Metadata(kind).spec);
    EXPECT_EQ((*tokenizer)->fingerprint(), (*same)->fingerprint()) << kind;
    EXPECT_EQ((*tokenizer)->eos_id(), 2u);
    EXPECT_EQ((*tokenizer)->bos_id(), std::nullopt);
    EXPECT_FALSE((*tokenizer)->add_bos());
    EXPECT_EQ((*tokenizer)->chat_template(), "T");
  }
  for (const auto& record : ReadVectors("tiny_vectors.jsonl")) {
    if (TextOf(record, "tokenizer") != "smollm") continue;
    static const auto smollm = Load(Metadata("smollm").Build());
    EXPECT_EQ((*smollm)->Encode(TextOf(record, "text"), SpecialPolicy::kParse),
              IdsOf(*record.Find("ids")));
  }
}

TEST(GgufTokenizerTest, LoadsByTheNameOfTheFile) {
  TempDir directory;
  EXPECT_TRUE(Tokenizer::Load(directory.Write("m.gguf", Metadata("smollm").Build())).ok());
  EXPECT_EQ(Tokenizer::Load(directory.File("other.gguf")).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_FALSE(Tokenizer::Load(directory.Write("broken.gguf", "GGUF")).ok());
}

TEST(GgufTokenizerTest, RefusesWhatIsNotSupportedWithFileAndKey) {
  const auto message = [](const Metadata& metadata) {
    const auto tokenizer = Load(metadata.Build());
    EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(tokenizer.status().message());
  };
  Metadata metadata("qwen2");
  metadata.model = "llama";
  EXPECT_THAT(message(metadata),
              HasSubstr("m.gguf: tokenizer.ggml.model \"llama\" is not supported"));
  metadata = Metadata("qwen2");
  metadata.pre = "llama-bpe";
  EXPECT_THAT(message(metadata),
              HasSubstr("m.gguf: tokenizer: pre-tokenizer \"llama-bpe\" is not supported"));
  metadata = Metadata("qwen2");
  metadata.spec.types[7] = static_cast<TokenType>(8);
  EXPECT_THAT(message(metadata), HasSubstr("token type 8"));
  metadata = Metadata("qwen2");
  metadata.spec.types.pop_back();
  EXPECT_THAT(message(metadata), HasSubstr("m.gguf: tokenizer: "));
  EXPECT_THAT(
      std::string(
          Load(GgufBytes().AddString("tokenizer.ggml.model", "gpt2").Build()).status().message()),
      HasSubstr("m.gguf: metadata key tokenizer.ggml.pre is missing"));
}

}  // namespace
}  // namespace baton::text
