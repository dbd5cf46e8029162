#include "engine/text/tokenizer.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include <openssl/evp.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/text/nfc.h"

namespace baton::text {
namespace {

// Far above any published vocabulary; bounds what a hostile file can make us take.
constexpr size_t kMaxTokens = size_t{1} << 21;

// The ranges clipped to the text, sorted, and joined where they touch.
std::vector<TrustedRange> JoinRanges(absl::Span<const TrustedRange> ranges, size_t size) {
  std::vector<TrustedRange> sorted;
  for (TrustedRange range : ranges) {
    range.end = std::min(range.end, size);
    if (range.begin < range.end) sorted.push_back(range);
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const TrustedRange& a, const TrustedRange& b) { return a.begin < b.begin; });
  std::vector<TrustedRange> joined;
  for (const TrustedRange& range : sorted) {
    if (!joined.empty() && range.begin <= joined.back().end) {
      joined.back().end = std::max(joined.back().end, range.end);
    } else {
      joined.push_back(range);
    }
  }
  return joined;
}

// Feeds numbers and length-prefixed strings to SHA-256.
class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new()) {
    BATON_CHECK(EVP_DigestInit_ex(context_, EVP_sha256(), nullptr) == 1);
  }
  ~Sha256() { EVP_MD_CTX_free(context_); }
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Add(uint64_t number) {
    uint8_t bytes[8];
    for (int i = 0; i < 8; ++i) bytes[i] = static_cast<uint8_t>(number >> (8 * i));
    BATON_CHECK(EVP_DigestUpdate(context_, bytes, sizeof(bytes)) == 1);
  }
  void Add(absl::string_view text) {
    Add(uint64_t{text.size()});
    BATON_CHECK(EVP_DigestUpdate(context_, text.data(), text.size()) == 1);
  }
  std::string Hex() {
    uint8_t digest[EVP_MAX_MD_SIZE];
    unsigned int size = 0;
    BATON_CHECK(EVP_DigestFinal_ex(context_, digest, &size) == 1);
    return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(digest), size));
  }

 private:
  EVP_MD_CTX* context_;
};

// "<0x41>" -> "A".
std::optional<std::string> DecodeByteToken(absl::string_view text) {
  if (text.size() != 6 || text.substr(0, 3) != "<0x" || text[5] != '>') return std::nullopt;
  uint8_t byte = 0;
  const auto [end, error] = std::from_chars(text.data() + 3, text.data() + 5, byte, 16);
  if (error != std::errc() || end != text.data() + 5) return std::nullopt;
  return std::string(1, static_cast<char>(byte));
}

absl::StatusOr<std::string> BytesOf(const std::string& token, TokenType type, size_t id) {
  switch (type) {
    case TokenType::kControl:
    case TokenType::kUserDefined:
      if (token.empty())
        return absl::InvalidArgumentError(
            absl::StrCat("tokenizer: added token ", id, " has no text"));
      return token;
    case TokenType::kUnused:
      return std::string();
    case TokenType::kByte:
      if (auto byte = DecodeByteToken(token)) return *byte;
      return absl::InvalidArgumentError(
          absl::StrCat("tokenizer: token ", id, " is not of the form <0x41>"));
    case TokenType::kNormal:
      if (auto bytes = DecodeByteAlphabet(token); bytes && !bytes->empty())
        return *std::move(bytes);
      return absl::InvalidArgumentError(
          absl::StrCat("tokenizer: token ", id, " is empty or not written in the byte alphabet"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("tokenizer: token ", id, " has unknown type ", static_cast<int32_t>(type)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromVocabulary(VocabularySpec spec) {
  std::unique_ptr<Tokenizer> tokenizer(new Tokenizer());
  const auto kind = FindPreTokenizer(spec.pre_tokenizer);
  if (!kind) {
    return absl::InvalidArgumentError(absl::StrCat("tokenizer: pre-tokenizer \"",
                                                   absl::CHexEscape(spec.pre_tokenizer),
                                                   "\" is not supported; known are qwen2, smollm"));
  }
  tokenizer->pre_tokenizer_ = *kind;
  tokenizer->normalize_nfc_ = spec.normalize_nfc.value_or(*kind == PreTokenizerKind::kQwen2);
  BATON_ASSIGN_OR_RETURN(Bpe::TokenMap plain_tokens, tokenizer->SetTokens(spec));
  BATON_ASSIGN_OR_RETURN(const std::vector<BpeMerge> merges,
                         tokenizer->ReadMerges(spec, plain_tokens));
  tokenizer->bpe_ = std::make_unique<Bpe>(std::move(plain_tokens), tokenizer->bytes_.size(), merges,
                                          spec.whole_pieces_first);
  tokenizer->SetFingerprint(merges, spec.whole_pieces_first);

  for (const auto& id : {spec.bos_id, spec.eos_id}) {
    if (id && *id >= tokenizer->vocab_size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tokenizer: bos or eos id ", *id, " is past the vocabulary"));
    }
  }
  if (spec.add_bos && !spec.bos_id)
    return absl::InvalidArgumentError("tokenizer: add_bos without a bos id");
  tokenizer->bos_id_ = spec.bos_id;
  tokenizer->eos_id_ = spec.eos_id;
  tokenizer->add_bos_ = spec.add_bos;
  tokenizer->chat_template_ = std::move(spec.chat_template);
  return tokenizer;
}

absl::StatusOr<Bpe::TokenMap> Tokenizer::SetTokens(const VocabularySpec& spec) {
  if (spec.tokens.empty() || spec.tokens.size() > kMaxTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokenizer: ", spec.tokens.size(), " tokens, accepted are 1 to ", kMaxTokens));
  }
  if (!spec.types.empty() && spec.types.size() != spec.tokens.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tokenizer: ", spec.tokens.size(), " tokens but ", spec.types.size(), " token types"));
  }
  std::vector<size_t> ends;
  ends.reserve(spec.tokens.size());
  kinds_.reserve(spec.tokens.size());
  for (size_t id = 0; id < spec.tokens.size(); ++id) {
    const TokenType type = spec.types.empty() ? TokenType::kNormal : spec.types[id];
    BATON_ASSIGN_OR_RETURN(const std::string bytes, BytesOf(spec.tokens[id], type, id));
    arena_ += bytes;
    ends.push_back(arena_.size());
    kinds_.push_back(type == TokenType::kControl       ? Kind::kSpecial
                     : type == TokenType::kUserDefined ? Kind::kAdded
                                                       : Kind::kPlain);
  }
  // Padding rows at the end count for nothing, so that files with and without them give the same
  // tokenizer.
  while (!ends.empty() && ends.back() == (ends.size() > 1 ? ends[ends.size() - 2] : 0))
    ends.pop_back();
  kinds_.resize(ends.size());

  bytes_.reserve(ends.size());
  Bpe::TokenMap plain_tokens;
  plain_tokens.reserve(ends.size());
  for (TokenId id = 0; id < ends.size(); ++id) {
    const size_t begin = id == 0 ? 0 : ends[id - 1];
    const absl::string_view bytes = absl::string_view(arena_).substr(begin, ends[id] - begin);
    bytes_.push_back(bytes);
    if (bytes.empty()) continue;
    auto& ids = kinds_[id] == Kind::kPlain ? plain_tokens : added_ids_;
    const auto [it, inserted] = ids.try_emplace(bytes, id);
    if (!inserted) {
      return absl::InvalidArgumentError(
          absl::StrCat("tokenizer: tokens ", it->second, " and ", id, " are equal"));
    }
    if (kinds_[id] != Kind::kPlain) finder_.Add(bytes, id);
  }
  return plain_tokens;
}

absl::StatusOr<std::vector<BpeMerge>> Tokenizer::ReadMerges(
    const VocabularySpec& spec, const Bpe::TokenMap& plain_tokens) const {
  const auto find = [&](absl::string_view bytes) {
    const auto it = plain_tokens.find(bytes);
    return it == plain_tokens.end() ? kNoToken : it->second;
  };
  std::vector<BpeMerge> merges;
  merges.reserve(spec.merges.size());
  for (const absl::string_view merge : spec.merges) {
    const size_t space = std::min(merge.find(' '), merge.size());
    const auto left = DecodeByteAlphabet(merge.substr(0, space));
    const auto right = DecodeByteAlphabet(merge.substr(std::min(space + 1, merge.size())));
    if (!left || !right) {
      return absl::InvalidArgumentError(absl::StrCat("tokenizer: merge ", merges.size(),
                                                     " is not two tokens with a space between"));
    }
    const std::string joined = absl::StrCat(*left, *right);
    // Trained vocabularies number the results in the order of the merges.
    const TokenId next = merges.empty() ? 0 : merges.back().result + 1;
    const bool is_next = TokenBytes(next) == joined && kinds_[next] == Kind::kPlain;
    const BpeMerge ids = {find(*left), find(*right), is_next ? next : find(joined)};
    if (ids.left == kNoToken || ids.right == kNoToken || ids.result == kNoToken) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tokenizer: merge ", merges.size(), " is of tokens that are not in the vocabulary"));
    }
    merges.push_back(ids);
  }
  return merges;
}

void Tokenizer::SetFingerprint(const std::vector<BpeMerge>& merges, bool whole_pieces_first) {
  Sha256 sha;
  sha.Add("baton tokenizer 1");
  sha.Add(PreTokenizerName(pre_tokenizer_));
  sha.Add(uint64_t{normalize_nfc_});
  sha.Add(uint64_t{whole_pieces_first});
  sha.Add(uint64_t{bytes_.size()});
  for (TokenId id = 0; id < bytes_.size(); ++id) {
    sha.Add(static_cast<uint64_t>(kinds_[id]));
    sha.Add(bytes_[id]);
  }
  for (const BpeMerge& merge : merges) {
    sha.Add(uint64_t{merge.left});
    sha.Add(uint64_t{merge.right});
    sha.Add(uint64_t{merge.result});
  }
  fingerprint_ = sha.Hex();
}

std::optional<TokenId> Tokenizer::FindToken(absl::string_view content) const {
  const auto added = added_ids_.find(content);
  return added != added_ids_.end() ? added->second : bpe_->Find(content);
}

std::vector<TokenId> Tokenizer::Encode(absl::string_view text, SpecialPolicy policy) const {
  if (policy == SpecialPolicy::kLiteral) return EncodeWithTrusted(text, {});
  return EncodeWithTrusted(text, {TrustedRange{0, text.size()}});
}

std::vector<TokenId> Tokenizer::EncodeWithTrusted(absl::string_view text,
                                                  absl::Span<const TrustedRange> trusted) const {
  std::vector<TokenId> ids;
  ids.reserve(text.size() / 4 + 1);
  std::string storage;
  size_t stretch_begin = 0;
  for (const TrustedRange& range : JoinRanges(trusted, text.size())) {
    size_t pos = range.begin;
    while (const auto match = finder_.Find(text, pos, range.end)) {
      EncodeStretch(text.substr(stretch_begin, match->begin - stretch_begin), &storage, &ids);
      ids.push_back(match->id);
      stretch_begin = pos = match->end;
    }
  }
  EncodeStretch(text.substr(stretch_begin), &storage, &ids);
  return ids;
}

void Tokenizer::EncodeStretch(absl::string_view text,
                              std::string* storage,
                              std::vector<TokenId>* ids) const {
  if (text.empty()) return;
  const absl::string_view clean =
      normalize_nfc_ ? ToNfc(text, storage) : ToValidUtf8(text, storage);
  PreTokenizer pieces(pre_tokenizer_, clean);
  for (absl::string_view piece = pieces.Next(); !piece.empty(); piece = pieces.Next())
    bpe_->Encode(piece, ids);
}

std::string Tokenizer::Decode(absl::Span<const TokenId> ids, bool skip_special) const {
  std::string text;
  Utf8Stream stream;
  for (const TokenId id : ids) stream.Push(TextBytes(id, !skip_special), &text);
  stream.Flush(&text);
  return text;
}

std::string IncrementalDecoder::Push(TokenId id) {
  std::string delta;
  stream_.Push(tokenizer_.TextBytes(id, !skip_special_), &delta);
  return delta;
}

std::string IncrementalDecoder::Flush() {
  std::string rest;
  stream_.Flush(&rest);
  return rest;
}

}  // namespace baton::text
