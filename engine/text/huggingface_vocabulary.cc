// Reads tokenizer.json and the files beside it. What it asks for is what this tokenizer does;
// anything else is refused by name, because a tokenizer that is nearly right gives wrong ids
// without an error.

#include <filesystem>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "engine/base/json.h"
#include "engine/base/mapped_file.h"
#include "engine/base/status_macros.h"
#include "engine/text/vocabulary.h"

namespace baton::text {
namespace {

using base::JsonMember;
using base::JsonValue;

constexpr size_t kMaxTokenizerBytes = size_t{64} << 20;
constexpr size_t kMaxTokenizerConfigBytes = size_t{4} << 20;
constexpr int64_t kMaxTokens = int64_t{1} << 21;

constexpr absl::string_view kQwen2Regex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

absl::Status NotSupported(absl::string_view field, absl::string_view accepted) {
  return absl::InvalidArgumentError(
      absl::StrCat("tokenizer.json: field ", field, " is not supported; accepted is ", accepted));
}

const JsonValue& FindOrNull(const JsonValue& object, absl::string_view key) {
  static const JsonValue* const kNull = new JsonValue();
  const JsonValue* value = object.Find(key);
  return value ? *value : *kNull;
}

bool IsTrue(const JsonValue& object, absl::string_view key) {
  return FindOrNull(object, key).is_true();
}

bool IsText(const JsonValue& object, absl::string_view key, absl::string_view text) {
  const JsonValue& value = FindOrNull(object, key);
  return value.is_string() && value.text() == text;
}

bool IsNullOrEmpty(const JsonValue& value) {
  return value.is_null() || (value.is_string() && value.text().empty());
}

absl::Status ReadNormalizer(const JsonValue& normalizer, VocabularySpec* spec) {
  if (normalizer.is_null()) {
    spec->normalize_nfc = false;
  } else if (IsText(normalizer, "type", "NFC")) {
    spec->normalize_nfc = true;
  } else {
    return NotSupported("normalizer", "null or NFC");
  }
  return absl::OkStatus();
}

bool IsByteLevel(const JsonValue& step, bool use_regex) {
  // A missing use_regex is true, as in the reference.
  const JsonValue& regex = FindOrNull(step, "use_regex");
  return IsText(step, "type", "ByteLevel") && !IsTrue(step, "add_prefix_space") &&
         (regex.is_null() || regex.is_true()) == use_regex;
}

bool IsQwen2Split(const JsonValue& step) {
  return IsText(step, "type", "Split") && IsText(step, "behavior", "Isolated") &&
         !IsTrue(step, "invert") && IsText(FindOrNull(step, "pattern"), "Regex", kQwen2Regex);
}

absl::Status ReadPreTokenizer(const JsonValue& pre_tokenizer, VocabularySpec* spec) {
  const auto& steps = FindOrNull(pre_tokenizer, "pretokenizers").items();
  if (IsText(pre_tokenizer, "type", "Sequence") && steps.size() == 2) {
    if (IsQwen2Split(steps[0]) && IsByteLevel(steps[1], /*use_regex=*/false)) {
      spec->pre_tokenizer = "qwen2";
      return absl::OkStatus();
    }
    if (IsText(steps[0], "type", "Digits") && IsTrue(steps[0], "individual_digits") &&
        IsByteLevel(steps[1], /*use_regex=*/true)) {
      spec->pre_tokenizer = "smollm";
      return absl::OkStatus();
    }
  }
  return NotSupported("pre_tokenizer",
                      "a sequence of Qwen2's split regex and ByteLevel, or of individual Digits "
                      "and ByteLevel with its regex");
}

absl::Status CheckModel(const JsonValue& model) {
  if (!model.is_object()) return NotSupported("model", "an object");
  const JsonValue& type = FindOrNull(model, "type");
  if (!type.is_null() && !IsText(model, "type", "BPE")) return NotSupported("model.type", "BPE");
  if (!FindOrNull(model, "dropout").is_null()) return NotSupported("model.dropout", "null");
  if (!FindOrNull(model, "unk_token").is_null()) return NotSupported("model.unk_token", "null");
  if (IsTrue(model, "byte_fallback")) return NotSupported("model.byte_fallback", "false");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!IsNullOrEmpty(FindOrNull(model, key)))
      return NotSupported(absl::StrCat("model.", key), "empty");
  }
  if (!FindOrNull(model, "vocab").is_object()) return NotSupported("model.vocab", "an object");
  if (!FindOrNull(model, "merges").is_array()) return NotSupported("model.merges", "an array");
  return absl::OkStatus();
}

absl::Status CheckAround(const JsonValue& root) {
  const JsonValue& decoder = FindOrNull(root, "decoder");
  if (!decoder.is_null() && !IsText(decoder, "type", "ByteLevel"))
    return NotSupported("decoder", "ByteLevel");
  const JsonValue& post = FindOrNull(root, "post_processor");
  if (!post.is_null() && !IsText(post, "type", "ByteLevel"))
    return NotSupported("post_processor", "null or ByteLevel");
  return absl::OkStatus();
}

// Places a token at its id; the vector grows with unused entries between.
absl::Status Place(int64_t id, absl::string_view text, TokenType type, VocabularySpec* spec) {
  if (id < 0 || id >= kMaxTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokenizer.json: token id ", id, " is out of range"));
  }
  const size_t at = static_cast<size_t>(id);
  if (at >= spec->tokens.size()) {
    spec->tokens.resize(at + 1);
    spec->types.resize(at + 1, TokenType::kUnused);
  }
  // An added token may be listed in the vocabulary too, and in both files.
  if (spec->types[at] != TokenType::kUnused && spec->tokens[at] != text) {
    return absl::InvalidArgumentError(absl::StrCat("tokenizer.json: two tokens have the id ", id));
  }
  spec->tokens[at] = std::string(text);
  spec->types[at] = type;
  return absl::OkStatus();
}

absl::Status ReadVocabulary(const JsonValue& vocab, VocabularySpec* spec) {
  spec->tokens.reserve(vocab.members().size());
  spec->types.reserve(vocab.members().size());
  for (const JsonMember& entry : vocab.members()) {
    const auto id = entry.value.AsInt64();
    if (!id.ok()) return NotSupported("model.vocab", "an object of integers");
    BATON_RETURN_IF_ERROR(Place(*id, entry.key, TokenType::kNormal, spec));
  }
  return absl::OkStatus();
}

absl::Status ReadMerges(const JsonValue& merges, VocabularySpec* spec) {
  spec->merges.reserve(merges.items().size());
  for (const JsonValue& merge : merges.items()) {
    const auto& pair = merge.items();
    if (merge.is_string()) {
      spec->merges.push_back(merge.text());
    } else if (pair.size() == 2 && pair[0].is_string() && pair[1].is_string()) {
      spec->merges.push_back(absl::StrCat(pair[0].text(), " ", pair[1].text()));
    } else {
      return NotSupported("model.merges", "an array of pairs or of \"left right\"");
    }
  }
  return absl::OkStatus();
}

// `normalized` is not looked at: with it the reference looks for the token after normalisation,
// which differs only where a combining mark stands right behind the token's text.
absl::Status ReadAddedToken(int64_t id, const JsonValue& token, VocabularySpec* spec) {
  const JsonValue& content = FindOrNull(token, "content");
  if (!content.is_string() || content.text().empty())
    return NotSupported("added_tokens[].content", "text");
  for (const char* key : {"lstrip", "rstrip", "single_word"}) {
    if (IsTrue(token, key)) return NotSupported(absl::StrCat("added_tokens[].", key), "false");
  }
  return Place(id, content.text(),
               IsTrue(token, "special") ? TokenType::kControl : TokenType::kUserDefined, spec);
}

absl::Status ReadAddedTokens(const JsonValue& root, const JsonValue& config, VocabularySpec* spec) {
  for (const JsonValue& token : FindOrNull(root, "added_tokens").items()) {
    const auto id = FindOrNull(token, "id").AsInt64();
    if (!id.ok()) return NotSupported("added_tokens[].id", "an integer");
    BATON_RETURN_IF_ERROR(ReadAddedToken(*id, token, spec));
  }
  for (const JsonMember& entry : FindOrNull(config, "added_tokens_decoder").members()) {
    const auto id = JsonValue::Number(entry.key).AsInt64();
    if (!id.ok()) return NotSupported("added_tokens_decoder", "an object with integers as names");
    BATON_RETURN_IF_ERROR(ReadAddedToken(*id, entry.value, spec));
  }
  return absl::OkStatus();
}

// The id of a token that tokenizer_config.json names: by its text, or by an object that holds it.
std::optional<TokenId> FindNamedToken(const JsonValue& config,
                                      absl::string_view key,
                                      const VocabularySpec& spec) {
  const JsonValue* value = &FindOrNull(config, key);
  if (value->is_object()) value = &FindOrNull(*value, "content");
  if (!value->is_string()) return std::nullopt;
  for (size_t id = spec.tokens.size(); id-- > 0;) {  // added tokens stand at the end
    if (spec.types[id] != TokenType::kUnused && spec.tokens[id] == value->text())
      return static_cast<TokenId>(id);
  }
  return std::nullopt;
}

// The source of the chat template: text, or a list of named ones of which "default" counts.
std::string ReadChatTemplate(const JsonValue& config) {
  const JsonValue& value = FindOrNull(config, "chat_template");
  for (const JsonValue& entry : value.items()) {
    if (IsText(entry, "name", "default")) return FindOrNull(entry, "template").text();
  }
  return value.is_string() ? value.text() : std::string();
}

// The text of a file that may be absent.
absl::StatusOr<std::string> ReadOptionalFile(const std::string& path) {
  auto text = base::ReadSmallFile(path, kMaxTokenizerConfigBytes);
  if (absl::IsNotFound(text.status())) return std::string();
  return text;
}

}  // namespace

absl::StatusOr<VocabularySpec> ParseHuggingFaceVocabulary(absl::string_view tokenizer_json,
                                                          absl::string_view config_json) {
  base::JsonLimits limits;
  limits.max_bytes = kMaxTokenizerBytes;
  BATON_ASSIGN_OR_RETURN(const JsonValue root, base::ParseJson(tokenizer_json, limits));
  JsonValue config;
  if (!config_json.empty()) {
    auto parsed = base::ParseJson(config_json, limits);
    if (!parsed.ok()) return Annotate(parsed.status(), "tokenizer_config.json");
    config = *std::move(parsed);
  }
  VocabularySpec spec;
  const JsonValue& model = FindOrNull(root, "model");
  BATON_RETURN_IF_ERROR(CheckModel(model));
  BATON_RETURN_IF_ERROR(CheckAround(root));
  BATON_RETURN_IF_ERROR(ReadNormalizer(FindOrNull(root, "normalizer"), &spec));
  BATON_RETURN_IF_ERROR(ReadPreTokenizer(FindOrNull(root, "pre_tokenizer"), &spec));
  BATON_RETURN_IF_ERROR(ReadVocabulary(FindOrNull(model, "vocab"), &spec));
  BATON_RETURN_IF_ERROR(ReadMerges(FindOrNull(model, "merges"), &spec));
  BATON_RETURN_IF_ERROR(ReadAddedTokens(root, config, &spec));
  spec.whole_pieces_first = IsTrue(model, "ignore_merges");
  spec.eos_id = FindNamedToken(config, "eos_token", spec);
  spec.bos_id = FindNamedToken(config, "bos_token", spec);
  spec.add_bos = IsTrue(config, "add_bos_token") && spec.bos_id.has_value();
  spec.chat_template = ReadChatTemplate(config);
  return spec;
}

absl::StatusOr<VocabularySpec> ReadHuggingFaceVocabulary(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const fs::path file =
      fs::is_directory(path, ignored) ? fs::path(path) / "tokenizer.json" : fs::path(path);
  const fs::path directory = file.parent_path();
  BATON_ASSIGN_OR_RETURN(const std::string tokenizer_json,
                         base::ReadSmallFile(file.string(), kMaxTokenizerBytes));
  BATON_ASSIGN_OR_RETURN(const std::string config_json,
                         ReadOptionalFile((directory / "tokenizer_config.json").string()));
  auto spec = ParseHuggingFaceVocabulary(tokenizer_json, config_json);
  if (!spec.ok()) return Annotate(spec.status(), file.string());
  // transformers writes long templates to a file of their own, which then counts.
  BATON_ASSIGN_OR_RETURN(std::string jinja,
                         ReadOptionalFile((directory / "chat_template.jinja").string()));
  if (!jinja.empty()) spec->chat_template = std::move(jinja);
  return spec;
}

}  // namespace baton::text
