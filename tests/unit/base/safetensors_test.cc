#include "engine/base/safetensors.h"

#include <sys/stat.h>

#include <filesystem>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/model_files.h"

namespace baton::base {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::Raw;
using testing_support::RawFloats;
using testing_support::SafetensorsBytes;
using testing_support::TempDir;

absl::StatusOr<std::vector<SafetensorsTensor>> Parse(const std::string& bytes) {
  return ParseSafetensors("model.safetensors",
                          {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
}

// The message of the refusal; "accepted" when there is none.
std::string Refusal(const std::string& bytes) {
  const auto tensors = Parse(bytes);
  if (tensors.ok()) return "accepted";
  EXPECT_THAT(std::string(tensors.status().message()), HasSubstr("file=model.safetensors"));
  return std::string(tensors.status().message());
}

std::string RefusalOfHeader(absl::string_view header, size_t data_bytes = 0) {
  return Refusal(SafetensorsBytes::WithHeader(header, std::string(data_bytes, '\0')));
}

std::string TwoTensors() {
  return SafetensorsBytes()
      .Add("a", "F32", {2, 3}, RawFloats({1, 2, 3, 4, 5, 6}))
      .Add("b", "BF16", {2}, std::string("\x80\x3f\x00\x40", 4))
      .Build();
}

TEST(SafetensorsTest, GivesTensorsWithShapeDtypeAndData) {
  const std::string bytes = TwoTensors();
  auto tensors = Parse(bytes);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_EQ(tensors->size(), 2u);
  EXPECT_EQ((*tensors)[0].name, "a");
  EXPECT_EQ((*tensors)[0].dtype, "F32");
  EXPECT_THAT((*tensors)[0].shape, ElementsAre(2, 3));
  EXPECT_EQ((*tensors)[0].data.size(), 24u);
  EXPECT_EQ((*tensors)[1].data.data(),
            reinterpret_cast<const uint8_t*>(bytes.data()) + bytes.size() - 4);
}

TEST(SafetensorsTest, AcceptsMetadataScalarsAndEmptyFiles) {
  EXPECT_EQ(RefusalOfHeader("{}"), "accepted");
  EXPECT_EQ(RefusalOfHeader(R"({"__metadata__":{"format":"pt"}}   )"), "accepted");
  EXPECT_EQ(Refusal(SafetensorsBytes().Add("scale", "F32", {}, RawFloats({0.5f})).Build()),
            "accepted");
}

// Case 19.1
TEST(SafetensorsTest, RefusesEveryWrongHeaderLength) {
  const std::string rest = TwoTensors().substr(8);
  const uint64_t file_size = rest.size() + 8;
  for (uint64_t length : {uint64_t{0}, uint64_t{7}, file_size - 7, file_size, file_size + 1,
                          uint64_t{1} << 31, uint64_t{1} << 63, ~uint64_t{0}}) {
    EXPECT_NE(Refusal(Raw(length) + rest), "accepted") << length;
  }
  EXPECT_THAT(Refusal(Raw(uint64_t{1} << 63) + rest), HasSubstr("above the limit of 100000000"));
  EXPECT_THAT(Refusal(Raw(file_size + 1) + rest), HasSubstr("but the file has"));
  for (size_t size = 0; size < 8; ++size) {
    EXPECT_THAT(Refusal(std::string(size, '\0')), HasSubstr("the length of the header takes 8"));
  }
}

// Case 19.1
TEST(SafetensorsTest, RefusesAHeaderThatIsNoJson) {
  EXPECT_NE(RefusalOfHeader("not json"), "accepted");
  EXPECT_NE(RefusalOfHeader("[]"), "accepted");
  EXPECT_NE(RefusalOfHeader("\xff\xfe{}"), "accepted");
  EXPECT_NE(RefusalOfHeader("{\"a\":"), "accepted");
}

// Case 19.1: refused at the first level too many, so 100 MB of them cost nothing.
TEST(SafetensorsTest, RefusesAHundredMegabytesOfNesting) {
  EXPECT_NE(RefusalOfHeader(std::string(kSafetensorsHeaderBytesMax, '[')), "accepted");
  std::string objects;
  for (int i = 0; i < 100000; ++i) objects.append("{\"a\":");
  EXPECT_NE(RefusalOfHeader(objects), "accepted");
}

// Case 19.2
TEST(SafetensorsTest, RefusesAFileThatIsShorterOrLongerThanItsHeaderSays) {
  std::string bytes = SafetensorsBytes().Add("w", "F32", {4096}, std::string(16384, 'x')).Build();
  ASSERT_EQ(Refusal(bytes), "accepted");
  for (size_t cut : {size_t{1}, size_t{4096}, bytes.size() / 2}) {
    EXPECT_THAT(Refusal(bytes.substr(0, bytes.size() - cut)), HasSubstr("tensor=\"w\""));
  }
  EXPECT_THAT(Refusal(bytes + "x"), HasSubstr("the file holds"));
}

TEST(SafetensorsTest, RefusesEntriesOfTheWrongKind) {
  for (const char* entry : {
           R"("w":1)",
           R"("w":{})",
           R"("w":{"dtype":"F32","shape":[1]})",
           R"("w":{"dtype":4,"shape":[1],"data_offsets":[0,4]})",
           R"("w":{"dtype":"F32","shape":1,"data_offsets":[0,4]})",
           R"("w":{"dtype":"F32","shape":[1],"data_offsets":[0]})",
           R"("w":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]})",
           R"("w":{"dtype":"F32","shape":[1],"data_offsets":["0",4]})",
           R"("w":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]})",
           R"("w":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]})",
           R"("w":{"dtype":"F32","shape":[1],"data_offsets":[4,0]})",
           R"("w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]})",
           R"("w":{"dtype":"F31","shape":[1],"data_offsets":[0,4]})",
           R"("w":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]})",
           R"("w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]})",
           R"("w":{"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4]})",
           R"("w":{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551616]})",
       }) {
    EXPECT_NE(RefusalOfHeader(absl::StrCat("{", entry, "}"), 4), "accepted") << entry;
  }
}

TEST(SafetensorsTest, RefusesOverlapsHolesAndNamesThatOccurTwice) {
  const auto pair = [](const char* first, const char* second) {
    return absl::StrCat(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[)", first,
                        R"(]},"b":{"dtype":"F32","shape":[1],"data_offsets":[)", second, "]}}");
  };
  EXPECT_EQ(RefusalOfHeader(pair("0,4", "4,8"), 8), "accepted");
  EXPECT_EQ(RefusalOfHeader(pair("4,8", "0,4"), 8), "accepted");
  EXPECT_NE(RefusalOfHeader(pair("0,4", "0,4"), 8), "accepted");
  EXPECT_NE(RefusalOfHeader(pair("0,4", "2,6"), 8), "accepted");
  EXPECT_NE(RefusalOfHeader(pair("0,4", "8,12"), 12), "accepted");
  EXPECT_NE(RefusalOfHeader(pair("4,8", "8,12"), 12), "accepted");
  EXPECT_NE(RefusalOfHeader(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                            R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                            2),
            "accepted");
}

// ---- directories

std::string OneTensor(const char* name) {
  return SafetensorsBytes().Add(name, "F32", {1}, RawFloats({1})).Build();
}

std::string Index(const std::string& shard) {
  return absl::StrCat(R"({"weight_map":{"a":"one.safetensors","b":)", shard, "}}");
}

TEST(SafetensorsModelTest, ReadsASingleFileAndShards) {
  TempDir single;
  single.Write("model.safetensors", TwoTensors());
  auto model = SafetensorsModel::Open(single.path());
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->tensors().size(), 2u);
  EXPECT_EQ((*model)->Find("c"), nullptr);

  TempDir shards;
  shards.Write("one.safetensors", OneTensor("a"));
  shards.Write("two.safetensors", OneTensor("b"));
  shards.Write("model.safetensors.index.json", Index("\"two.safetensors\""));
  model = SafetensorsModel::Open(shards.path());
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT((*model)->Find("b")->file->path(), HasSubstr("two.safetensors"));
}

TEST(SafetensorsModelTest, RefusesAnIndexThatDisagreesWithItsShards) {
  TempDir directory;
  directory.Write("one.safetensors", OneTensor("a"));
  directory.Write("two.safetensors", OneTensor("b"));
  const auto open = [&](absl::string_view index) {
    directory.Write("model.safetensors.index.json", index);
    return SafetensorsModel::Open(directory.path()).status();
  };
  EXPECT_THAT(std::string(open(Index("\"three.safetensors\"")).message()),
              HasSubstr("three.safetensors"));
  EXPECT_THAT(std::string(open(Index("7")).message()), HasSubstr("no string"));
  EXPECT_THAT(std::string(open("{}").message()), HasSubstr("no weight_map"));
  EXPECT_THAT(
      std::string(
          open(R"({"weight_map":{"a":"one.safetensors","x":"two.safetensors"}})").message()),
      HasSubstr("not in shard two.safetensors"));
  EXPECT_THAT(
      std::string(
          open(R"({"weight_map":{"b":"two.safetensors","a":"two.safetensors"}})").message()),
      HasSubstr("tensor=\"a\""));
  directory.Write("two.safetensors", SafetensorsBytes()
                                         .Add("b", "F32", {1}, RawFloats({1}))
                                         .Add("c", "F32", {1}, RawFloats({1}))
                                         .Build());
  EXPECT_THAT(std::string(open(Index("\"two.safetensors\"")).message()),
              HasSubstr("the shards hold 3"));
  directory.Write("two.safetensors", SafetensorsBytes()
                                         .Add("b", "F32", {1}, RawFloats({1}))
                                         .Add("a", "F32", {1}, RawFloats({1}))
                                         .Build());
  EXPECT_THAT(std::string(open(Index("\"two.safetensors\"")).message()),
              HasSubstr("tensor in two shards"));
}

// Case 19.3. A good file lies at every place a bad name leads to, so the name is what is refused.
TEST(SafetensorsModelTest, RefusesShardNamesThatLeadOutOfTheDirectory) {
  TempDir outside;
  const std::string target = outside.Write("x.safetensors", OneTensor("b"));
  TempDir directory;
  directory.Write("one.safetensors", OneTensor("a"));
  std::filesystem::create_directory(directory.File("sub"));
  directory.Write("sub/x.safetensors", OneTensor("b"));
  std::filesystem::create_directory(directory.File("dir.safetensors"));
  std::filesystem::create_symlink(target, directory.File("link.safetensors"));
  std::filesystem::create_symlink("sub/x.safetensors", directory.File("sublink.safetensors"));
  std::filesystem::create_symlink(outside.path(), directory.File("outdir"));
  ASSERT_EQ(mkfifo(directory.File("fifo.safetensors").c_str(), 0600), 0);
  const std::string up =
      absl::StrCat("../", std::filesystem::path(outside.path()).filename().string());
  for (const std::string& name :
       {absl::StrCat(up, "/x.safetensors"), std::string("../x.safetensors"), target,
        std::string("link.safetensors"), std::string("sublink.safetensors"),
        std::string("sub/x.safetensors"), std::string("outdir/x.safetensors"),
        std::string("one.safetensors\\u0000"), std::string("dir.safetensors"),
        std::string("fifo.safetensors"), std::string(), std::string("."), std::string(".."),
        std::string("a\\\\b.safetensors")}) {
    directory.Write("model.safetensors.index.json", Index(absl::StrCat("\"", name, "\"")));
    const absl::Status status = SafetensorsModel::Open(directory.path()).status();
    EXPECT_FALSE(status.ok()) << name;
  }
}

// Case 19.3: what Hugging Face's own cache does with links is accepted, and no more.
TEST(SafetensorsModelTest, AcceptsLinksWithinTheDirectoryAndIntoTheBlobsOfTheSameRepository) {
  TempDir cache;
  for (const char* folder : {"models--x/snapshots/rev", "models--x/blobs", "models--y/blobs"}) {
    std::filesystem::create_directories(cache.File(folder));
  }
  cache.Write("models--x/blobs/hash", OneTensor("a"));
  cache.Write("models--y/blobs/hash", OneTensor("a"));
  const std::string link = cache.File("models--x/snapshots/rev/model.safetensors");
  const auto open = [&](const char* target) {
    std::filesystem::remove(link);
    std::filesystem::create_symlink(target, link);
    return SafetensorsModel::Open(cache.File("models--x/snapshots/rev")).status();
  };
  cache.Write("models--x/snapshots/rev/real.safetensors", OneTensor("a"));
  EXPECT_TRUE(open("real.safetensors").ok());
  EXPECT_TRUE(open("../../blobs/hash").ok()) << open("../../blobs/hash");
  EXPECT_FALSE(open("../../../models--y/blobs/hash").ok());
}

// Case 19.2
TEST(SafetensorsModelTest, RefusesATruncatedShardOnDisk) {
  TempDir directory;
  const std::string bytes =
      SafetensorsBytes().Add("w", "F32", {4096}, std::string(16384, 'x')).Build();
  for (size_t cut : {size_t{1}, size_t{4096}, bytes.size() / 2}) {
    directory.Write("model.safetensors", absl::string_view(bytes).substr(0, bytes.size() - cut));
    const absl::Status status = SafetensorsModel::Open(directory.path()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("model.safetensors"));
  }
  directory.Write("model.safetensors", "");
  EXPECT_FALSE(SafetensorsModel::Open(directory.path()).ok());
}

}  // namespace
}  // namespace baton::base
