#pragma once

// Text to token ids and back. Only the router encodes; workers use the id -> bytes table.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "engine/base/gguf.h"
#include "engine/text/added_tokens.h"
#include "engine/text/bpe.h"
#include "engine/text/pre_tokenizer.h"
#include "engine/text/token_id.h"
#include "engine/text/utf8_stream.h"
#include "engine/text/vocabulary.h"

namespace baton::text {

enum class SpecialPolicy {
  kLiteral,  // nothing in the text becomes an added token: what untrusted text needs
  kParse,    // added tokens are recognised anywhere in the text
};

// A range of bytes [begin, end) in which added tokens are recognised.
struct TrustedRange {
  size_t begin;
  size_t end;
};

// A byte-level BPE tokenizer. Immutable and thread-safe once made.
class Tokenizer {
 public:
  // `path` names a Hugging Face directory, a tokenizer.json or a GGUF file.
  // Errors: as the three below.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& path);
  // `path` names tokenizer.json or the directory that holds it; added_tokens_decoder, the end token
  // and the chat template come from the files beside it.
  // Errors: NOT_FOUND; INVALID_ARGUMENT naming the file and the field that is wrong or not supported.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> LoadHuggingFace(const std::string& path);
  // From the tokenizer.* metadata of a GGUF file.
  // Errors: INVALID_ARGUMENT naming the key that is missing, wrong or not supported.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> LoadGguf(const base::GgufFile& file);
  // Errors: INVALID_ARGUMENT naming what is wrong.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromVocabulary(VocabularySpec spec);

  // Prepends and appends nothing. Bytes that are not UTF-8 count as U+FFFD.
  std::vector<TokenId> Encode(absl::string_view text, SpecialPolicy policy) const;
  // Recognises added tokens only where they lie wholly inside trusted ranges; everything else is
  // plain text. Text is never cut at the border of a range. Ranges may touch or overlap; parts past
  // the end of the text are ignored.
  std::vector<TokenId> EncodeWithTrusted(absl::string_view text,
                                         absl::Span<const TrustedRange> trusted) const;

  // The bytes a token stands for; empty for padding ids and ids past the vocabulary.
  absl::string_view TokenBytes(TokenId id) const {
    return id < bytes_.size() ? bytes_[id] : absl::string_view();
  }
  // The bytes a token adds to an answer's text: none for special tokens, unless they are to be
  // shown.
  absl::string_view TextBytes(TokenId id, bool show_special) const {
    return IsSpecial(id) && !show_special ? absl::string_view() : TokenBytes(id);
  }
  // A control token, flagged special in the file.
  bool IsSpecial(TokenId id) const { return id < kinds_.size() && kinds_[id] == Kind::kSpecial; }
  // A token that stands outside BPE, special or not.
  bool IsAdded(TokenId id) const { return id < kinds_.size() && kinds_[id] != Kind::kPlain; }
  // Ids are below this; the model's embedding may have more rows, which stand for nothing.
  size_t vocab_size() const { return bytes_.size(); }
  // The added token whose text is `content`, else the plain token with these bytes.
  std::optional<TokenId> FindToken(absl::string_view content) const;

  // SHA-256, hexadecimal, over the content (tokens, kinds, merges, pre-tokenizer, normalisation),
  // not over file bytes: equal for the same tokenizer saved in another way.
  const std::string& fingerprint() const { return fingerprint_; }

  // The text of `ids`; what is not UTF-8 becomes U+FFFD.
  std::string Decode(absl::Span<const TokenId> ids, bool skip_special) const;

  // Source text of the chat template found in the files, "" if there is none.
  const std::string& chat_template() const { return chat_template_; }
  std::optional<TokenId> bos_id() const { return bos_id_; }
  std::optional<TokenId> eos_id() const { return eos_id_; }
  // Whether the model wants bos_id() in front of raw prompts. The caller puts it there.
  bool add_bos() const { return add_bos_; }

 private:
  enum class Kind : uint8_t { kPlain, kAdded, kSpecial };

  Tokenizer() = default;
  // Fills the tables by id; returns the plain tokens by their bytes.
  absl::StatusOr<Bpe::TokenMap> SetTokens(const VocabularySpec& spec);
  absl::StatusOr<std::vector<BpeMerge>> ReadMerges(const VocabularySpec& spec,
                                                   const Bpe::TokenMap& plain_tokens) const;
  void SetFingerprint(const std::vector<BpeMerge>& merges, bool whole_pieces_first);
  void EncodeStretch(absl::string_view text, std::string* storage, std::vector<TokenId>* ids) const;

  std::string arena_;                     // the bytes of all tokens, one after the other
  std::vector<absl::string_view> bytes_;  // by id, views of arena_
  std::vector<Kind> kinds_;               // by id
  absl::flat_hash_map<absl::string_view, TokenId> added_ids_;  // by text
  AddedTokenFinder finder_;
  std::unique_ptr<Bpe> bpe_;
  PreTokenizerKind pre_tokenizer_ = PreTokenizerKind::kQwen2;
  bool normalize_nfc_ = true;
  std::string fingerprint_;
  std::string chat_template_;
  std::optional<TokenId> bos_id_;
  std::optional<TokenId> eos_id_;
  bool add_bos_ = false;
};

// Token ids to text, one at a time, for one stream. Thread-compatible.
class IncrementalDecoder {
 public:
  // `tokenizer` must outlive the decoder.
  explicit IncrementalDecoder(const Tokenizer& tokenizer, bool skip_special = false)
      : tokenizer_(tokenizer), skip_special_(skip_special) {}

  // Valid UTF-8: all that later ids cannot change any more.
  std::string Push(TokenId id);
  // The rest: U+FFFD for an unfinished character, or nothing.
  std::string Flush();

 private:
  const Tokenizer& tokenizer_;
  const bool skip_special_;
  Utf8Stream stream_;
};

}  // namespace baton::text
