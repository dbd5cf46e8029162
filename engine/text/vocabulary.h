#pragma once

// What a tokenizer is made of, whatever file it came from.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "engine/text/token_id.h"

namespace baton::text {

// The values GGUF files use.
enum class TokenType : int32_t {
  kNormal = 1,       // written in GPT-2's byte alphabet
  kControl = 3,      // an added token that is flagged special; plain text
  kUserDefined = 4,  // an added token that is not; plain text
  kUnused = 5,       // a padding row of the embedding: no text
  kByte = 6,         // "<0x41>"
};

struct VocabularySpec {
  std::vector<std::string> tokens;  // by id
  std::vector<TokenType> types;     // by id; as long as tokens, or empty: all normal
  std::vector<std::string> merges;  // "left right" in GPT-2's byte alphabet, by rank
  std::string pre_tokenizer;        // "qwen2" or "smollm"
  std::optional<bool>
      normalize_nfc;  // absent: as the kind of pre-tokenizer implies (qwen2 yes, smollm no)
  bool whole_pieces_first = false;  // a piece that is a token is never merged differently
  std::optional<TokenId> bos_id;
  std::optional<TokenId> eos_id;
  bool add_bos = false;
  std::string chat_template;  // source text; empty: none
};

// The bytes that `text` stands for in GPT-2's byte alphabet, in which every byte is one printable
// character. Nothing when a character is not in the alphabet.
std::optional<std::string> DecodeByteAlphabet(absl::string_view text);
// The reverse.
std::string EncodeByteAlphabet(absl::string_view bytes);

// Readers. Errors: INVALID_ARGUMENT naming the file and the field that is wrong or not supported,
// NOT_FOUND. A tokenizer.json, with added_tokens_decoder, eos_token, bos_token and chat_template of
// the tokenizer_config.json beside it and the chat_template.jinja beside it, if they are there.
// `path` is the file or its directory.
absl::StatusOr<VocabularySpec> ReadHuggingFaceVocabulary(const std::string& path);
// The same from text; `config_json` may be empty.
absl::StatusOr<VocabularySpec> ParseHuggingFaceVocabulary(absl::string_view tokenizer_json,
                                                          absl::string_view config_json);

}  // namespace baton::text
