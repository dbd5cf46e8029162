// Tokenizers from files.

#include <filesystem>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "engine/base/status_macros.h"
#include "engine/text/tokenizer.h"

namespace baton::text {
namespace {

absl::Status Missing(const base::GgufFile& file, absl::string_view key) {
  return absl::InvalidArgumentError(
      absl::StrCat(file.path(), ": metadata key ", key, " is missing or of another type"));
}

absl::StatusOr<std::vector<std::string>> ReadStrings(const base::GgufFile& file,
                                                     absl::string_view key) {
  const auto views = file.FindStringArray(key);
  if (!views) return Missing(file, key);
  std::vector<std::string> strings;
  strings.reserve(views->size());
  for (const absl::string_view view : *views) strings.emplace_back(view);
  return strings;
}

absl::StatusOr<VocabularySpec> ReadGgufVocabulary(const base::GgufFile& file) {
  VocabularySpec spec;
  const auto model = file.FindString("tokenizer.ggml.model");
  if (!model) return Missing(file, "tokenizer.ggml.model");
  if (*model != "gpt2") {
    return absl::InvalidArgumentError(absl::StrCat(file.path(), ": tokenizer.ggml.model \"",
                                                   absl::CHexEscape(*model),
                                                   "\" is not supported; accepted is gpt2"));
  }
  const auto pre = file.FindString("tokenizer.ggml.pre");
  if (!pre) return Missing(file, "tokenizer.ggml.pre");
  spec.pre_tokenizer = std::string(*pre);
  BATON_ASSIGN_OR_RETURN(spec.tokens, ReadStrings(file, "tokenizer.ggml.tokens"));
  BATON_ASSIGN_OR_RETURN(spec.merges, ReadStrings(file, "tokenizer.ggml.merges"));
  const auto types = file.FindIntArray("tokenizer.ggml.token_type");
  if (!types) return Missing(file, "tokenizer.ggml.token_type");
  for (const int64_t type : *types) {
    // 2 is "unknown"; no kind of tokenizer that is read here has one.
    if (type < 1 || type > 6) {
      return absl::InvalidArgumentError(
          absl::StrCat(file.path(), ": token type ", type, " is not supported"));
    }
    spec.types.push_back(static_cast<TokenType>(type));
  }
  spec.bos_id = file.FindU32("tokenizer.ggml.bos_token_id");
  spec.eos_id = file.FindU32("tokenizer.ggml.eos_token_id");
  spec.add_bos = file.FindBool("tokenizer.ggml.add_bos_token").value_or(false);
  spec.chat_template = std::string(file.FindString("tokenizer.chat_template").value_or(""));
  return spec;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::LoadGguf(const base::GgufFile& file) {
  BATON_ASSIGN_OR_RETURN(VocabularySpec spec, ReadGgufVocabulary(file));
  auto tokenizer = FromVocabulary(std::move(spec));
  if (!tokenizer.ok()) return Annotate(tokenizer.status(), file.path());
  return tokenizer;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::LoadHuggingFace(const std::string& path) {
  BATON_ASSIGN_OR_RETURN(VocabularySpec spec, ReadHuggingFaceVocabulary(path));
  auto tokenizer = FromVocabulary(std::move(spec));
  if (!tokenizer.ok()) return Annotate(tokenizer.status(), path);
  return tokenizer;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& path) {
  if (!absl::EndsWith(path, ".gguf")) return LoadHuggingFace(path);
  BATON_ASSIGN_OR_RETURN(const auto file, base::GgufFile::Open(path));
  return LoadGguf(*file);
}

}  // namespace baton::text
