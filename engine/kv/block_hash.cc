#include "engine/kv/block_hash.h"

#include <openssl/sha.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"

namespace baton::kv {
namespace {

BlockHash Sha256(const void* data, size_t size) {
  BlockHash hash;
  SHA256(static_cast<const uint8_t*>(data), size, hash.bytes.data());
  return hash;
}

// With its length in front, so that no two lists of fields have the same bytes.
void AppendField(absl::string_view field, std::string* out) {
  absl::StrAppend(out, field.size(), ":", field, ";");
}

}  // namespace

BlockHasher::BlockHasher(absl::string_view model_fingerprint,
                         KvFormat format,
                         absl::string_view salt,
                         int hash_bits)
    : hash_bits_(hash_bits) {
  BATON_CHECK(hash_bits > 0 && hash_bits <= 256 && hash_bits % 8 == 0);
  std::string fields;
  AppendField("baton-kv-block-1", &fields);
  AppendField(model_fingerprint, &fields);
  AppendField(KvFormatName(format), &fields);
  AppendField(absl::StrCat(kBlockTokens), &fields);
  AppendField(salt, &fields);
  root_ = Sha256(fields.data(), fields.size());
}

BlockHash BlockHasher::Next(const BlockHash& parent, absl::Span<const uint32_t> tokens) const {
  BATON_CHECK(tokens.size() == kBlockTokens);
  std::array<uint8_t, sizeof(parent.bytes) + 4 * kBlockTokens> input;
  std::memcpy(input.data(), parent.bytes.data(), parent.bytes.size());
  uint8_t* out = input.data() + parent.bytes.size();
  for (uint32_t token :
       tokens) {  // little-endian on every machine: router and workers compare hashes
    for (int shift = 0; shift < 32; shift += 8) *out++ = static_cast<uint8_t>(token >> shift);
  }
  return Truncated(Sha256(input.data(), input.size()));
}

std::vector<BlockHash> BlockHasher::HashBlocks(absl::Span<const uint32_t> tokens) const {
  std::vector<BlockHash> hashes;
  hashes.reserve(tokens.size() / kBlockTokens);
  Extend(tokens, &hashes);
  return hashes;
}

void BlockHasher::Extend(absl::Span<const uint32_t> tokens, std::vector<BlockHash>* hashes) const {
  while ((hashes->size() + 1) * kBlockTokens <= tokens.size()) {
    const BlockHash& parent = hashes->empty() ? root_ : hashes->back();
    hashes->push_back(Next(parent, tokens.subspan(hashes->size() * kBlockTokens, kBlockTokens)));
  }
}

BlockHash BlockHasher::Truncated(BlockHash hash) const {
  for (size_t i = static_cast<size_t>(hash_bits_) / 8; i < hash.bytes.size(); ++i)
    hash.bytes[i] = 0;
  return hash;
}

}  // namespace baton::kv
