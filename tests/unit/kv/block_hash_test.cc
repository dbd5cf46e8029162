#include "engine/kv/block_hash.h"

#include <numeric>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "absl/strings/escaping.h"

namespace baton::kv {
namespace {

std::vector<uint32_t> TokensOf(int count, uint32_t first = 0) {
  std::vector<uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

std::string Hex(const BlockHash& hash) {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(hash.bytes.data()), hash.bytes.size()));
}

TEST(BlockHashTest, OnlyFullBlocksAreHashed) {
  const BlockHasher hasher("model", KvFormat::kFp8, "");
  EXPECT_EQ(hasher.HashBlocks(TokensOf(0)).size(), 0u);
  EXPECT_EQ(hasher.HashBlocks(TokensOf(63)).size(), 0u);
  EXPECT_EQ(hasher.HashBlocks(TokensOf(64)).size(), 1u);
  EXPECT_EQ(hasher.HashBlocks(TokensOf(127)).size(), 1u);
  EXPECT_EQ(hasher.HashBlocks(TokensOf(128)).size(), 2u);
}

TEST(BlockHashTest, EqualsSha256OfTheWrittenDownBytes) {
  // Python: root = sha256(b"16:baton-kv-block-1;5:model;3:fp8;2:64;0:;"), then
  // sha256(root.digest() + b"".join(t.to_bytes(4, "little") for t in range(64))).hexdigest()
  const BlockHasher hasher("model", KvFormat::kFp8, "");
  EXPECT_EQ(Hex(hasher.HashBlocks(TokensOf(64))[0]),
            "012e96d272e23beace319d5b37efc2443226a40d53506eee56ae3e003948cba2");
}

TEST(BlockHashTest, EverythingThatDecidesTheBytesDecidesTheHash) {
  const std::vector<uint32_t> tokens = TokensOf(64);
  std::vector<uint32_t> other = tokens;
  other[63] ^= 0x01000000;
  std::set<std::string> seen;
  seen.insert(Hex(BlockHasher("model", KvFormat::kFp8, "").HashBlocks(tokens)[0]));
  seen.insert(Hex(BlockHasher("model2", KvFormat::kFp8, "").HashBlocks(tokens)[0]));
  seen.insert(Hex(BlockHasher("model", KvFormat::kFp8Dynamic, "").HashBlocks(tokens)[0]));
  seen.insert(Hex(BlockHasher("model", KvFormat::kBf16, "").HashBlocks(tokens)[0]));
  seen.insert(Hex(BlockHasher("model", KvFormat::kFp8, "tenant").HashBlocks(tokens)[0]));
  seen.insert(Hex(BlockHasher("model", KvFormat::kFp8, "").HashBlocks(other)[0]));
  EXPECT_EQ(seen.size(), 6u);
}

TEST(BlockHashTest, FieldsCannotRunIntoOneAnother) {
  EXPECT_NE(BlockHasher("ab", KvFormat::kFp8, "c").root(),
            BlockHasher("a", KvFormat::kFp8, "bc").root());
}

TEST(BlockHashTest, ABlockAlsoNamesWhatComesBeforeIt) {
  const BlockHasher hasher("model", KvFormat::kFp8, "");
  std::vector<uint32_t> a = TokensOf(128);
  std::vector<uint32_t> b = a;
  b[0] = 999;
  EXPECT_NE(hasher.HashBlocks(a)[1], hasher.HashBlocks(b)[1]);
}

TEST(BlockHashTest, ExtendingTokenByTokenEqualsHashingAtOnce) {
  const BlockHasher hasher("model", KvFormat::kFp8, "salt");
  const std::vector<uint32_t> tokens = TokensOf(300);
  std::vector<BlockHash> hashes;
  for (size_t length = 0; length <= tokens.size(); ++length) {
    hasher.Extend(absl::MakeSpan(tokens).subspan(0, length), &hashes);
    ASSERT_EQ(hashes.size(), length / kBlockTokens);
  }
  EXPECT_EQ(hashes, hasher.HashBlocks(tokens));
}

TEST(BlockHashTest, TruncationKeepsTheFirstBits) {
  const std::vector<uint32_t> tokens = TokensOf(64);
  const BlockHash whole = BlockHasher("m", KvFormat::kF32, "").HashBlocks(tokens)[0];
  const BlockHash cut = BlockHasher("m", KvFormat::kF32, "", 8).HashBlocks(tokens)[0];
  EXPECT_EQ(cut.bytes[0], whole.bytes[0]);
  for (size_t i = 1; i < cut.bytes.size(); ++i) EXPECT_EQ(cut.bytes[i], 0);
}

}  // namespace
}  // namespace baton::kv
