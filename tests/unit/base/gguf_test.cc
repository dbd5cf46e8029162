#include "engine/base/gguf.h"

#include <sys/stat.h>

#include <cstring>
#include <limits>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/model_files.h"

namespace baton::base {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::GgufBytes;
using testing_support::Raw;
using testing_support::RawFloats;
using testing_support::ReadWhole;

constexpr char kGolden[] = BATON_SOURCE_DIR "/tests/golden/gguf/formats.gguf";

absl::StatusOr<std::unique_ptr<GgufFile>> Parse(const std::string& bytes) {
  return GgufFile::Parse("model.gguf",
                         {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
}

// The message of the refusal; "accepted" when there is none.
std::string Refusal(const std::string& bytes) {
  const auto file = Parse(bytes);
  if (file.ok()) return "accepted";
  EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument) << file.status();
  EXPECT_THAT(std::string(file.status().message()), HasSubstr("file=model.gguf"));
  return std::string(file.status().message());
}

GgufBytes OneTensor() {
  return GgufBytes().AddTensor("w", 0, {4, 2}, RawFloats({0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST(GgufTest, ReadsEveryKindOfMetadata) {
  auto opened = GgufFile::Open(kGolden);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const GgufFile& file = **opened;
  EXPECT_EQ(file.FindInt("test.u8"), 255);
  EXPECT_EQ(file.FindInt("test.i8"), -128);
  EXPECT_EQ(file.FindInt("test.u16"), 65535);
  EXPECT_EQ(file.FindInt("test.i16"), -32768);
  EXPECT_EQ(file.FindU32("test.u32"), 4294967295u);
  EXPECT_EQ(file.FindInt("test.i32"), -2147483648ll);
  EXPECT_EQ(file.FindU32("test.i32"), std::nullopt);
  EXPECT_EQ(file.FindInt("test.i64"), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(file.FindInt("test.u64"), std::nullopt);  // does not fit
  EXPECT_EQ(file.FindFloat("test.f32"), 0.1f);
  EXPECT_EQ(file.FindFloat("test.f64"), 0.1);
  EXPECT_EQ(file.FindBool("test.bool"), true);
  EXPECT_EQ(file.FindString("test.string"), "h\u00e9llo \U0001fae0");
  EXPECT_THAT(*file.FindStringArray("test.strings"), ElementsAre("", "a", "\u9f9c"));
  EXPECT_THAT(*file.FindIntArray("test.ints"), ElementsAre(1, -2, 3));
  EXPECT_THAT(*file.FindFloatArray("test.floats"), ElementsAre(0.5f, -0.25f));
}

TEST(GgufTest, AnswersNothingForAbsentKeysAndOtherKinds) {
  auto opened = GgufFile::Open(kGolden);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const GgufFile& file = **opened;
  EXPECT_FALSE(file.HasKey("no.such.key"));
  EXPECT_EQ(file.FindString("no.such.key"), std::nullopt);
  EXPECT_EQ(file.FindString("test.u8"), std::nullopt);
  EXPECT_EQ(file.FindInt("test.string"), std::nullopt);
  EXPECT_EQ(file.FindInt("test.bool"), std::nullopt);
  EXPECT_EQ(file.FindFloat("test.u32"), std::nullopt);
  EXPECT_EQ(file.FindStringArray("test.ints"), std::nullopt);
  EXPECT_EQ(file.FindIntArray("test.strings"), std::nullopt);
  EXPECT_EQ(file.FindIntArray("test.floats"), std::nullopt);
  EXPECT_EQ(file.FindTensor("no.such.tensor"), nullptr);
}

TEST(GgufTest, GivesTensorsWithShapeAndData) {
  const std::string bytes = OneTensor().AddTensor("q", 8, {32}, std::string(34, '\1')).Build();
  auto file = Parse(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  const GgufTensor* tensor = (*file)->FindTensor("w");
  ASSERT_NE(tensor, nullptr);
  EXPECT_THAT(tensor->shape, ElementsAre(4, 2));
  EXPECT_EQ(tensor->format, WeightFormat::kF32);
  ASSERT_EQ(tensor->data.size(), 32u);
  EXPECT_EQ(memcmp(tensor->data.data(), RawFloats({0, 1, 2, 3, 4, 5, 6, 7}).data(), 32), 0);
  EXPECT_EQ((*file)->FindTensor("q")->data.size(), 34u);
}

// Case 19.2: at whatever byte the file is cut, it is refused.
TEST(GgufTest, RefusesEveryTruncation) {
  const std::string bytes =
      OneTensor().AddString("k", "value").AddStrings("list", {"a", "bc"}).AddU32("n", 7).Build();
  ASSERT_EQ(Refusal(bytes), "accepted");
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_NE(Refusal(bytes.substr(0, size)), "accepted")
        << "cut to " << size << " of " << bytes.size();
  }
}

// Case 19.1
TEST(GgufTest, RefusesHugeLengthsWithoutTakingMemory) {
  const uint64_t kHuge[] = {uint64_t{1} << 32, uint64_t{1} << 62, uint64_t{1} << 63, ~uint64_t{0}};
  for (uint64_t huge : kHuge) {
    EXPECT_THAT(Refusal("GGUF" + Raw(uint32_t{3}) + Raw(huge) + Raw(uint64_t{0})),
                HasSubstr("tensors"));
    EXPECT_THAT(Refusal("GGUF" + Raw(uint32_t{3}) + Raw(uint64_t{0}) + Raw(huge)),
                HasSubstr("keys"));
    EXPECT_THAT(Refusal("GGUF" + Raw(uint32_t{3}) + Raw(uint64_t{0}) + Raw(uint64_t{1}) +
                        Raw(huge) + "key"),
                HasSubstr("truncated in a key"));
    for (uint32_t type : {GgufBytes::kU8, GgufBytes::kI32, GgufBytes::kString, GgufBytes::kU64}) {
      EXPECT_THAT(
          Refusal(GgufBytes().Add("list", GgufBytes::kArray, Raw(type) + Raw(huge)).Build()),
          HasSubstr("truncated"));
    }
    EXPECT_THAT(Refusal(GgufBytes().Add("text", GgufBytes::kString, Raw(huge)).Build()),
                HasSubstr("truncated"));
    EXPECT_THAT(Refusal(GgufBytes().AddTensorAt("w", 0, {huge}, 0).Build()),
                HasSubstr("cannot fit"));
    EXPECT_THAT(Refusal(GgufBytes().AddTensorAt("w", 0, {8, huge}, 0).Build()),
                HasSubstr("cannot fit"));
    EXPECT_THAT(Refusal(GgufBytes().AddTensorAt("w", 0, {8}, huge / 32 * 32).Build()),
                HasSubstr("the file holds"));
  }
}

TEST(GgufTest, RefusesWhatItDoesNotUnderstandByName) {
  EXPECT_THAT(Refusal("GGML" + std::string(64, '\0')), HasSubstr("does not start with \"GGUF\""));
  EXPECT_THAT(Refusal(OneTensor().Build(1)), HasSubstr("version 1"));
  EXPECT_THAT(Refusal(OneTensor().Build(4)), HasSubstr("version 4"));
  EXPECT_THAT(Refusal(OneTensor().Build(0x03000000)), HasSubstr("big-endian"));
  EXPECT_THAT(Refusal(GgufBytes().AddTensor("w", 10, {256}, std::string(84, '\0')).Build()),
              HasSubstr("tensor \"w\" has GGML type 10, accepted: f32 f16"));
  EXPECT_THAT(Refusal(GgufBytes().Add("k", 13, "").Build()), HasSubstr("type 13"));
  EXPECT_THAT(
      Refusal(GgufBytes().Add("k", GgufBytes::kArray, Raw(uint32_t{9}) + Raw(uint64_t{1})).Build()),
      HasSubstr("type 9"));
}

TEST(GgufTest, RefusesContradictions) {
  EXPECT_THAT(Refusal(GgufBytes().AddU32("k", 1).AddU32("k", 2).Build()),
              HasSubstr("\"k\" occurs twice"));
  EXPECT_THAT(Refusal(OneTensor().AddTensor("w", 0, {1}, RawFloats({1})).Build()),
              HasSubstr("\"w\" occurs twice"));
  EXPECT_THAT(Refusal(OneTensor().AddTensorAt("v", 0, {4}, 0).Build()), HasSubstr("overlap"));
  EXPECT_THAT(Refusal(OneTensor().AddTensorAt("v", 0, {1}, 4).Build()),
              HasSubstr("no multiple of 32"));
  EXPECT_THAT(Refusal(GgufBytes().AddTensor("w", 8, {16}, std::string(34, '\0')).Build()),
              HasSubstr("rows of 16 values, no multiple of 32"));
  EXPECT_THAT(Refusal(GgufBytes().AddTensor("w", 0, {}, "").Build()), HasSubstr("0 dimensions"));
  EXPECT_THAT(Refusal(GgufBytes().AddTensor("w", 0, {1, 1, 1, 1, 1}, RawFloats({1})).Build()),
              HasSubstr("5 dimensions"));
  EXPECT_THAT(Refusal(GgufBytes().AddTensorAt("w", 0, {0}, 0).Build()), HasSubstr("size 0"));
  for (uint32_t alignment : {0u, 4u, 24u, 1u << 21}) {
    EXPECT_THAT(Refusal(OneTensor().AddU32("general.alignment", alignment).Build()),
                HasSubstr("general.alignment"));
  }
}

TEST(GgufTest, ObeysTheAlignmentOfTheFile) {
  EXPECT_EQ(
      Refusal(OneTensor().AddU32("general.alignment", 8).AddTensorAt("v", 0, {0 + 1}, 24).Build())
          .find("accepted"),
      std::string::npos);  // 24 is aligned now, but lies inside the first tensor
  std::string bytes = OneTensor().AddU32("general.alignment", 64).Build();
  bytes.append(64, '\0');  // the data may now begin up to 63 bytes later
  EXPECT_EQ(Refusal(bytes), "accepted");
}

TEST(GgufTest, RefusesWhatIsNoRegularFile) {
  testing_support::TempDir directory;
  EXPECT_EQ(GgufFile::Open(directory.path()).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(GgufFile::Open(directory.File("missing")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(GgufFile::Open(directory.Write("empty", "")).status().code(),
            absl::StatusCode::kInvalidArgument);
  ASSERT_EQ(mkfifo(directory.File("fifo").c_str(), 0600), 0);
  EXPECT_EQ(GgufFile::Open(directory.File("fifo")).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace baton::base
